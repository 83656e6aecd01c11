"""How many nodes a drafter may guess for a request: limits of the drafter, the request, the context and the pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.core.draft import MAX_NODES, Tree
from slipstream.drafters.base import DeviceDrafter, Drafter, HostDrafter
from slipstream.engine.state import Answer
from slipstream.plan.choose import level_choices
from slipstream.plan.types import NO_MEMORY, NO_TOKENS, Levels, little_memory

SHORT = "off: cache is short"

_ON_DEVICE = 2
"""`Traits.turn` of device drafters."""


def most_nodes(drafter: Drafter) -> int:
    """The most nodes that a drafter guesses for a request."""
    return drafter.most_nodes if isinstance(drafter, DeviceDrafter) else MAX_NODES


def made_for(drafter: Drafter) -> int:
    """The nodes that a drafter guesses for a request by default."""
    return min(drafter.default_draft_tokens, most_nodes(drafter))


def reach(drafter: Drafter) -> int:
    """The most nodes that a planner may ask of a drafter by default."""
    return max(made_for(drafter), min(drafter.planned_draft_tokens, most_nodes(drafter)))


def levels_of(drafter: Drafter) -> tuple[Levels, ...]:
    """The numbers of levels that a device drafter's trees may have, ascending; () for chains and host drafters."""
    if not (isinstance(drafter, DeviceDrafter) and drafter.makes_trees):
        return ()
    counts = level_choices(drafter.depth) if drafter.grows else (drafter.depth,)
    return tuple(Levels(count, drafter.most_at(count)) for count in counts)


def judged_nodes(drafters: Sequence[Drafter], draft_tokens: int | None) -> int:
    """The most nodes of a request under rejection sampling: there is memory for the distributions of these.

    Twice the default of the drafters that report distributions, which leaves room for others beside them.
    draft_tokens: the engine's own limit.
    """
    told = sum(made_for(drafter) for drafter in drafters if drafter.needs.probabilities)
    return min(MAX_NODES, 2 * told if draft_tokens is None else draft_tokens)


@dataclass(frozen=True, slots=True)
class Traits:
    """What the engine needs to know of a drafter. It never changes."""

    turn: int  # order of asking: free host drafters, costly host drafters, device drafters
    most_nodes: int
    made_for: int
    reach: int
    levels: tuple[Levels, ...]
    ends: int | None  # longest context that it can draft in
    is_wide: bool  # more nodes do not make its trees deeper, so an answer that ends soon is no reason for fewer
    is_whole: bool  # as `HostDrafter.whole`
    source: str  # as `HostDrafter.source`
    tells_q: bool
    reads_choices: bool

    @staticmethod
    def of(drafter: Drafter) -> Traits:
        host = drafter if isinstance(drafter, HostDrafter) else None
        makes_trees = isinstance(drafter, DeviceDrafter) and drafter.makes_trees
        return Traits(
            turn=_ON_DEVICE if host is None else int(host.costly),
            most_nodes=most_nodes(drafter),
            made_for=made_for(drafter),
            reach=reach(drafter),
            levels=levels_of(drafter),
            ends=drafter.max_positions,
            is_wide=makes_trees or (host is not None and host.whole),
            is_whole=host is not None and host.whole,
            source="" if host is None else host.source,
            tells_q=drafter.needs.probabilities,
            reads_choices=drafter.needs.choices,
        )

    @property
    def on_device(self) -> bool:
        return self.turn == _ON_DEVICE

    @property
    def is_free(self) -> bool:
        """Whether its guesses take no noticeable time."""
        return self.turn == 0


