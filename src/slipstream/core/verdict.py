"""Verdicts: the accepted path through a draft, and the target's own next token."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def usable(self) -> tuple[int, ...]:
        """The tokens without the -1 that the last one may be."""
        return self.tokens[:-1] if self.tokens and self.tokens[-1] < 0 else self.tokens
