"""Packed rows for tests of training: sequences laid end to end, with a prompt each and padding behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.train.batch import NO_SEQUENCE, Rows


def packed(rows: Sequence[Sequence[Sequence[int]]], width: int, prompt: int = 2) -> Rows:
    """Rows of sequences of token ids. prompt: tokens of each that nobody chose."""
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    positions, segments = torch.zeros_like(ids), torch.full_like(ids, NO_SEQUENCE)
    answers = torch.zeros_like(ids, dtype=torch.bool)
    for i, sequences in enumerate(rows):
        at = 0
        for number, sequence in enumerate(sequences):
            here = slice(at, at + len(sequence))
            ids[i, here] = torch.tensor(list(sequence))
            positions[i, here] = torch.arange(len(sequence))
            segments[i, here] = number
            answers[i, at + prompt : at + len(sequence)] = True
            at += len(sequence)
        positions[i, at:] = torch.arange(width - at)
    return Rows(ids, positions, segments, answers)


def random_rows(lengths: Sequence[Sequence[int]], width: int, vocab: int, seed: int = 0) -> Rows:
    made = torch.Generator().manual_seed(seed)
    return packed([[torch.randint(0, vocab, (n,), generator=made).tolist() for n in row] for row in lengths], width)
