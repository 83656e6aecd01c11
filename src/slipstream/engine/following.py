"""Device drafters with a cache of their own: who reads along with a request, and who has something to catch up on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DeviceDrafter, Drafter
from slipstream.engine.plans import Plan
from slipstream.engine.state import Answer


class Following:
    """Notes in `Answer.behind` how much such drafters have read of a request that they do not follow."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        on_device = {name: d for name, d in drafters.items() if isinstance(d, DeviceDrafter)}
        self._drafters = {name: drafter for name, drafter in on_device.items() if drafter.needs.own_cache}

    def follows(self, answers: Sequence[Answer], plan: Plan) -> None:
        """Note whose device drafter stops following, because it guesses for nobody in this round.

        Where it guesses for one, it reads the last tokens of all, and what its last draft left to be read again.
        """
        idle = self._drafters.keys() - {size.drafter for size in plan.drafts}
        if not idle:
            return
        for answer in answers:
            for name in answer.drafters:
                if name in idle and name not in answer.behind:
                    drafter = self._drafters[name]
                    answer.behind[name] = max(0, answer.cached - max(drafter.depth, drafter.rereads - 1))

    def falls_behind(self, answer: Answer, verdict: Verdict) -> None:
        """Note where others' guesses went on without a device drafter's: what it read there is not what was said."""
        if verdict.accepted < 2 or len(answer.drafters) < 2:
            return
        for name in answer.drafters:
            if name in self._drafters and name not in answer.behind:
                share, drafter = verdict.share(name), self._drafters[name]
                kept = max(0, min(share.accepted, share.drafted - 1))  # its last guess is not read
                # one that reads the target's hidden states must read its own guesses again as well
                missed = verdict.accepted - (0 if drafter.taps else kept)
                if missed >= drafter.rereads:
                    answer.behind[name] = max(0, answer.cached - missed)
