"""Where an answer ends: end-of-text, stop ids, stop strings and limits, also in the middle of an accepted run.

Text, ids, log probabilities and counts are cut at the same token; nothing comes after.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from slipstream.core.outputs import Logprob, Origin
from slipstream.core.verdict import Verdict
from slipstream.engine.state import Answer


def emit(answer: Answer, verdict: Verdict, logprobs: Sequence[Mapping[int, Logprob]] | None, max_len: int) -> None:
    """Give out the verdict's tokens, which the answer ends with, one by one, until it is over or they are.

    The rest is cut off.
    """
    params, out, text, tokens = answer.params, answer.output, answer.text, verdict.usable
    if tokens and not out.token_ids:
        out.timing.first_token_s = time.perf_counter() - answer.job.arrived
    length, prompt = len(answer.tokens) - len(tokens), answer.prompt_length
    longest = min(params.max_tokens, max_len - prompt)
    for i, token in enumerate(tokens):
        length += 1
        out.token_ids.append(token)
        if out.logprobs is not None and logprobs is not None:
            out.logprobs.append(logprobs[i])
        generated = length - prompt
        early = generated < params.min_tokens
        if token in answer.end_ids and not early:
            chosen = token in params.stop_token_ids
            if chosen and params.include_stop_str_in_output:
                text.push(token, may_stop=False)
            answer.end("stop", stop=token if chosen else None)
        elif (stop := text.push(token, may_stop=not early)) is not None:
            answer.end("stop", stop=stop)
        elif generated >= longest:
            answer.end("length")
        if out.origins is not None:
            out.origins.append(_origin(answer, verdict, i))
        if answer.ended:
            del answer.tokens[length:]
            return
    out.text = text.visible


def _origin(answer: Answer, verdict: Verdict, place: int) -> Origin:
    """Whose token it is. The round is counted when it is over."""
    depth = place + 1 if place < verdict.accepted else 0
    return Origin(answer.output.speculation.rounds + 1, depth, verdict.guessers(place), answer.text.length)
