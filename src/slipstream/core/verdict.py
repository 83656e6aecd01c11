"""Verdicts: the accepted path through a draft, and the target's own next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The verdicts on all B requests of a step, as tensors.

    `path[b, :accepted[b]]` are the accepted nodes of request b from the root on; `tokens[b, :accepted[b] + 1]` are the
    tokens that the request emits: the accepted ones, then the target's own. A token of -1 means that the model gave
    nothing usable (NaN, or every token masked) at that place.
    """

    path: Tensor  # [B, K] int64, padded with 0
    accepted: Tensor  # [B] int64
    tokens: Tensor  # [B, K + 1] int64, padded with 0

    def told(
        self,
        request_ids: Sequence[str],
        drafted: Tensor,  # [B]: nodes of each draft
        choices: Tensor | None = None,  # [B, K + 1], where some drafter needs them
    ) -> list[Verdict]:
        """The verdicts on the host.

        A drafted token with numbers that are not finite spoils the other rows of the pass, if only by 0 times NaN. So a
        step that ends in nothing usable counts only where nothing was drafted; else it emits no tokens, and the next
        step decodes plainly.
        """
        tokens, accepted, paths = self.tokens.tolist(), self.accepted.tolist(), self.path.tolist()
        chosen = [] if choices is None else choices.tolist()
        told = []
        for i, (request_id, nodes) in enumerate(zip(request_ids, drafted.tolist(), strict=True)):
            emitted = tuple(tokens[i][: accepted[i] + 1])
            if nodes and -1 in emitted:
                told.append(Verdict(request_id, (), nodes, 0, ()))
            else:
                mine = tuple(chosen[i][: 1 + nodes]) if chosen else ()
                told.append(Verdict(request_id, emitted, nodes, accepted[i], tuple(paths[i][: accepted[i]]), mine))
        return told


@dataclass(frozen=True, slots=True)
class Authors:
    """The drafters of one request's draft: none, one, or several with merged trees."""

    names: tuple[str, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()
    """Of several, by name: the node of the draft that each of its own became, below 0 where it was cut. Of one: ()."""
    mixed: frozenset[str] = frozenset()
    """Drafters with places that are not in the order of their own nodes: trees that the device merged."""


NOBODY = Authors()


@cache
def author(name: str) -> Authors:
    """One drafter alone."""
    return Authors((name,))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one request's draft, for its drafters."""

    request_id: str
    tokens: tuple[int, ...]  # emitted in this step: accepted, then the target's own
    drafted: int
    accepted: int
    path: tuple[int, ...]  # accepted nodes
    choices: tuple[int, ...] = ()
    """The target's own token behind the root, then behind each node of the draft as it was verified, accepted or not;
    -1 where the model gave nothing usable. For drafters that declare `Needs(choices=True)`; others may get none, and a
    step that did not count has none."""
    authors: Authors = NOBODY

    def by(self, authors: Authors) -> Verdict:
        """This verdict with its drafters."""
        return replace(self, authors=authors) if authors.names else self

    def share(self, name: str) -> Verdict:
        """The verdict for one of the drafters, as if it had drafted alone.

        A node that two proposed counts for both. A drafter's nodes on the accepted path are the first of the path: it
        proposed them with all that is above them. Where they are `mixed`, path and choices are left out.
        """
        authors = self.authors
        if not self.drafted or authors.names == (name,):
            return self
        if name not in authors.names:
            return self.undrafted()
        places = authors.places[authors.names.index(name)]
        own = {node: i for i, node in enumerate([node for node in places if node >= 0])}
        path = tuple([own[node] for node in self.path if node in own])
        told = replace(self, drafted=len(own), accepted=len(path), authors=author(name))
        if name in authors.mixed:
            return replace(told, path=(), choices=(), authors=Authors((name,), mixed=frozenset((name,))))
        choices = (self.choices[0], *[self.choices[1 + node] for node in own]) if self.choices else ()
        return replace(told, path=path, choices=choices)

    def undrafted(self) -> Verdict:
        """The verdict for drafters without a draft in this step. Made often, and `replace` is slower."""
        return Verdict(self.request_id, self.tokens, 0, 0, (), self.choices[:1])

    def counts(self, name: str) -> tuple[int, int]:
        """The nodes that one drafter proposed, and those of them that were accepted: two counts."""
        names = self.authors.names
        if names == (name,):
            return self.drafted, self.accepted
        if not self.drafted or name not in names:
            return 0, 0
        own = {node for node in self.authors.places[names.index(name)] if node >= 0}
        return len(own), sum([node in own for node in self.path])

    def guessers(self, place: int) -> tuple[str, ...]:
        """The drafters that proposed the token at this place of `tokens`; none: it is the target's own."""
        if place >= self.accepted:
            return ()
        authors = self.authors
        if not authors.places:
            return authors.names
        node = self.path[place]
        return tuple([name for name, nodes in zip(authors.names, authors.places, strict=False) if node in nodes])

    @property
    def usable(self) -> tuple[int, ...]:
        """The tokens without the -1 that the last one may be."""
        return self.tokens[:-1] if self.tokens and self.tokens[-1] < 0 else self.tokens
