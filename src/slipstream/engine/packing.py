"""Pack the batch of a step, decodes with their drafts and chunks of prompts, into the tensors of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.engine.chunks import Chunk
from slipstream.engine.state import Answer
from slipstream.kv.pages import PageTable
from slipstream.models.batch import PassBatch, sent
from slipstream.sampling.rows import SampleRows


@dataclass(frozen=True, slots=True)
class PackedPass:
    """A pass, and the rows of its choices. Emitting requests are the decodes, then the completing chunks."""

    batch: PassBatch
    emitting: tuple[Answer, ...]  # [E]
    rows: SampleRows  # [R]: the rows that choose a token
    row_of: Tensor  # [E, K + 1] int64: the row (of R) of a request's root (column 0) and node i (column 1 + i)
    slot_of_row: Tensor  # [E, K + 1] int64: the cache slot that each of them writes

    def choices(self, tokens: Tensor) -> Tensor:
        """Chosen tokens [R] as [E, K + 1]; padding repeats the root's."""
        return tokens[self.row_of]


def pack(decodes: Sequence[Answer], chunks: Sequence[Chunk], draft: Draft, *, paths: bool) -> PackedPass:
    """Pack decodes with their drafts, then chunks.

    draft has one row a decode. paths: include the draft tokens before each row, for penalties and bad words.
    """
    device = draft.tokens.device
    counts = draft.counts.tolist()
    width = draft.width
    parts = [(a, 1 + n) for a, n in zip(decodes, counts, strict=True)] + [(c.answer, c.rows) for c in chunks]
    starts = [0, *accumulate(rows for _, rows in parts)]
    decode_slots = [s for a, n in zip(decodes, counts, strict=True) for s in _table(a).slots(a.cached, 1 + n)]
    chunk_ids, chunk_positions, chunk_slots = sent(_chunk_rows(chunks, sum(chunk.rows for chunk in chunks), 0), device)

    tree = _Tree.of(draft)
    completing = [(starts[len(decodes) + i], chunk) for i, chunk in enumerate(chunks) if chunk.completes]
    emitting = (*decodes, *(chunk.answer for _, chunk in completing))

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    # decodes: the last token is the root row, then come the nodes; `valid` selects the real ones of [D, K + 1]
    valid = torch.arange(width + 1, device=device) <= draft.counts[:, None]
    last = tensor([answer.tokens[-1] for answer in decodes])
    lengths = tensor([answer.cached for answer in decodes])
    decode_ids = torch.cat((last[:, None], draft.tokens), dim=1)[valid]
    decode_positions = (lengths[:, None] + tree.depth)[valid]

    decode_rows = starts[len(decodes)]
    chunk_last = [start + chunk.rows - 1 for start, chunk in completing]
    is_tree = bool(decodes) and not draft.is_chain
    masks = torch.cat((tree.ancestors[valid], tensor([0] * (starts[-1] - decode_rows)))) if is_tree else None
    logit_rows = tensor([*range(decode_rows), *chunk_last])
    batch = PassBatch(
        input_ids=torch.cat((decode_ids, chunk_ids)),
        positions=torch.cat((decode_positions, chunk_positions)),
        slots=torch.cat((tensor(decode_slots), chunk_slots)),
        row_starts=tuple(starts),
        prefix_lengths=tuple(answer.cached for answer, _ in parts),
        pages=tuple(_table(answer).pages for answer, _ in parts),
        is_tree=(is_tree,) * len(decodes) + (False,) * len(chunks),
        masks=masks,
        logit_rows=logit_rows,
        wide=False,  # it has decodes, or chunks cut to the room beside them
    )
    # all decode rows choose, then the last row of each completing chunk
    first_row = tensor(starts[: len(decodes)])
    reach = torch.arange(width + 1, device=device)
    row_of = torch.where(valid, first_row[:, None] + reach, first_row[:, None])
    extra = tensor([decode_rows + i for i in range(len(completing))])[:, None].expand(-1, width + 1)
    row_of = torch.cat((row_of, extra))
    slot_of_row = batch.slots[logit_rows][row_of]
    rows = _sample_rows(batch.positions[logit_rows] + 1, emitting, valid, tree, draft if paths else None)
    return PackedPass(batch, emitting, rows, row_of, slot_of_row)


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """A pass over prompts only."""

    batch: PassBatch
    completing: tuple[Answer, ...]  # [C]
    rows: SampleRows  # [C]: their last rows, which choose a token


