"""Which sequences stand in which row of which step: a function of the seed and the step alone.

So a run that is resumed sees what it would have seen, and ranks agree without talking.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.core.errors import ConfigError
from slipstream.train.batch import NO_SEQUENCE, Rows
from slipstream.train.corpus import Sequences

_POOL = 512
"""Sequences that rows are filled from at a time: the longest first, so that little room is left over."""


class RowPlan:
    """Rows of `row_tokens` without end: all sequences in one order, then in another, and so on."""

    def __init__(self, sequences: Sequences, row_tokens: int, seed: int) -> None:
        if not len(sequences):
            raise ConfigError("the data holds no answers: name more prompts, or allow longer ones (max_prompt_tokens)")
        self._sequences, self._row_tokens, self._seed = sequences, row_tokens, seed
        self._lengths = np.minimum(sequences.lengths, row_tokens)
        self._first = [0]  # row that each epoch begins with
        self._epochs: dict[int, list[list[int]]] = {}

    def batch(self, first: int, count: int) -> Rows:
        """Rows `first` to `first + count` of all that there will ever be."""
        rows = [self._row(first + i) for i in range(count)]
        parts = [torch.from_numpy(np.stack([row[i] for row in rows])) for i in range(5)]
        ids, positions, segments, answers, places = parts
        return Rows(ids, positions, segments, answers.bool(), places)

    def epoch_of(self, row: int) -> float:
        """How often everything was seen when this row is reached."""
        epoch, place = self._find(row)
        return epoch + place / len(self._epoch(epoch))

    def _find(self, row: int) -> tuple[int, int]:
        epoch = int(np.searchsorted(self._first, row, side="right")) - 1
        while True:
            own = self._epoch(epoch)
            if row < self._first[epoch] + len(own):
                return epoch, row - self._first[epoch]
            epoch += 1

    def _epoch(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            self._epochs = {e: rows for e, rows in self._epochs.items() if e >= epoch - 1}  # the last one, and this
            self._epochs[epoch] = self._packed(epoch)
            if len(self._first) == epoch + 1:
                self._first.append(self._first[epoch] + len(self._epochs[epoch]))
        return self._epochs[epoch]

    def _packed(self, epoch: int) -> list[list[int]]:
        random = np.random.default_rng((self._seed, epoch))
        order = random.permutation(len(self._lengths))
        rows: list[list[int]] = []
        for begin in range(0, len(order), _POOL):
            pool = order[begin : begin + _POOL]
            room: list[int] = []
            own: list[list[int]] = []
            for index in pool[np.argsort(-self._lengths[pool], kind="stable")].tolist():
                length = int(self._lengths[index])
                at = next((i for i, left in enumerate(room) if left >= length), None)
                if at is None:
                    at = len(room)
                    room.append(self._row_tokens)
                    own.append([])
                own[at].append(index)
                room[at] -= length
            rows += own
        return [rows[i] for i in random.permutation(len(rows))]

    def _row(self, row: int) -> tuple[NDArray[np.int64], ...]:
        epoch, place = self._find(row)
        size = self._row_tokens
        ids, answers = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        positions, segments = np.zeros(size, dtype=np.int64), np.full(size, NO_SEQUENCE, dtype=np.int64)
        places = np.full(size, -1, dtype=np.int64)
        begin = 0
        for number, index in enumerate(self._epoch(epoch)[place]):
            length = int(self._lengths[index])
            end = begin + length
            ids[begin:end] = self._sequences.at(index)[:length]
            positions[begin:end] = np.arange(length)
            segments[begin:end] = number
            places[begin:end] = self._sequences.starts[index] + np.arange(length)
            answers[begin + int(self._sequences.prompt_lengths[index]) : end] = 1
            begin = end
        return ids, positions, segments, answers, places