class NodeCaps:
    """The caps of an engine's drafters.

    draft_tokens: the engine's limit for a request. places: of the cache, for the guesses of all requests.
    """

    def __init__(
        self,
        traits: Mapping[str, Traits],
        *,
        draft_tokens: int | None,
        judged_nodes: int,
        max_rows: int,
        max_len: int,
        places: int | None = None,
    ) -> None:
        self._traits = traits
        self._together: dict[tuple[str, ...], int] = {}  # by drafters: the sum of their defaults
        self._telling = frozenset(name for name, traits in traits.items() if traits.tells_q)
        self._judged_nodes = judged_nodes
        self._draft_tokens = draft_tokens
        self._max_rows = max_rows
        self._max_len = max_len
        self._places = places

    def of(
        self, name: str, answers: Sequence[Answer], used: Sequence[int], requests: int, *, exclusive: bool = False
    ) -> list[int]:
        """The most useful nodes for each of these answers.

        used: nodes that other drafters gave already. Each of several drafters has a share of a request's nodes, by its
        default, and the part of theirs that earlier ones left. requests: of the step. exclusive: as in `Planner`.
        """
        own = self._traits[name]
        share = min(self._max_rows // requests - 1, MAX_NODES)
        if self._places is not None:
            share = min(share, self._places // requests)
        caps: list[int] = []
        kept: dict[tuple[tuple[str, ...], tuple[str, ...], int], int] = {}  # the same for most requests
        for answer, before in zip(answers, used, strict=True):
            params, length = answer.params, len(answer.tokens)
            several = len(answer.drafters) > 1
            most = own.most_nodes
            wanted = params.speculation.draft_tokens
            usual = self._draft_tokens if wanted is None else wanted
            if usual is None:
                far = own.made_for if params.rejects or not exclusive else own.reach
                usual = self._usual(answer.drafters) if several else far
                most = min(most, far)  # the room that others left is no reason to go further
            if params.rejects and not self._telling.isdisjoint(answer.drafters):
                usual = min(usual, self._judged_nodes)
            if answer.constraint is not None:
                usual = min(usual, answer.constraint.most_nodes)
            left = params.max_tokens - (length - answer.prompt_length) - answer.queued - 1
            useful = min(usual, share, self._max_len - 1 - length - answer.coming)
            if not own.is_wide:
                useful = min(useful, left)
            if several:
                alike = (answer.drafters, tuple(answer.refused), useful)
                if alike not in kept:
                    kept[alike] = self._others(name, answer, useful, exclusive)
                useful -= before + kept[alike]
            useful = min(useful, most if own.ends is None else min(most, own.ends - length - answer.coming))
            caps.append(0 if min(useful, left) <= 0 or answer.plain_next else useful)
        return caps

    def barred(self, answer: Answer) -> str | None:
        """Why no drafter can ever guess for it; None if one can."""
        wanted = answer.params.speculation.draft_tokens
        if wanted == 0:
            return "off: the request asked for 0 draft tokens"
        if wanted is None and self._draft_tokens == 0:
            return NO_TOKENS
        return NO_MEMORY if self._places == 0 else None

    def why_none(self, name: str, answer: Answer, requests: int) -> str:
        """Why a drafter has a cap of 0 for it in a step of this many requests."""
        barred, ends, length = self.barred(answer), self._traits[name].ends, len(answer.tokens)
        if barred is not None:
            return barred
        if self._max_rows < 2 * requests:
            return f"off: a pass has {self._max_rows} rows for {requests} requests and their guesses (max_draft_rows)"
        if self._places is not None and self._places < requests:
            return little_memory(self._places, requests)
        if answer.params.max_tokens - (length - answer.prompt_length) - answer.queued <= 1:
            return "off: the answer ended before a guess could help"
        if self._max_len - 1 - length - answer.coming <= 0:
            return "off: the context was full"
        if ends is not None and ends - length - answer.coming <= 0:
            return f"off: {name} reads no more than {ends} tokens"
        several = len(answer.drafters) > 1 and not answer.plain_next
        return "off: others had all of its guesses" if several else "off: it had to be decoded plainly"

    def _usual(self, drafters: tuple[str, ...]) -> int:
        if drafters not in self._together:
            self._together[drafters] = sum([self._traits[name].made_for for name in drafters])
        return self._together[drafters]

    def _others(self, name: str, answer: Answer, nodes: int, exclusive: bool) -> int:
        """The part of a request's nodes that is kept for drafters asked after this one."""
        order = sorted(answer.drafters, key=lambda one: self._traits[one].turn)
        later = [self._traits[one] for one in order[order.index(name) + 1 :] if one not in answer.refused]
        if exclusive:  # only one device drafter guesses: nothing is kept for the others
            on_device = sorted([one.made_for for one in later if one.on_device])[-1:]
            later = [one for one in later if not one.on_device]
            sizes = [one.made_for for one in later] + ([] if self._traits[name].on_device else on_device)
        else:
            sizes = [one.made_for for one in later]
        least = 1 if nodes >= len(order) else 0
        return sum(max(least, nodes * size // self._usual(answer.drafters)) for size in sizes)


class DraftRoom:
    """Room in the cache for guesses, which never preempt a request.

    reserve: reserves pages for this many nodes behind an answer's next token; returns how many fit.
    """

    def __init__(self, reserve: Callable[[Answer, int], int]) -> None:
        self._reserve = reserve
        self.refused = 0  # drafts without any room
        self.is_full = False  # the last draft of all had none
        self._short: set[str] = set()  # answers whose last draft had none

    def nodes(self, answer: Answer, used: int, nodes: int) -> int:
        """Reserve room for up to `nodes` nodes beside `used` others; returns how many fit."""
        if not nodes:
            return 0
        fits = max(0, self._reserve(answer, used + nodes) - used)
        self.is_full = not fits
        if fits:
            self._short.discard(answer.id)
        else:
            self.refused += 1
            self._short.add(answer.id)
        return fits

    def tree(self, answer: Answer, used: int, tree: Tree) -> Tree:
        """The part of the tree that fits: the first nodes of a tree are a tree."""
        fits = self.nodes(answer, used, len(tree))
        return tree if fits == len(tree) else Tree(tree.tokens[:fits], tree.parents[:fits])

    def is_short(self, answer: Answer) -> bool:
        """Whether its last draft found no room."""
        return answer.id in self._short

    def forget(self, answer: Answer) -> None:
        self._short.discard(answer.id)
