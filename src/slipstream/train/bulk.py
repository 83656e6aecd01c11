"""Bulk generation: about a thousand answers at a time, without a scheduler.

A serving engine runs some Python for each answer and step, which a thousand answers would wait for. Here each lane owns
its pages, steps are queued several at a time without synchronizing, and numpy sorts the results. The host is one batch
of steps behind: while it reads results and queues prompts for free lanes, the device runs the next batch. The rule of
sampling is the engine's: an answer is the one that `LLM.generate` gives for the same prompt, temperature and seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.core.draft import Tree
from slipstream.core.errors import CapacityError, ConfigError
from slipstream.engine.rounds import Machine, Round, Rounds, RoundShape
from slipstream.kernels.gpu.paged import SPLIT_KEYS
from slipstream.kernels.gpu.rows import RECENT, LaneState
from slipstream.kv.cache import KVCache
from slipstream.models.batch import PassBatch, fetched, sent
from slipstream.models.runner import Runner
from slipstream.sampling.choose import choose
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable

PAGE_SIZE = 16
ROUNDS = 8  # steps queued at a time. More is less work for the host; fewer notices ends sooner
_READ_ROWS = 8192  # prompt tokens in one pass
_REFILL_SHARE = 32  # refill when one lane in 32 is free: prompts are cheaper together
_FREE = -1
_EMPTY = Tree()


@dataclass(frozen=True, slots=True)
class BulkRequest:
    """A request for one answer."""

    prompt: Sequence[int]
    seed: int
    temperature: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class BulkAnswer:
    """A finished answer: the number of its request, and its tokens with the end token."""

    number: int
    tokens: NDArray[np.int32]
    broken: bool = False  # the model gave NaN or masked every token


@dataclass(frozen=True, slots=True)
class _Firsts:
    """The first tokens of answers, chosen by their prompts' pass."""

    lanes: NDArray[np.int64]  # [A]
    tokens: torch.Tensor  # [A] on the host, valid after synchronizing


@dataclass(frozen=True, slots=True)
class _Batch:
    """Queued steps."""

    lanes: NDArray[np.int64]  # [B]
    owners: NDArray[np.int64]  # [B]: the request of each lane
    firsts: tuple[_Firsts, ...]
    tokens: torch.Tensor  # [ROUNDS, requests] on the host, valid after `done`
    done: Any  # an event, or None on a CPU


