"""The lag of device drafters with a cache of their own: which follow a request, and which must catch up on tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DeviceDrafter, Drafter
from slipstream.engine.draft_loops import Drafts
from slipstream.engine.drafts import Plan
from slipstream.engine.state import Answer


class Following:
    """Keeps `Answer.behind` (tokens read by drafters that stopped following) and `Answer.missed` up to date.

    A draft reads the last tokens again, up to `DeviceDrafter.reaches`. A drafter lags only if it is further behind.
    """

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        on_device = {name: d for name, d in drafters.items() if isinstance(d, DeviceDrafter)}
        self._drafters = {name: drafter for name, drafter in on_device.items() if drafter.needs.own_cache}

    def keeps(self, name: str) -> bool:
        """Whether this drafter has a cache of its own, which can be behind."""
        return name in self._drafters

    def follows(self, answers: Sequence[Answer], plan: Plan) -> None:
        """Record which drafters stop following in this step, and which follow again.

        A drafter that guesses for one request reads the last tokens of all; one that guesses for none stops.
        """
        drafting = {size.drafter for size in plan.drafts}
        idle = self._drafters.keys() - drafting
        for answer in answers:
            if answer.behind:
                for name in drafting.intersection(answer.behind):
                    if not self._lags(answer, name, len(answers)):
                        del answer.behind[name]
            if idle:
                for name in answer.drafters:
                    if name in idle and name not in answer.behind:
                        # the tokens at the beginning of a step in flight were read in that step
                        answer.behind[name] = answer.cached - (0 if answer.queued else answer.missed.get(name, 0))

    def falls_behind(self, answer: Answer, verdict: Verdict) -> None:
        """Record which drafters read other tokens than were accepted, because another's guesses stood."""
        answer.missed.clear()
        if not verdict.accepted:
            return
        for name in answer.drafters:
            if name not in self._drafters:
                continue
            drafter, known = self._drafters[name], answer.behind.get(name)
            drafted, accepted = verdict.counts(name)
            began = answer.cached - len(verdict.tokens)
            if known is not None and not (drafted and known == began):  # not stopped while this step was in flight
                continue
            kept = max(0, min(accepted, drafted - 1))  # its last guess is not read
            # a drafter that reads the target's hidden states must read its own guesses again, too
            missed = verdict.accepted - (0 if drafter.taps else kept)
            if known is not None or missed >= drafter.rereads:
                answer.behind[name] = max(0, answer.cached - missed)
            elif missed:
                answer.missed[name] = missed

    def lagging(self, answers: Sequence[Answer], plan: Plan) -> dict[str, list[Answer]]:
        """By device drafter: the answers that it is to guess for and lags behind."""
        lagging: dict[str, list[Answer]] = {}
        for answer, shares in zip(answers, plan.shares, strict=True):
            if answer.behind:
                for name, _ in shares:
                    if name in answer.behind and self._lags(answer, name, len(answers)):
                        lagging.setdefault(name, []).append(answer)
        return lagging

    def lags(self, name: str, answers: Sequence[Answer], requests: int) -> list[str]:
        """The ids of the answers that a drafter would lag behind in a step of this many requests."""
        behind = [answer for answer in answers if name in answer.behind]
        reaches = self._drafters[name].reaches(requests) if behind else 0
        return [answer.id for answer in behind if _most_tokens(answer) - answer.behind[name] > reaches]

    def recent(self, answers: Sequence[Answer], drafts: Drafts) -> int:
        """The most last tokens of an answer that drafts must read again. Answers that a drafter lags behind are left
        out: it continues to lag."""
        most = 0
        for name in [size.drafter for size in drafts if size.drafter in self._drafters]:
            reaches = self._drafters[name].reaches(len(answers))
            unread = [self._unread(answer, name) for answer in answers if name in answer.drafters]
            most = max([most, *[count for count in unread if count <= reaches]])
        return most

    def _unread(self, answer: Answer, name: str) -> int:
        """Last tokens that the drafter may not have read.

        It counts the most that the last step may commit, even if its result is known already, so that a draft has the
        same size in both cases. A drafter that missed more has an entry in `behind`.
        """
        if name in answer.behind:
            return _most_tokens(answer) - answer.behind[name]
        drafter = self._drafters[name]
        alone = not answer.guessers or answer.guessers == (name,)
        return drafter.unread(answer.stride) if alone else min(answer.stride, drafter.rereads)

    def _lags(self, answer: Answer, name: str, requests: int) -> bool:
        return _most_tokens(answer) - answer.behind[name] > self._drafters[name].reaches(requests)


def _most_tokens(answer: Answer) -> int:
    """Most tokens that it may have before the next step: one in flight adds at most the depth of its draft and one."""
    return len(answer.tokens) + min(answer.coming, answer.stride)
