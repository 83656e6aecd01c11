"""A drafter on the host that nobody waits for is asked all the same, by what is known already: is it worth a wait?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from slipstream.drafters.base import DraftRequest
from slipstream.drafters.guard import DrafterGuard, Failure
from slipstream.engine.state import Answer
from slipstream.plan.planner import Planner

_NODES = 24
"""Of a guess that is only looked at."""


class Peek(NamedTuple):
    """is_worth: does it have so much to say that it is waited for? failures: requests for which it could not guess."""

    is_worth: bool = False
    failures: Mapping[str, Failure] = {}


def peek(planner: Planner, guard: DrafterGuard, answers: Sequence[Answer], round_s: float) -> Peek:
    """What this drafter would say of these. A round is under way by which they go on: it knows of the one before."""
    name = guard.drafter.name
    if guard.drafter.costly or guard.drafter.whole or guard.dropped is not None or not guard.is_quick:
        return Peek()
    mine = [answer for answer in answers if name in answer.drafters and name not in answer.refused]
    mine = [mine[i] for i in planner.peeks(name, len(answers), len(mine))] if mine else []
    if not mine:
        return Peek()
    said = guard.propose([cast(DraftRequest, answer.view) for answer in mine], [_NODES] * len(mine), round_s)
    is_worth = planner.peek(name, [answer.id for answer in mine], said.trees, said.promises, len(answers))
    return Peek(is_worth, said.failures)
