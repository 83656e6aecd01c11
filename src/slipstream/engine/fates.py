"""What became of a drafter's part in a round, answer by answer: counted, and noted for when somebody asks why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.core.draft import Tree
from slipstream.core.outputs import DrafterStats
from slipstream.core.snapshot import Undrafted
from slipstream.drafters.guard import Proposals
from slipstream.engine.state import Answer
from slipstream.plan.decisions import Decision

UNASKED = "off: not asked, since of late its guesses won nothing, or less than another's"
COMPARED = "off: its rounds were plain, to compare drafted ones with"
SILENT = "off: it had no guess"
LATE = "off: it was late"
UNWEIGHED = ""
"""Its guesses are taken as they come: there is nothing to say of that."""
PASSING = frozenset((UNASKED, COMPARED, SILENT, LATE, UNWEIGHED))
"""What is said where nothing was ever weighed for an answer, and where no limit of its own kept it from guesses."""


class Fates:
    """Of one engine. Words are put together when an answer ends, and not here: this runs every round."""

    def __init__(self, undrafted: dict[Undrafted, int], totals: Mapping[str, DrafterStats]) -> None:
        self._undrafted, self._totals = undrafted, totals

    def weigh(
        self,
        name: str,
        decision: Decision | None,
        answers: Sequence[Answer],
        had: Sequence[int | Tree],
        taken: Sequence[int | Tree],
    ) -> None:
        """It was decided what is taken of what there was, or could have been. Who had nothing has no part in it."""
        kept, passed = (UNWEIGHED, UNWEIGHED) if decision is None else (decision, decision.for_others())
        for answer, before, after in zip(answers, had, taken, strict=True):
            if before:
                answer.decided[name] = kept if after else passed
                if not after:
                    self.decline(name, answer)

    def decline(self, name: str, answer: Answer) -> None:
        self._undrafted["declined"] += 1
        self._totals[name].declined += 1
        answer.output.speculation.of(name).declined += 1

    def skip(self, name: str, answer: Answer) -> None:
        """It was not even asked."""
        answer.decided.setdefault(name, UNASKED)
        self.decline(name, answer)

    def fall_silent(self, name: str, answers: Sequence[Answer], caps: Sequence[int], proposals: Proposals) -> None:
        """It was asked, and had nothing to say for some of them, or was late."""
        silent = [a for a, most, tree in zip(answers, caps, proposals.trees, strict=True) if most and not tree]
        self._undrafted["late" if proposals.late else "no_guess"] += len(silent)
        why = LATE if proposals.late else SILENT
        for answer in silent:
            if answer.decided.get(name, UNASKED) in (UNASKED, COMPARED):
                answer.decided[name] = why
