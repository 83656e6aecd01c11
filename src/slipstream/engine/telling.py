"""What a round emitted is given out in two parts: first to whom it ends or begins, then to the others.

Of many requests it takes the host milliseconds to make text and to report it, and meanwhile the next round is not
queued. Only a few of them must come first: an answer that ends leaves its place to another, and a first token is waited
for. What the others got is given out when the next round is queued and the device is at work, before the host hears of
another round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.core.errors import RequestError
from slipstream.core.outputs import FinishReason
from slipstream.engine.engine import Engine
from slipstream.engine.listening import RoundTimes
from slipstream.engine.state import Job
from slipstream.engine.tickets import EmittedRows, Heard, Member

FEW = 8
"""Requests of a round that are told at once, all of them: that takes less than a round of one is late by."""
_NO_ROWS = torch.empty((0, 0), dtype=torch.int64)
"""Where nobody reads logits, nobody asks where they lie."""


@dataclass(frozen=True, slots=True)
class _Untold:
    """A round of which some have not been told. kept: how many tokens each of them got, of those who have."""

    heard: Heard
    times: RoundTimes
    kept: list[int]
    left: tuple[int, ...]  # by their numbers among the members


class TellingEngine(Engine):
    """An `Engine` that hears of rounds and gives out later what they emitted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._untold: _Untold | None = None

    def fail_all(self, error: BaseException) -> None:
        self._untold = None
        super().fail_all(error)

    def _end(self, job: Job, reason: FinishReason, error: RequestError) -> None:
        self._tell_rest()
        super()._end(job, reason, error)

    def _times(self, heard: Heard) -> RoundTimes:
        """How long the round took."""
        raise NotImplementedError

    def _tell(self, heard: Sequence[Heard]) -> None:
        """Give out what rounds emitted: text, stops, log probabilities, reports to the callers."""
        for part in heard:
            self._tell_first(part)
            self._tell_rest()

    def _tell_first(self, heard: Heard) -> None:
        """The same, but only to those who cannot wait."""
        self._tell_rest()
        members = heard.members
        numbers = range(len(members))
        waits = len(members) > FEW and not heard.ticket.reads_logits
        left = tuple([i for i in numbers if not _is_urgent(members[i])]) if waits else ()
        self._untold = _Untold(heard, self._times(heard), [0] * len(members), left)
        self._give(self._untold, [i for i in numbers if i not in left] if left else numbers)
        if not left:
            self._tell_rest()

    def _tell_rest(self) -> None:
        """To everybody who was not told yet. A round counts when all of them were."""
        untold, self._untold = self._untold, None
        if untold is not None:
            if untold.left:
                self._give(untold, untold.left)
            answers = [member.answer for member in untold.heard.members]
            self._count_round(answers, untold.heard.verdicts, untold.kept, untold.times)

    def _give(self, untold: _Untold, numbers: Sequence[int]) -> None:
        """These members' part of a round."""
        heard = untold.heard
        answers = tuple([heard.members[i].answer for i in numbers])
        verdicts = [heard.verdicts[i] for i in numbers]
        logits = heard.ticket.all_logits()
        rows = EmittedRows(answers, _NO_ROWS if logits is None else heard.row_of())
        kept = self._emit(rows, verdicts, logits)
        for i, count in zip(numbers, kept, strict=True):
            untold.kept[i] = count
        self._share_out(answers, verdicts, kept, untold.times, len(heard.members))
        for answer in answers:
            answer.closing = False
        self._report(answers)


def _is_urgent(member: Member) -> bool:
    """Does its answer end by what it got, or may it, or is that its first token?"""
    answer = member.answer
    params = answer.params
    return answer.closing or not member.decodes or bool(params.stop) or answer.generated >= params.max_tokens
