"""Training batches: packed rows of token sequences, the plan that packs them, and the target's states at them.

Sequences are laid end to end in rows of one length, which keeps shapes constant and padding small.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.train.data import Corpus

NO_SEQUENCE = -1


@dataclass(frozen=True)
class Rows:
    """Token sequences, several in one row."""

    ids: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64: within the sequence, from 0; padding has 0
    segments: Tensor  # [B, T] int64: index of the token's sequence in its row; NO_SEQUENCE: padding
    answers: Tensor  # [B, T] bool: True for a token that the target chose; False for prompt tokens and padding
    places: Tensor | None = None  # [B, T] int64: index of each token in the corpus; -1: padding. None: no corpus

    def to(self, device: torch.device) -> Rows:
        """Copy to the device; to a GPU without waiting, through pinned memory."""
        given = {f.name: getattr(self, f.name) for f in fields(Rows)}
        pinned = device.type == "cuda" and self.ids.device.type == "cpu"
        moved = {
            name: (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)
            for name, tensor in given.items()
            if tensor is not None
        }
        return replace(self, **moved)

    @property
    def real(self) -> Tensor:  # [B, T] bool
        return self.segments != NO_SEQUENCE

    def same(self, ahead: int) -> Tensor:  # [B, T] bool
        """True where the token `ahead` positions later belongs to the same sequence."""
        later = torch.full_like(self.segments, NO_SEQUENCE)
        if ahead < self.segments.shape[1]:
            later[:, : self.segments.shape[1] - ahead] = self.segments[:, ahead:]
        return self.real & (later == self.segments)

    @cached_property
    def sees(self) -> Tensor:  # [B, T, T] bool
        """Causal attention within each sequence; padding sees padding. Dimension 1: queries, 2: keys."""
        size = self.ids.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool, device=self.ids.device).tril()
        same = self.segments[:, :, None] == self.segments[:, None, :]
        return causal & same

    def loss_weights(self, ahead: int, prompt_weight: float) -> Tensor:  # [B * T] fp32
        """Weight of each row that guesses the token `ahead` positions later: 1 in an answer, less in a prompt."""
        answer = torch.roll(self.answers, -ahead, dims=1)
        return (torch.where(answer, 1.0, prompt_weight) * self.same(ahead)).flatten()


@dataclass(frozen=True)
class Batch:
    """Rows and the target's hidden states at them. No gradient flows here."""

    rows: Rows
    taps: Tensor  # [B, T, F]: the hidden states of `Recipe.taps`, concatenated, in the teacher's dtype
    normed: Tensor  # [B, T, H]: output of the last norm; `Teacher.logits` turns it into logits


_POOL = 512
"""Sequences packed together, longest first, which leaves little padding."""


class RowPlan:
    """The endless sequence of training rows: a function of the seed and the row's number, the same on every rank."""

    def __init__(self, corpus: Corpus, row_tokens: int, seed: int) -> None:
        if not len(corpus):
            raise ConfigError("the data holds no answers: name more prompts, or allow longer ones (max_prompt_tokens)")
        self._corpus, self._row_tokens, self._seed = corpus, row_tokens, seed
        self._lengths = np.minimum(corpus.lengths, row_tokens)
        self._first = [0]  # first row of each epoch
        self._epochs: dict[int, list[list[int]]] = {}

    def batch(self, first: int, count: int) -> Rows:
        """Rows `first` to `first + count`."""
        rows = [self._row(first + i) for i in range(count)]
        ids, positions, segments, answers, places = (
            torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)
        )
        return Rows(ids, positions, segments, answers.bool(), places)

    def epoch_of(self, row: int) -> float:
        """Epochs completed at this row, with the fraction of the current one."""
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
            self._epochs = {e: rows for e, rows in self._epochs.items() if e >= epoch - 1}  # keep the previous epoch
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
            ids[begin:end] = self._corpus.at(index)[:length]
            positions[begin:end] = np.arange(length)
            segments[begin:end] = number
            places[begin:end] = self._corpus.starts[index] + np.arange(length)
            answers[begin + int(self._corpus.prompt_lengths[index]) : end] = 1
            begin = end
        return ids, positions, segments, answers, places
