"""Where an answer ends: end-of-text, stop ids, stop strings and limits, also in the middle of an accepted run.

Text, ids, log probabilities and counts are cut at the same token; nothing comes after.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from slipstream.core.outputs import Logprob
from slipstream.engine.state import Answer


def emit(answer: Answer, tokens: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]] | None, max_len: int) -> None:
    """Give out `tokens`, which the answer ends with, one by one, until it is over or they are. The rest is cut off."""
    params, out = answer.params, answer.output
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
        if answer.ended:
            del answer.tokens[length:]
            return
    out.text = answer.text.visible
