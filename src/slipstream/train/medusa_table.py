"""How often each rank of each Medusa head is right, on texts that the target wrote to held-out prompts.

Teacher forced: at every token of the answers the heads guess what follows, and the text says where the token stood
among their guesses. The tree of the finished drafter is made from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.drafters.medusa_tree import RANKS, Table, usual_table
from slipstream.models.taps import Taps
from slipstream.train.batch import NO_SEQUENCE, Rows
from slipstream.train.recipe import Text
from slipstream.train.teacher import Teacher

Hidden = Callable[[Tensor, Tensor], Tensor]
"""What the LM head reads of each head, [heads, n, H]: from states [heads, n, H] and tokens [heads, n]."""

_TOGETHER = 8
"""Texts of one pass."""
_NUMBERS = 1 << 27
"""Logits at a time."""
_PRIOR_WEIGHT = 16.0
"""So many tries the usual table counts for."""
_DIGITS = 5
"""As it is written down: what is stored must be what was measured with, to the last tie."""


def text_rows(texts: Sequence[Text]) -> Rows:
    """One text a row."""
    width = max(len(text.prompt) + len(text.answer) for text in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    positions, segments = torch.zeros_like(ids), torch.full_like(ids, NO_SEQUENCE)
    answers = torch.zeros_like(ids, dtype=torch.bool)
    for i, text in enumerate(texts):
        size = len(text.prompt) + len(text.answer)
        ids[i, :size] = torch.tensor((*text.prompt, *text.answer))
        positions[i, :size] = torch.arange(size)
        segments[i, :size] = 0
        answers[i, len(text.prompt) : size] = True
    return Rows(ids, positions, segments, answers)


@torch.no_grad()
def measure_table(teacher: Teacher, hidden: Hidden, heads: int, texts: Sequence[Text]) -> Table:
    places = [_places(teacher, hidden, heads, texts[at : at + _TOGETHER]) for at in range(0, len(texts), _TOGETHER)]
    return table_of(torch.cat(places, dim=1).cpu())


def table_of(places: Tensor) -> Table:  # [heads, n]: the token's place among each head's guesses; below 0: no token
    """A rank counts where the text has a token, and where the heads before had theirs among their first guesses."""
    rows = []
    reached = torch.ones_like(places[0], dtype=torch.bool)
    for place, prior in zip(places, usual_table(len(places)), strict=True):
        tried = reached & (place >= 0)
        hits = torch.bincount(place[tried & (place < RANKS)], minlength=RANKS)
        weight = int(tried.sum()) + _PRIOR_WEIGHT
        chances = ((hit + _PRIOR_WEIGHT * p) / weight for hit, p in zip(hits.tolist(), prior, strict=True))
        rows.append(tuple(round(chance, _DIGITS) for chance in chances))
        reached = tried & (place < RANKS)
    return tuple(rows)


def _places(teacher: Teacher, hidden: Hidden, heads: int, texts: Sequence[Text]) -> Tensor:  # [heads, n]
    rows = text_rows(texts).to(teacher.device)
    normed = teacher.look(rows, Taps()).normed.flatten(0, 1)  # [N, H]
    ids, answers = rows.ids.flatten(), rows.answers.flatten()
    chosen = (answers & rows.same(1).flatten()).nonzero()[:, 0] - 1  # states that chose a token with one behind it
    width = rows.ids.shape[1]
    found = []
    few = max(_NUMBERS // (teacher.vocab_size * heads), 1)
    for part in chosen.split(few):
        out = hidden(normed[part].expand(heads, -1, -1), ids[part + 1].expand(heads, -1))  # [heads, n, H]
        places = []
        for head, state in enumerate(out):
            at = part + 2 + head
            inside = (part % width + 2 + head < width) & answers[at.clamp_max(len(ids) - 1)]
            token = ids[at.clamp_max(len(ids) - 1)]
            logits = teacher.logits(state)  # [n, V]
            place = (logits > logits.gather(1, token[:, None])).sum(1)
            places.append(torch.where(inside, place, -1))
        found.append(torch.stack(places))
    return torch.cat(found, dim=1) if found else torch.zeros(heads, 0, dtype=torch.int64, device=teacher.device)
