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
    params, out, tokens = answer.params, answer.output, verdict.usable
    if tokens and not out.token_ids:
        out.timing.first_token_s = time.perf_counter() - answer.job.arrived
    length = len(answer.tokens) - len(tokens)
    for i, token in enumerate(tokens):
        length += 1
        out.token_ids.append(token)
        if out.logprobs is not None and logprobs is not None:
            out.logprobs.append(logprobs[i])
        generated = length - answer.prompt_length
        early = generated < params.min_tokens
        if token in answer.end_ids and not early:
            chosen = token in params.stop_token_ids
            if chosen and params.include_stop_str_in_output:
                answer.text.push(token, may_stop=False)
            answer.end("stop", stop=token if chosen else None)
        elif (stop := answer.text.push(token, may_stop=not early)) is not None:
            answer.end("stop", stop=stop)
        elif generated >= params.max_tokens or length >= max_len:
            answer.end("length")
        if out.origins is not None:
            out.origins.append(_origin(answer, verdict, i))
        if answer.ended:
            del answer.tokens[length:]
            return
    out.text = answer.text.visible


def _origin(answer: Answer, verdict: Verdict, place: int) -> Origin:
    """Whose token it is. The round is counted when it is over."""
    depth = place + 1 if place < verdict.accepted else 0
    return Origin(answer.output.speculation.rounds + 1, depth, verdict.guessers(place), answer.text.length)
