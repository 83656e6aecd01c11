"""Token sequences on disk: prompts with the target's answers, nothing else.

Two bytes a token, in parts that are written whole or not at all: a run that is killed goes on behind the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.errors import ConfigError

_PART = 2048
"""Sequences of a part."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Prompts and answers, in the order of their numbers."""

    tokens: NDArray[np.uint32]  # [N]: all of them, end to end
    starts: NDArray[np.int64]  # [S + 1]
    prompt_lengths: NDArray[np.int64]  # [S]
    numbers: NDArray[np.int64]  # [S]: which answer each is

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> NDArray[np.int64]:  # [S]
        return np.diff(self.starts)

    @property
    def answer_tokens(self) -> int:
        return int((self.lengths - self.prompt_lengths).sum())

    def at(self, index: int) -> NDArray[np.uint32]:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def counts(self, vocab_size: int) -> Tensor:  # [V] int64
        """How often each token stands in an answer."""
        place = np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], self.lengths)
        is_answer = place >= np.repeat(self.prompt_lengths, self.lengths)
        return torch.from_numpy(np.bincount(self.tokens[is_answer], minlength=vocab_size).astype(np.int64))


class CorpusWriter:
    """Adds sequences to a folder. Each rank has one, and files of its own."""

    def __init__(self, folder: Path, vocab_size: int, rank: int = 0) -> None:
        self._folder, self._rank = folder, rank
        self._kind = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._held: list[tuple[int, int, NDArray[np.uint32]]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._parts = len(list(folder.glob(f"part-{rank:03}-*.npz")))

    def add(self, number: int, prompt: Sequence[int], answer: NDArray[np.int32]) -> None:
        whole = np.concatenate((np.asarray(prompt, dtype=np.uint32), answer.astype(np.uint32)))
        self._held.append((number, len(prompt), whole))
        if len(self._held) >= _PART:
            self.flush()

    def flush(self) -> None:
        """Everything that was added lies on the disk from now on."""
        if not self._held:
            return
        numbers, prompts, wholes = zip(*self._held, strict=True)
        name = f"part-{self._rank:03}-{self._parts:05}.npz"
        beside = self._folder / f".{name}.part"
        with beside.open("wb") as file:
            np.savez(
                file,
                tokens=np.concatenate(wholes).astype(self._kind),
                lengths=np.array([len(whole) for whole in wholes], dtype=np.int64),
                prompt_lengths=np.array(prompts, dtype=np.int64),
                numbers=np.array(numbers, dtype=np.int64),
            )
        beside.replace(self._folder / name)
        self._held, self._parts = [], self._parts + 1


def load_sequences(folder: Path) -> Sequences:
    """All that was written to the folder, in the order of the answers' numbers."""
    tokens: list[NDArray[np.uint32]] = [np.zeros(0, dtype=np.uint32)]
    columns: dict[str, list[NDArray[np.int64]]] = {"lengths": [], "prompt_lengths": [], "numbers": []}
    for file in sorted(folder.glob("part-*.npz")):
        try:
            with np.load(file, allow_pickle=False) as part:
                tokens.append(part["tokens"].astype(np.uint32))
                for name, column in columns.items():
                    column.append(part[name].astype(np.int64))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{file}: cannot be read ({error}); remove it, and what it held is made again") from error
    lengths, prompt_lengths, numbers = (
        np.concatenate([np.zeros(0, dtype=np.int64), *column]) for column in columns.values()
    )
    flat, ends = np.concatenate(tokens), np.cumsum(lengths)
    if len(flat) != lengths.sum() or (prompt_lengths > lengths).any():
        raise ConfigError(f"{folder}: its parts contradict themselves; remove them, and they are made again")
    order = np.argsort(numbers, kind="stable")
    own = [flat[ends[i] - lengths[i] : ends[i]] for i in order]
    return Sequences(
        np.concatenate([np.zeros(0, dtype=np.uint32), *own]),
        np.concatenate(([0], np.cumsum(lengths[order]))),
        prompt_lengths[order],
        numbers[order],
    )
