"""From a verdict to an answer's output: tokens, text, log probabilities, and where the answer ends.

Ends are end-of-text, stop ids, stop strings and limits, also in the middle of an accepted run. Text, ids, log
probabilities and counts are cut at the same token; nothing comes after.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.core.outputs import Logprob, Origin
from slipstream.core.verdict import Verdict
from slipstream.engine.state import Answer
from slipstream.engine.text import Decoder
from slipstream.sampling.choose import raw_logprobs


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


Position = Mapping[int, Logprob]


class LogprobReader:
    """Reads log probabilities of the raw model, before temperature, penalties and masks, for requests that asked."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def read(
        self,
        answers: Sequence[Answer],
        verdicts: Sequence[Verdict],
        logits: Tensor | None,  # [R, V]
        row_of: Tensor | None,  # [E, K + 1]: the row of each answer's root (column 0) and nodes
    ) -> list[list[Position] | None]:
        """For each answer the log probabilities of its emitted tokens; None if it did not ask."""
        wanted = [i for i, answer in enumerate(answers) if answer.params.logprobs is not None]
        out: list[list[Position] | None] = [None] * len(verdicts)
        if not wanted or logits is None or row_of is None:
            return out
        chosen = [token for i in wanted for token in verdicts[i].usable]
        if not chosen:
            return out
        nodes = {i: (0, *[1 + node for node in verdicts[i].path]) for i in wanted}  # the columns of emitted tokens
        cells = [(i, column) for i in wanted for column in nodes[i][: len(verdicts[i].usable)]]
        rows = row_of[tuple(torch.tensor(cells, device=row_of.device).T)].to(logits.device)
        counts = {i: answers[i].params.logprobs or 0 for i in wanted}
        raw = raw_logprobs(logits[rows], torch.tensor(chosen, device=logits.device), max(counts.values()))
        values, ranks = raw.chosen.tolist(), raw.ranks.tolist()
        top_ids, top_values = raw.top_ids.tolist(), raw.top.tolist()
        at = 0
        for i in wanted:
            positions: list[Position] = []
            for token in verdicts[i].usable:
                top = dict(zip(top_ids[at][: counts[i]], top_values[at][: counts[i]], strict=True))
                entry = {t: Logprob(value, rank + 1, self._text(t)) for rank, (t, value) in enumerate(top.items())}
                entry.setdefault(token, Logprob(values[at], ranks[at], self._text(token)))
                positions.append(entry)
                at += 1
            out[i] = positions
        return out

    def _text(self, token: int) -> str:
        return self._decoder.decode([token], skip_special_tokens=False)
