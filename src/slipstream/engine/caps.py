"""How many nodes a drafter may guess for a request at most: by the request, the context, the pass, and the company."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.core.draft import MAX_NODES
from slipstream.drafters.base import DeviceDrafter, Drafter, HostDrafter
from slipstream.engine.odds import judged_nodes, made_for, most_nodes, reach
from slipstream.engine.state import Answer
from slipstream.plan.types import NO_MEMORY, NO_TOKENS, little_memory

_ON_DEVICE = 2
"""The turn of those on the device."""


class NodeCaps:
    """The caps of an engine's drafters. What is always the same for a drafter is found out once."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        *,
        draft_tokens: int | None,
        max_rows: int,
        max_len: int,
        places: int | None = None,
    ) -> None:
        """places: of the cache that guesses may take, over all requests; None: any number."""
        self.turns = {name: _turn(drafter) for name, drafter in drafters.items()}  # in this order they are asked
        self._drafters = drafters
        self._made_for = {name: made_for(drafter) for name, drafter in drafters.items()}
        self._reach = {name: reach(drafter) for name, drafter in drafters.items()}  # … where a planner says how far
        self._together: dict[tuple[str, ...], int] = {}  # the same for several
        self._wide = frozenset(n for n, d in drafters.items() if _is_wide(d))
        self._telling = frozenset(n for n, d in drafters.items() if d.needs.probabilities)
        self._judged_nodes = judged_nodes(list(drafters.values()), draft_tokens)
        self._draft_tokens = draft_tokens
        self._max_rows = max_rows
        self._max_len = max_len
        self._places = places

    def of(
        self, name: str, answers: Sequence[Answer], used: Sequence[int], requests: int, *, exclusive: bool = False
    ) -> list[int]:
        """Most nodes that are of any use: limits of the requests, of the context and of the pass.

        used: nodes that others gave already. Of several drafters each has a part of the request's nodes, by what it
        is made for, and what those before it left of theirs. exclusive: as in `Planner`.
        """
        drafter = self._drafters[name]
        ends = drafter.max_positions  # a draft with a shorter context than the target stops where it ends
        most = most_nodes(drafter)
        share = min(self._max_rows // requests - 1, MAX_NODES)
        if self._places is not None:
            share = min(share, self._places // requests)
        wide, made_for = name in self._wide, self._made_for[name]
        caps: list[int] = []
        kept: dict[tuple[tuple[str, ...], tuple[str, ...], int], int] = {}  # for others: for many requests the same
        for answer, before in zip(answers, used, strict=True):
            params, length = answer.params, len(answer.tokens)
            several = len(answer.drafters) > 1
            own = most
            wanted = params.speculation.draft_tokens
            usual = self._draft_tokens if wanted is None else wanted
            if usual is None:
                far = made_for if params.rejects or not exclusive else self._reach[name]
                usual = self._usual(answer.drafters) if several else far
                own = min(most, far)  # what others left is no reason to go further than alone
            if params.rejects and not self._telling.isdisjoint(answer.drafters):
                usual = min(usual, self._judged_nodes)  # there is memory for what so many were drawn from
            if answer.constraint is not None:
                usual = min(usual, answer.constraint.most_nodes)
            left = params.max_tokens - (length - answer.prompt_length) - answer.queued - 1
            useful = min(usual, share, self._max_len - 1 - length - answer.coming)
            if not wide:
                useful = min(useful, left)
            if several:
                alike = (answer.drafters, tuple(answer.refused), useful)
                others = kept.get(alike)
                if others is None:
                    others = kept[alike] = self._others(name, answer, useful, exclusive)
                useful -= before + others
            useful = min(useful, own if ends is None else min(own, ends - length - answer.coming))
            caps.append(0 if min(useful, left) <= 0 or answer.doubted else useful)
        return caps

    def barred(self, answer: Answer) -> str | None:
        """Why nobody can ever guess for it, in words; None: somebody may."""
        wanted = answer.params.speculation.draft_tokens
        if wanted == 0:
            return "off: the request asked for 0 draft tokens"
        if wanted is None and self._draft_tokens == 0:
            return NO_TOKENS
        return NO_MEMORY if self._places == 0 else None

    def why_none(self, name: str, answer: Answer, requests: int) -> str:
        """Why a drafter may have no node for it in a round of so many requests, in words."""
        barred, ends, length = self.barred(answer), self._drafters[name].max_positions, len(answer.tokens)
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
        several = len(answer.drafters) > 1 and not answer.doubted
        return "off: others had all of its guesses" if several else "off: it had to be decoded plainly"

    def _usual(self, drafters: tuple[str, ...]) -> int:
        """Nodes that all of a request's drafters together are made for."""
        if drafters not in self._together:
            self._together[drafters] = sum([self._made_for[name] for name in drafters])
        return self._together[drafters]

    def _others(self, name: str, answer: Answer, nodes: int, exclusive: bool) -> int:
        """How many of the request's nodes are kept for drafters that are asked after this one."""
        order = sorted(answer.drafters, key=self.turns.__getitem__)
        names = [n for n in order[order.index(name) + 1 :] if n not in answer.refused]
        later = [self._made_for[n] for n in names]
        if exclusive:  # of those on the device one guesses, and nothing is kept for the others
            hosts = [self._made_for[n] for n in names if self.turns[n] < _ON_DEVICE]
            later = hosts if self.turns[name] == _ON_DEVICE else [*hosts, *sorted(later[len(hosts) :])[-1:]]
        least = 1 if nodes >= len(order) else 0
        return sum(max(least, nodes * made_for // self._usual(answer.drafters)) for made_for in later)


def _turn(drafter: Drafter) -> int:
    """When it is asked: on the host before on the device, and first of all what takes no time."""
    return int(drafter.costly) if isinstance(drafter, HostDrafter) else _ON_DEVICE


def _is_wide(drafter: Drafter) -> bool:
    """Are its trees no deeper for having more nodes? Then an answer that ends soon is no reason for fewer."""
    if isinstance(drafter, HostDrafter):
        return drafter.whole
    return isinstance(drafter, DeviceDrafter) and drafter.makes_trees
