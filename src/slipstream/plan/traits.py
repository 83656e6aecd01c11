"""What is known of a request before it has said a word: by this, newcomers are taken for one of their kind.

Two requests of a kind are about as easy to guess for. What others of its kind saw of late is the best that a newcomer
can start from; and where drafts turn out not to pay for a kind, they are off for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_WARM = 0.5
"""From this temperature on, what comes next is a draw more than a choice."""
_ECHOES = 0.25
"""Such a part of a prompt repeats itself where tables, code or quotations are in it."""
_LOOKED_AT = 4096  # tokens of a prompt: more would say the same


class Traits(NamedTuple):
    """The kind of a request."""

    warm: bool = False  # sampled at a temperature that matters
    grammar: bool = False
    echoes: bool = False  # its prompt repeats itself

    def __str__(self) -> str:
        words = ["sampled" if self.warm else "greedy"]
        return ", ".join([*words, *["grammar"] * self.grammar, *["echoing prompt"] * self.echoes])


def traits_of(temperature: float, grammar: bool, prompt: Sequence[int]) -> Traits:
    return Traits(temperature >= _WARM, grammar, overlap(prompt) >= _ECHOES)


def overlap(prompt: Sequence[int]) -> float:
    """Which part of the prompt's runs of three tokens came before in it."""
    tokens = np.asarray(prompt[-_LOOKED_AT:], dtype=np.uint64)
    if len(tokens) < 4:
        return 0.0
    runs = (tokens[:-2] * np.uint64(1_000_003) + tokens[1:-1]) * np.uint64(1_000_003) + tokens[2:]
    runs.sort()
    return int(np.count_nonzero(runs[1:] == runs[:-1])) / len(runs)
