"""Device drafters with a cache of their own: who reads along with a request, and who has something to catch up on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DeviceDrafter, Drafter
from slipstream.engine.draft_loops import Drafts
from slipstream.engine.drafts import Plan
from slipstream.engine.state import Answer


class Following:
    """Notes in `Answer.behind` how much such drafters have read of a request that they do not follow.

    A draft reads the last tokens again, as far as it `reaches`: who is not further behind has nothing to catch up on.
    """

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        on_device = {name: d for name, d in drafters.items() if isinstance(d, DeviceDrafter)}
        self._drafters = {name: drafter for name, drafter in on_device.items() if drafter.needs.own_cache}

    def follows(self, answers: Sequence[Answer], plan: Plan) -> None:
        """Note whose device drafter stops following, because it guesses for nobody in this round, and whose goes on.

        Where it guesses for one, it reads the last tokens of all.
        """
        drafting = {size.drafter for size in plan.drafts}
        idle = self._drafters.keys() - drafting
        for answer in answers:
            if answer.behind:
                for name in drafting.intersection(answer.behind):
                    if not self._is_lagging(answer, name, len(answers)):
                        del answer.behind[name]
            if idle:
                for name in answer.drafters:
                    if name in idle and name not in answer.behind:
                        # what a round under way began with was read in it
                        answer.behind[name] = answer.cached - (0 if answer.queued else answer.missed.get(name, 0))

    def falls_behind(self, answer: Answer, verdict: Verdict) -> None:
        """Note where guesses went on without a device drafter's: what it read there is not what was said."""
        answer.missed.clear()
        if not verdict.accepted:
            return
        for name in answer.drafters:
            if name not in self._drafters:
                continue
            drafter, known = self._drafters[name], answer.behind.get(name)
            drafted, accepted = verdict.counts(name)
            began = answer.cached - len(verdict.tokens)
            if known is not None and not (drafted and known == began):  # … it stopped while this was under way
                continue
            kept = max(0, min(accepted, drafted - 1))  # its last guess is not read
            # one that reads the target's hidden states must read its own guesses again as well
            missed = verdict.accepted - (0 if drafter.taps else kept)
            if known is not None or missed >= drafter.rereads:
                answer.behind[name] = max(0, answer.cached - missed)
            elif missed:
                answer.missed[name] = missed

    def lagging(self, answers: Sequence[Answer], plan: Plan) -> dict[str, list[Answer]]:
        """By device drafter: those for whom it is to guess, though it is further behind than its draft reads again."""
        lagging: dict[str, list[Answer]] = {}
        for answer, shares in zip(answers, plan.shares, strict=True):
            if answer.behind:
                for name, _ in shares:
                    if name in answer.behind and self._is_lagging(answer, name, len(answers)):
                        lagging.setdefault(name, []).append(answer)
        return lagging

    def keeps(self, name: str) -> bool:
        """Has this one a cache of its own, so that it can be behind?"""
        return name in self._drafters

    def lags(self, name: str, answers: Sequence[Answer], requests: int) -> list[str]:
        """Those of these for whom a drafter would be so far behind, in a round of so many requests."""
        behind = [answer for answer in answers if name in answer.behind]
        if not behind:
            return []
        reaches = self._drafters[name].reaches(requests)
        return [answer.id for answer in behind if _most_tokens(answer) - answer.behind[name] > reaches]

    def recent(self, answers: Sequence[Answer], drafts: Drafts) -> int:
        """Last tokens of one of these that drafts have to read. Who is further behind is not heeded: it stays so."""
        most = 0
        for name in [size.drafter for size in drafts if size.drafter in self._drafters]:
            reaches = self._drafters[name].reaches(len(answers))
            unread = [self._unread(answer, name) for answer in answers if name in answer.drafters]
            most = max([most, *[count for count in unread if count <= reaches]])
        return most

    def _unread(self, answer: Answer, name: str) -> int:
        """Of its last tokens, by what the last round may have committed, though it be over: a draft that was begun
        before that was known is of the same size then. Who missed more is noted in `behind`."""
        if name in answer.behind:
            return _most_tokens(answer) - answer.behind[name]
        drafter = self._drafters[name]
        alone = not answer.guessers or answer.guessers == (name,)
        return drafter.unread(answer.stride) if alone else min(answer.stride, drafter.rereads)

    def _is_lagging(self, answer: Answer, name: str, requests: int) -> bool:
        return _most_tokens(answer) - answer.behind[name] > self._drafters[name].reaches(requests)


def _most_tokens(answer: Answer) -> int:
    """That it may have before the next round: one under way commits no more than its drafts are deep, and one."""
    return len(answer.tokens) + min(answer.coming, answer.stride)
