"""Verdicts: the accepted path through a draft, and the target's own next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The verdicts on all B requests of a round, as tensors.

    `path[b, :accepted[b]]` are the accepted nodes of request b from the root on; `tokens[b, :accepted[b] + 1]` is
    what the request emits: the accepted tokens, then the target's own. A token of -1 says that the model gave
    nothing usable (NaN, or every token masked) at that place.
    """

    path: Tensor  # [B, K] int64, padded with 0
    accepted: Tensor  # [B] int64
    tokens: Tensor  # [B, K + 1] int64, padded with 0

    def told(
        self,
        request_ids: Sequence[str],
        drafted: Tensor,  # [B]: nodes of each draft
        choices: Tensor | None = None,  # [B, K + 1], where some drafter wants to know them
    ) -> list[Verdict]:
        """The same on the host.

        A token whose own numbers are not finite spoils every row that it stands beside, if only by 0 times NaN. So a
        round that ends in nothing usable is believed only where nothing was drafted; otherwise it does not count (no
        tokens), and the next one decodes plainly.
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
    """Who proposed the nodes of one request's draft: nobody, one drafter, or several whose trees were merged."""

    names: tuple[str, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()
    """Of several, by name: which node of the draft each of its own became, below 0 where it was cut. Of one: ()."""
    mixed: frozenset[str] = frozenset()
    """Those whose places are not in the order of their own nodes: trees that the device joined to others'."""


NOBODY = Authors()


@cache
def author(name: str) -> Authors:
    """One drafter alone."""
    return Authors((name,))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one request's draft, for its drafter."""

    request_id: str
    tokens: tuple[int, ...]  # emitted this round: accepted, then the target's own
    drafted: int
    accepted: int
    path: tuple[int, ...]  # accepted nodes
    choices: tuple[int, ...] = ()
    """The target's own token behind the root, then behind each node of the draft as it was verified, accepted or not;
    -1 where the model gave nothing usable. For drafters that declare `Needs(choices=True)`; others may get none, and so
    does everybody of a round that did not count."""
    authors: Authors = NOBODY

    def by(self, authors: Authors) -> Verdict:
        """The same, and who drafted."""
        return replace(self, authors=authors) if authors.names else self

    def share(self, name: str) -> Verdict:
        """What one of the authors is told: as if it had drafted alone.

        A node that two proposed is a credit to both. An author's nodes on the accepted path are the first of it, since
        it proposed them with all that is above them. Where they are `mixed`, path and choices are not told.
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
        """What those are told who drafted nothing. There are many of them, and `replace` takes longer."""
        return Verdict(self.request_id, self.tokens, 0, 0, (), self.choices[:1])

    def counts(self, name: str) -> tuple[int, int]:
        """How many nodes one drafter proposed, and how many of them stood."""
        names = self.authors.names
        if names == (name,):
            return self.drafted, self.accepted
        if not self.drafted or name not in names:
            return 0, 0
        own = {node for node in self.authors.places[names.index(name)] if node >= 0}
        return len(own), sum([node in own for node in self.path])

    def guessers(self, place: int) -> tuple[str, ...]:
        """Who proposed the token at this place of `tokens`; nobody: it is the target's own."""
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
