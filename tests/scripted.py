"""Drafters for tests. They know the plain answers, so that what becomes of their drafts is known beforehand."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from typing import ClassVar

from slipstream.core.draft import ROOT, Tree
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, HostDrafter

VOCAB = 300

Key = tuple[tuple[int, ...], int | None, int]
"""What an answer depends on, where every seed goes with one set of parameters: prompt, seed, which of the samples."""


class Answers:
    """The plain answers: told to the drafters before they are asked."""

    def __init__(self) -> None:
        self._tokens: dict[Key, list[int]] = {}

    def tell(self, prompt: Sequence[int], seed: int | None, tokens: Sequence[int], sample: int = 0) -> None:
        self._tokens[tuple(prompt), seed, sample] = list(tokens)

    def rest(self, request: DraftRequest) -> list[int]:
        """What plain decoding emits from here on, up to the end of the answer."""
        sample = int(request.id.partition("/")[2] or 0)
        prompt = tuple(request.tokens[: request.prompt_length])
        return self._tokens[prompt, request.params.seed, sample][len(request.tokens) - request.prompt_length :]


def depth_right(tree: Tree, rest: Sequence[int]) -> int:
    """How many nodes of the tree plain decoding walks along."""
    at, depth = ROOT, 0
    children = {
        (parent, token): node for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True))
    }
    while depth < len(rest) and (at, rest[depth]) in children:
        at = children[at, rest[depth]]
        depth += 1
    return depth


class Scripted(HostDrafter):
    """Drafts `tree(request, rest, budget)`, and notes what it heard. `due` is what ought to be accepted."""

    bounded: ClassVar[bool] = True  # in place, so that nothing here depends on the clock
    default_draft_tokens: ClassVar[int] = 6

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.forget()

    def forget(self) -> None:
        self.verdicts: list[Verdict] = []
        self.due = 0
        self.stopped: list[str] = []

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self._one(request, nodes) for request, nodes in zip(requests, budget, strict=True)]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.verdicts.extend(verdicts)

    def stop(self, request_id: str) -> None:
        self.stopped.append(request_id)

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        raise NotImplementedError

    def _one(self, request: DraftRequest, budget: int) -> Tree:
        rest = self.answers.rest(request)
        tree = self.tree(request, rest, budget)
        self.due += depth_right(tree, rest)
        return tree


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


class Right(Scripted):
    """Always right."""

    name: ClassVar[str] = "right"

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        return Tree.chain(rest[:budget])


class Wrong(Scripted):
    """Never right, at no node."""

    name: ClassVar[str] = "wrong"

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        return Tree.chain([wrong(token) for token in rest[:budget]])


class RightThenWrong(Scripted):
    """Right for two tokens, then wrong: the fourth guess is again what plain decoding would have there."""

    name: ClassVar[str] = "right_then_wrong"
    right: ClassVar[int] = 2

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        guess = [wrong(token) if i == self.right else token for i, token in enumerate(rest[:budget])]
        return Tree.chain(guess)


class Bushy(Scripted):
    """Random trees with the right path somewhere among up to 63 nodes, seldom in the order of the nodes."""

    name: ClassVar[str] = "bushy"
    default_draft_tokens: ClassVar[int] = 63
    grows_right: ClassVar[bool] = True

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        dice = random.Random(1000 * (request.params.seed or 0) + len(request.tokens))
        nearby = [*rest[:8], *map(wrong, rest[:4]), *request.tokens[-4:]]  # repeats what came, and guesses early
        tokens: list[int] = []
        parents: list[int] = []
        taken: set[tuple[int, int]] = set()
        tip, depth = ROOT, 0  # of the right path
        goal, haste = dice.randint(0, 7), dice.choice((0.08, 0.2, 0.5))  # where the path ends, and how early
        for _ in range(4 * budget):
            if len(tokens) == budget:
                break
            if self.grows_right and depth < min(goal, len(rest)) and dice.random() < haste:
                parent, token = tip, rest[depth]
            else:
                parent, token = dice.randint(max(ROOT, len(tokens) - 12), len(tokens) - 1), dice.choice(nearby)
            is_right = parent == tip and depth < len(rest) and token == rest[depth]
            if (parent, token) in taken or (is_right and not self.grows_right):
                continue
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            if is_right:
                tip, depth = len(tokens) - 1, depth + 1
        return Tree(tuple(tokens), tuple(parents))


class BushyWrong(Bushy):
    """The same trees without the right first token."""

    name: ClassVar[str] = "bushy_wrong"
    grows_right: ClassVar[bool] = False


class Nonsense(Scripted):
    """Returns what is no tree of guesses."""

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        return Tree.chain(rest[:budget])


class TooLarge(Nonsense):
    name: ClassVar[str] = "id_too_large"

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        return Tree.chain([*rest[:budget][:-1], VOCAB])


class Negative(Nonsense):
    name: ClassVar[str] = "negative_id"

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        return Tree.chain([*rest[:budget][:-1], -1])


class Twins(Nonsense):
    """Duplicate siblings."""

    name: ClassVar[str] = "twins"

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        return Tree((rest[0], rest[0]), (ROOT, ROOT)) if budget > 1 else Tree((VOCAB,), (ROOT,))


class BadParents(Nonsense):
    name: ClassVar[str] = "bad_parents"

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        return Tree((rest[0],), (0,))  # its own parent


class OverBudget(Nonsense):
    name: ClassVar[str] = "over_budget"

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [Tree.chain([7] * (nodes + 1)) for nodes in budget]


class ReturnsNone(Nonsense):
    name: ClassVar[str] = "returns_none"

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return None  # type: ignore[return-value]


class NoneForEach(Nonsense):
    name: ClassVar[str] = "none_for_each"

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [None for _ in requests]  # type: ignore[misc]


class Raises(Nonsense):
    name: ClassVar[str] = "raises"

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        raise RuntimeError("out of ideas")


class RaisesInStart(Right):
    name: ClassVar[str] = "raises_in_start"

    def start(self, request: DraftRequest) -> None:
        raise RuntimeError("not today")


class RaisesInObserve(Right):
    name: ClassVar[str] = "raises_in_observe"

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        raise RuntimeError("I do not want to know")


class RaisesForSome(Right):
    """Always right, but raises for the requests with these seeds."""

    name: ClassVar[str] = "raises_for_some"
    hates: frozenset[int] = frozenset()

    def tree(self, request: DraftRequest, rest: list[int], budget: int) -> Tree:
        if request.params.seed in self.hates:
            raise RuntimeError(f"not for {request.id}")
        return super().tree(request, rest, budget)


class Hangs(Right):
    """Waits until it is let go."""

    name: ClassVar[str] = "hangs"
    bounded: ClassVar[bool] = False

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self.let_go = threading.Event()

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        self.let_go.wait()
        return super().propose(requests, budget)


class LateOnce(Right):
    """Its first draft comes when the round is over: it waits for the tokens of that round. Then it is always right."""

    name: ClassVar[str] = "late_once"
    bounded: ClassVar[bool] = False
    was_late: bool = False

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        if not self.was_late:
            self.was_late = True
            length, tick = len(requests[0].tokens), threading.Event()
            while len(requests[0].tokens) == length:
                tick.wait(0.001)
        return super().propose(requests, budget)


GOOD: tuple[type[Scripted], ...] = (Right, Wrong, RightThenWrong, Bushy, BushyWrong)
BAD: tuple[type[Scripted], ...] = (
    TooLarge,
    Negative,
    Twins,
    BadParents,
    OverBudget,
    ReturnsNone,
    NoneForEach,
    Raises,
    RaisesInStart,
    RaisesInObserve,
    RaisesForSome,
)


def all_scripted(answers: Answers) -> Mapping[str, Scripted]:
    return {kind.name: kind(answers) for kind in (*GOOD, *BAD)}
