"""Log probabilities for the requests that asked: of the raw model, before temperature, penalties and masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.outputs import Logprob
from slipstream.core.verdict import Verdict
from slipstream.engine.state import Answer
from slipstream.engine.text import Decoder
from slipstream.sampling.choose import raw_logprobs

Position = Mapping[int, Logprob]


class Emitting(Protocol):
    """A pass whose rows can be found."""

    @property
    def emitting(self) -> tuple[Answer, ...]: ...  # [E]

    @property
    def row_of(self) -> Tensor: ...  # [E, K + 1]: which row of the logits is a request's root (column 0) or node


class LogprobReader:
    """Reads the rows of a pass that were emitted. Work is done only for requests that want it."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def read(self, packed: Emitting, verdicts: Sequence[Verdict], logits: Tensor | None) -> list[list[Position] | None]:
        """For each emitting request its emitted tokens' log probabilities, or None where not asked for."""
        wanted = [i for i, a in enumerate(packed.emitting) if a.params.logprobs is not None]
        out: list[list[Position] | None] = [None] * len(verdicts)
        if not wanted or logits is None:
            return out
        columns = [(i, 0 if j == 0 else 1 + v.path[j - 1]) for i in wanted for j, v in _emitted(verdicts[i])]
        chosen = [v.tokens[j] for i in wanted for j, v in _emitted(verdicts[i])]
        if not chosen:
            return out
        rows = packed.row_of[tuple(torch.tensor(columns, device=packed.row_of.device).T)].to(logits.device)
        most = max(packed.emitting[i].params.logprobs or 0 for i in wanted)
        raw = raw_logprobs(logits[rows], torch.tensor(chosen, device=logits.device), most)
        values, ranks = raw.chosen.tolist(), raw.ranks.tolist()
        top_ids, top_values = raw.top_ids.tolist(), raw.top.tolist()
        at = 0
        for i in wanted:
            count = packed.emitting[i].params.logprobs or 0
            positions: list[Position] = []
            for _, token in zip(_emitted(verdicts[i]), chosen[at:], strict=False):
                top = dict(zip(top_ids[at][:count], top_values[at][:count], strict=True))
                entry = {t: Logprob(value, rank + 1, self._text(t)) for rank, (t, value) in enumerate(top.items())}
                entry.setdefault(token, Logprob(values[at], ranks[at], self._text(token)))
                positions.append(entry)
                at += 1
            out[i] = positions
        return out

    def _text(self, token: int) -> str:
        return self._decoder.decode([token], skip_special_tokens=False)


def _emitted(verdict: Verdict) -> list[tuple[int, Verdict]]:
    return [(j, verdict) for j, token in enumerate(verdict.tokens) if token >= 0]