def page_span(max_len: int) -> int:
    """Pages of a lane. A finished answer runs on for up to two batches of steps before the host notices."""
    return -(-(max_len + 2 * ROUNDS + 1) // PAGE_SIZE)


def lane_bytes(target: Runner, max_len: int) -> int:
    """Memory of one lane, its cache and its logits, for prompts and answers of `max_len` tokens together."""
    cache = KVCache.bytes_per_page(target.layers, PAGE_SIZE, target.dtype, 0) * page_span(max_len)
    return cache + 3 * 4 * target.vocab_size


class Bulk:
    """Writes answers with one target, `lanes` at a time."""

    def __init__(
        self, target: Runner, *, lanes: int, max_len: int, end_ids: Iterable[int], graphs: bool = True
    ) -> None:
        """max_len: most tokens of a prompt and its answer together. end_ids: tokens that end an answer."""
        if max_len + 2 * ROUNDS > target.max_positions:
            raise ConfigError(
                f"prompts and answers of up to {max_len} tokens: the model has {target.max_positions} positions; ask "
                f"for at most {target.max_positions - 2 * ROUNDS} (max_prompt_tokens plus max_tokens)"
            )
        device, span = target.device, page_span(max_len)
        self._target, self._max_len, self._span = target, max_len, span
        self._usual_ends = frozenset(end_ids)
        self._ends = np.array([], dtype=np.int64)
        try:
            self._cache = target.new_cache(lanes * span + 1, PAGE_SIZE)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"lanes={lanes}: their cache does not fit on {device}; lower lanes or max_tokens"
            ) from error
        self._sampling = SamplingTable(lanes + 1, target.vocab_size, device)
        trash = lanes * span  # the page of padding lanes
        pages = torch.full((lanes + 1, span), trash, dtype=torch.int32)
        pages[:lanes] = torch.arange(lanes * span, dtype=torch.int32).view(lanes, span)

        def column(value: int) -> torch.Tensor:
            return torch.full((lanes + 1,), value, dtype=torch.int64, device=device)

        recent = torch.zeros((lanes + 1, RECENT), dtype=torch.int64, device=device)
        self._state = LaneState(column(0), column(0), column(1), column(0), pages.to(device), recent)
        machine = Machine(target, self._cache, self._sampling, self._state, PAGE_SIZE, trash * PAGE_SIZE)
        self._rounds = Rounds(machine, {}, graphs=graphs)
        self._collected = [torch.zeros((ROUNDS, lanes), dtype=torch.int64, device=device) for _ in range(2)]
        self._turn = 0
        self._lanes = lanes
        # the host's view of each lane
        self._requests: dict[int, BulkRequest] = {}  # by number
        self._owner = np.full(lanes, _FREE, dtype=np.int64)
        self._count = np.zeros(lanes, dtype=np.int64)
        self._limit = np.zeros(lanes, dtype=np.int64)
        self._written = np.zeros((lanes, max_len + 2 * ROUNDS + 1), dtype=np.int32)
        self._firsts: list[_Firsts] = []

    def write(
        self, requests: Iterable[tuple[int, BulkRequest]], end_ids: Iterable[int] | None = None
    ) -> Iterator[BulkAnswer]:
        """Answer numbered requests; yields answers as they end. Reads requests as lanes become free.

        end_ids: overrides the usual ones.
        """
        coming = iter(requests)
        self._ends = np.array(sorted(self._usual_ends if end_ids is None else end_ids), dtype=np.int64)
        queued: _Batch | None = None
        features = Features(greedy=True, sampled=True)
        while True:
            # not a decorator: the caller, between two answers, must not be in inference mode
            with torch.inference_mode():
                self._fill(coming, features)
                batch = self._queue(features) if self._requests else None
                ended = self._collect(queued) if queued is not None else []
            yield from ended
            queued = batch
            if queued is None and not self._requests:
                return

    @property
    def unfinished_tokens(self) -> int:
        """Tokens of unfinished answers. Safe to call from any thread."""
        return int(self._count[self._owner != _FREE].sum())

    def _fill(self, coming: Iterator[tuple[int, BulkRequest]], features: Features) -> None:
        """Give free lanes new prompts, and run these."""
        free = np.flatnonzero(self._owner == _FREE)
        if len(free) < max(1, self._lanes // _REFILL_SHARE):
            return
        new = list(islice(coming, len(free)))
        lanes: list[int] = []
        rows = begin = 0
        for at, (number, ask) in enumerate(new):
            length = len(ask.prompt)
            if not 0 < length <= self._max_len - ask.max_tokens:
                raise ConfigError(
                    f"a prompt of {length} tokens for an answer of {ask.max_tokens}: must be at least 1, and together "
                    f"at most {self._max_len}"
                )
            if rows + length > _READ_ROWS and lanes:
                self._read(np.array(lanes), [one for _, one in new[begin:at]], features)
                lanes, rows, begin = [], 0, at
            lane = int(free[at])
            lanes.append(lane)
            rows += length
            self._requests[number] = ask
            self._owner[lane], self._count[lane], self._limit[lane] = number, 0, ask.max_tokens
        if lanes:
            self._read(np.array(lanes), [one for _, one in new[begin:]], features)

    def _read(self, lanes: NDArray[np.int64], asks: Sequence[BulkRequest], features: Features) -> None:
        """Run prompts in one pass, and give their lanes the first tokens."""
        device, count = self._target.device, len(asks)
        lengths = np.array([len(ask.prompt) for ask in asks])
        starts = np.concatenate(([0], np.cumsum(lengths)))
        total = int(starts[-1])
        ids = np.concatenate([np.asarray(ask.prompt, dtype=np.int64) for ask in asks])
        positions = np.arange(total) - np.repeat(starts[:-1], lengths)
        slots = np.repeat(lanes * self._span * PAGE_SIZE, lengths) + positions
        seeds = np.array([ask.seed for ask in asks], dtype=np.uint64).view(np.int64)
        flat = sent(
            np.concatenate((ids, positions, slots, starts[1:] - 1, lanes, lengths, seeds), dtype=np.int64), device
        )
        on_ids, on_positions, on_slots = flat[: 3 * total].view(3, total).unbind(0)
        last, on_lanes, on_lengths, on_seeds = flat[3 * total :].view(4, count).unbind(0)
        temperatures = sent(np.array([ask.temperature for ask in asks], dtype=np.float32), device)
        self._sampling.add_plain(on_lanes, temperatures, on_seeds)
        batch = PassBatch(
            input_ids=on_ids,
            positions=on_positions,
            slots=on_slots,
            row_starts=tuple(starts.tolist()),
            prefix_lengths=(0,) * count,
            pages=tuple(self._pages(lane, length) for lane, length in zip(lanes, lengths, strict=True)),
            is_tree=(False,) * count,
            masks=None,
            logit_rows=last,
        )
        logits = self._target.forward(batch, self._cache)
        none = torch.zeros_like(on_lengths)
        chosen = choose(logits, SampleRows(on_lanes, on_lengths, none), self._sampling, features)
        state = self._state
        for column, values in (
            (state.last, chosen.clamp_min(0)),
            (state.length, on_lengths),
            (state.generated, none + 1),
        ):
            column.index_copy_(0, on_lanes, values)
        self._firsts.append(_Firsts(lanes, fetched(chosen)))

    def _pages(self, lane: int, length: int) -> tuple[int, ...]:
        first = int(lane) * self._span
        return tuple(range(first, first + -(-int(length) // PAGE_SIZE)))

    def _queue(self, features: Features) -> _Batch:
        """Queue steps for all lanes with unfinished answers, as far as the host knows."""
        lanes = np.flatnonzero(self._owner != _FREE)
        run = self._round(len(lanes), features)
        run.load(lanes.tolist(), [_EMPTY] * len(lanes), [()] * len(lanes))
        self._turn = 1 - self._turn
        collected = self._collected[self._turn][:, : run.shape.requests]
        for turn in range(ROUNDS):
            run.verify()
            collected[turn].copy_(run.verdicts.tokens[:, 0])
        tokens = fetched(collected.contiguous())
        done = None
        if collected.is_cuda:
            done = torch.cuda.Event()
            done.record()
        firsts, self._firsts = tuple(self._firsts), []
        return _Batch(lanes, self._owner[lanes], firsts, tokens, done)

    def _round(self, lanes: int, features: Features) -> Round:
        """A step of a few possible sizes: all lanes, a half, a quarter, ..."""
        size = self._lanes
        while size // 2 >= lanes:
            size //= 2
        keys = -(-(self._max_len + 2 * ROUNDS + 1) // SPLIT_KEYS) * SPLIT_KEYS
        version = self._sampling.version_of(features)
        return self._rounds.of(RoundShape(size, 0, size, keys, False, features, version, False))

    def _collect(self, batch: _Batch) -> list[BulkAnswer]:
        """Read the results of queued steps; free the lanes of finished answers."""
        if batch.done is not None:
            batch.done.synchronize()
        ended: list[BulkAnswer] = []
        for firsts in batch.firsts:
            ended += self._take(firsts.lanes, firsts.tokens.numpy()[:, None])
        mine = self._owner[batch.lanes] == batch.owners  # the other answers ended earlier
        tokens = batch.tokens.numpy()[:, : len(batch.lanes)].T  # [B, ROUNDS]
        return ended + self._take(batch.lanes[mine], tokens[mine])

    def _take(self, lanes: NDArray[np.int64], tokens: NDArray[np.int64]) -> list[BulkAnswer]:
        """Append chosen tokens [B, n] to the answers of distinct lanes [B], up to their ends. Returns finished ones."""
        if not len(lanes):
            return []
        have, reach = self._count[lanes], np.arange(tokens.shape[1])
        self._written[lanes[:, None], have[:, None] + reach] = tokens
        broken = tokens < 0
        stops = broken | np.isin(tokens, self._ends)
        first_stop = np.where(stops.any(axis=1), stops.argmax(axis=1), tokens.shape[1])
        room = self._limit[lanes] - have
        taken = np.minimum(np.minimum(first_stop + 1, tokens.shape[1]), room)
        self._count[lanes] = have + taken
        over = (first_stop < room) & (first_stop < tokens.shape[1]) | (taken == room)
        ended = []
        for at in np.flatnonzero(over):
            lane = int(lanes[at])
            number = int(self._owner[lane])
            nan = bool(first_stop[at] < taken[at] and broken[at, first_stop[at]])
            ended.append(BulkAnswer(number, self._written[lane, : self._count[lane]].copy(), nan))
            self._owner[lane] = _FREE
            del self._requests[number]
        return ended