def pack_chunks(
    chunks: Sequence[Chunk],
    device: torch.device,
    *,
    wide: bool | None = None,
    sizes: Sequence[int] = (),
    trash_slot: int = 0,
) -> PackedChunks:
    """Pack chunks. One copy takes everything to the device, without waiting for what is queued there.

    sizes: the pass is padded to the next of these, with rows that write to `trash_slot`.
    """
    starts = [0, *accumulate(chunk.rows for chunk in chunks)]
    count = next((size for size in sizes if size >= starts[-1]), starts[-1])
    last = [end - 1 for chunk, end in zip(chunks, starts[1:], strict=True) if chunk.completes]
    completing = tuple(chunk.answer for chunk in chunks if chunk.completes)
    rows = _chunk_rows(chunks, count, trash_slot)  # [3, N]
    choosing = np.array(
        [last, [a.slot for a in completing], rows[1, last] + 1, [a.generated for a in completing]], dtype=np.int64
    )  # [4, C]
    flat = sent(np.concatenate((rows.ravel(), choosing.ravel())), device)
    ids, positions, slots = flat[: 3 * count].view(3, count).unbind(0)
    logit_rows, sample_slots, sample_positions, generated = flat[3 * count :].view(4, len(last)).unbind(0)
    batch = PassBatch(
        input_ids=ids,
        positions=positions,
        slots=slots,
        row_starts=tuple(starts),
        prefix_lengths=tuple(chunk.answer.cached for chunk in chunks),
        pages=tuple(_table(chunk.answer).pages for chunk in chunks),
        is_tree=(False,) * len(chunks),
        masks=None,
        logit_rows=logit_rows,
        wide=wide,
    )
    return PackedChunks(batch, completing, SampleRows(sample_slots, sample_positions, generated, None))


def _chunk_rows(chunks: Sequence[Chunk], count: int, trash_slot: int) -> NDArray[np.int64]:  # [3, N]
    """The token, position and cache slot of each row of chunks, padded to `count` rows."""
    rows = np.zeros((3, count), dtype=np.int64)
    rows[2] = trash_slot
    end = 0
    for chunk in chunks:
        begin, end = end, end + chunk.rows
        first = chunk.answer.cached
        slots = _table(chunk.answer).slots(first, chunk.rows)
        rows[0, begin:end] = chunk.answer.tokens[first : first + chunk.rows]
        rows[1, begin:end] = np.arange(first, first + chunk.rows)
        rows[2, begin:end] = np.arange(slots.start, slots.stop) if isinstance(slots, range) else slots
    return rows


def _table(answer: Answer) -> PageTable:
    assert answer.table is not None
    return answer.table


def _sample_rows(
    positions: Tensor, emitting: Sequence[Answer], valid: Tensor, tree: _Tree, draft: Draft | None
) -> SampleRows:
    """The rows that choose. draft: if the draft tokens before each row are needed."""
    device = valid.device
    decodes = valid.shape[0]
    state = torch.tensor([(a.slot, a.generated) for a in emitting], dtype=torch.int64, device=device).view(-1, 2)
    owners = torch.arange(decodes, device=device)[:, None].expand_as(valid)[valid]
    owners = torch.cat((owners, torch.arange(decodes, len(emitting), device=device)))  # [R] -> emitting request
    depth = torch.cat((tree.depth[valid], torch.zeros(len(emitting) - decodes, dtype=torch.int64, device=device)))
    path = None
    if draft is not None and draft.width:
        path = torch.full((owners.shape[0], draft.width), -1, dtype=torch.int64, device=device)
        path[: valid.sum()] = tree.paths(draft)[valid]
    return SampleRows(
        slots=state[owners, 0],
        positions=positions,
        generated=state[owners, 1] + depth,
        path=path,
    )


@dataclass(frozen=True, slots=True)
class _Tree:
    """Depths and ancestors of all rows of a draft: row 0 is the root, row 1 + i is node i."""

    depth: Tensor  # [D, K + 1] int64
    ancestors: Tensor  # [D, K + 1] int64: bit j is set if row j is this row or above it

    @staticmethod
    def of(draft: Draft) -> _Tree:
        rows = torch.arange(draft.width + 1, device=draft.tokens.device)
        if draft.is_chain:
            return _Tree(rows.expand(draft.tokens.shape[0], -1), ((2 << rows) - 1).expand(draft.tokens.shape[0], -1))
        jump = torch.cat((torch.zeros_like(draft.counts)[:, None], draft.parents + 1), dim=1)  # [D, K + 1]
        depth = (rows > 0).long().expand_as(jump)
        ancestors = (1 << rows).expand_as(jump)
        for _ in range(draft.width.bit_length()):  # pointer doubling, as in the verifier
            depth = depth + depth.gather(1, jump)
            ancestors = ancestors | ancestors.gather(1, jump)
            jump = jump.gather(1, jump)
        return _Tree(depth, ancestors)

    def paths(self, draft: Draft) -> Tensor:  # [D, K + 1, K]
        """The draft tokens from the root to each row, then -1."""
        node = torch.arange(draft.width, device=draft.tokens.device)
        on_path = (self.ancestors[..., None] >> (node + 1)) & 1 == 1  # [D, K + 1, K]
        order = on_path.logical_not().to(torch.int8).argsort(dim=-1, stable=True)  # nodes of the path first, in order
        tokens = torch.where(on_path, draft.tokens[:, None, :], -1)
        return tokens.gather(-1, order)
