"""What a round emitted is given out in two parts: first to whom it ends or begins, then to the others.

Of many requests it takes the host milliseconds to make text and to report it, and meanwhile the next round is not
queued. Only a few of them must come first: an answer that ends leaves its place to another, and a first token is waited
for. What the others got is given out when the next round is queued and the device is at work, before the host hears of
another round.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.core.errors import RequestError
from slipstream.core.outputs import FinishReason
from slipstream.engine.engine import Engine
from slipstream.engine.listening import RoundListener, RoundTimes
from slipstream.engine.state import Answer, Job
from slipstream.engine.tickets import EmittedRows, Heard, Member

FEW = 8
"""Requests of a round that are told at once, all of them. To tell one takes some 25 us: of eight that is no more than
the host has to spare in any round."""
_NO_ROWS = torch.empty((0, 0), dtype=torch.int64)
"""Where nobody reads logits, nobody asks where they lie."""


@dataclass(frozen=True, slots=True)
class _Untold:
    """A round of which some have not been told."""

    heard: Heard
    times: RoundTimes
    kept: list[int]  # how many tokens each member got, of those who were told
    left: tuple[int, ...]  # who was not, by their numbers among the members


class TellingEngine(Engine):
    """An `Engine` that hears of rounds and gives out later what they emitted. Nobody hears of a round before everybody
    was told of the one before it. An owner of several answers may hear of a round twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._untold: _Untold | None = None

    def listen(self, listener: RoundListener | None, *, all_guesses: bool = False) -> None:
        self._tell_rest()  # a round belongs to whoever listened when it began to be told
        super().listen(listener, all_guesses=all_guesses)

    def fail_all(self, error: BaseException) -> None:
        with suppress(Exception):  # that may be what failed
            self._tell_rest()
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
        assert self._untold is None, "others wait for an earlier round"
        times, members = self._times(heard), heard.members
        self._count_round(len(members), times)
        at_once = len(members) <= FEW or heard.ticket.reads_logits  # the next round overwrites the logits
        first: list[int] = []
        left: list[int] = []
        for number, member in enumerate(members):
            (first if at_once or _is_urgent(member) else left).append(number)
        untold = _Untold(heard, times, [0] * len(members), tuple(left))
        answers = self._give(untold, first)
        if left:
            self._untold = untold
        else:
            self._over(untold)
        self._report(answers)

    def _tell_rest(self) -> None:
        """To everybody who was not told yet."""
        untold, self._untold = self._untold, None
        if untold is not None:
            answers = self._give(untold, untold.left)
            self._over(untold)
            self._report(answers)

    def _give(self, untold: _Untold, numbers: Sequence[int]) -> tuple[Answer, ...]:
        """These members' part of a round, into their outputs."""
        heard = untold.heard
        answers = tuple([heard.members[i].answer for i in numbers])
        verdicts = [heard.verdicts[i] for i in numbers]
        logits = heard.ticket.all_logits()  # where there are some, these are all of the members
        rows = EmittedRows(answers, _NO_ROWS if logits is None else heard.row_of())
        kept = self._emit(rows, verdicts, logits)
        for i, count in zip(numbers, kept, strict=True):
            untold.kept[i] = count
        self._share_out(answers, verdicts, kept, untold.times, len(heard.members))
        for answer in answers:
            answer.closing = False
        return answers

    def _over(self, untold: _Untold) -> None:
        """All members have what they got."""
        answers = [member.answer for member in untold.heard.members]
        self._tell_listener(answers, untold.heard.verdicts, untold.kept, untold.times)


def _is_urgent(member: Member) -> bool:
    """Does its answer end by what it got, or may it, or is that its first token?"""
    answer = member.answer
    params = answer.params
    return answer.closing or not member.decodes or bool(params.stop) or answer.generated >= params.max_tokens
