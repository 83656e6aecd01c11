"""The sampling parameters of all running requests, as static tensors with one row a slot.

A pass mixes requests with different parameters. Each row of logits finds those of its request by slot: one vectorized
rule serves all. The host knows which `Features` are in use, and unused work is skipped. State that depends on the
tokens so far (penalty counts, the tail that bad words are matched against) is here, too; `commit` updates it.

A new setting of a request is declared in `SamplingParams` (`core/params.py`), from which its option and HTTP field
follow. Here it is a row of `_COLUMNS`, and a field of `Features` (with a line of `Features.of`) that lets its rule be
skipped. The rule is a function of `adjust.py` if it precedes temperature (then `Features.adjusts` names it), else of
`filters.py`, whose GPU form is in `fused.py`; `audit/rounding.py` has to know a new filter too.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.errors import InvalidRequest
from slipstream.core.params import SamplingParams
from slipstream.sampling.noise import hash_tokens, position_keys, stream_key, stream_keys
from slipstream.sampling.rows import SampleRows

PADDING = -1
_ALIGNED = 256
"""Bytes: the alignment of a column. Kernels are compiled for pointers that are aligned as those of tensors are."""
SMALLEST_TEMPERATURE = 2.0**-126  # below it fp32 loses digits, then becomes 0, which would mean greedy


class Column(NamedTuple):
    """A number of each slot: its type, its value in an empty slot, and its value for a request."""

    dtype: torch.dtype
    empty: float
    of: Callable[[SamplingParams, Features], float]


_COLUMNS: Mapping[str, Column] = {
    "temperature": Column(torch.float32, 0, lambda p, f: max(p.temperature, SMALLEST_TEMPERATURE) if f.sampled else 0),
    "top_k": Column(torch.int64, 0, lambda p, f: p.top_k if f.top_k else 0),
    "top_p": Column(torch.float64, 1, lambda p, f: p.top_p if f.top_p else 1),
    "log_min_p": Column(torch.float32, -math.inf, lambda p, f: math.log(p.min_p) if f.min_p else -math.inf),
    "repetition": Column(torch.float32, 1, lambda p, f: p.repetition_penalty),
    "frequency": Column(torch.float32, 0, lambda p, f: p.frequency_penalty),
    "presence": Column(torch.float32, 0, lambda p, f: p.presence_penalty),
    "penalized": Column(torch.bool, 0, lambda p, f: p.penalized),
    "rejects": Column(torch.bool, 0, lambda p, f: p.rejects),
    "min_tokens": Column(torch.int64, 0, lambda p, f: p.min_tokens),
}


@dataclass(frozen=True, slots=True)
class Features:
    """The parameters that some request of a batch uses. False everywhere: every row is plain greedy."""

    greedy: bool = False  # some row is not sampled
    sampled: bool = False  # some row is not greedy
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    bias: bool = False
    min_tokens: bool = False
    bad_words: bool = False
    rejection: bool = False  # some request's drafts are judged by rejection sampling
    grammar: bool = False  # some request may choose only what its grammar allows: rows have masks
    allowed: bool = False  # some request may choose only tokens of a list

    @staticmethod
    def of(params: SamplingParams, vocab_size: int, *, ends: bool, bad_words: bool) -> Features:
        """Those of one request. ends: it has tokens that may not come before `min_tokens`."""
        sampled = not params.greedy
        return Features(
            greedy=not sampled,
            sampled=sampled,
            top_k=sampled and 0 < params.top_k < vocab_size,
            top_p=sampled and params.top_p < 1,
            min_p=sampled and params.min_p > 0,
            penalties=params.penalized,
            bias=bool(params.logit_bias),
            min_tokens=ends,
            bad_words=bad_words,
            rejection=params.rejects,
            grammar=params.structured_outputs is not None,
            allowed=params.allowed_token_ids is not None,
        )

    @property
    def adjusts(self) -> bool:
        """Some rule of `adjust.py` is used. Tensors of the table that those read may be replaced by wider ones."""
        return self.penalties or self.bias or self.min_tokens or self.bad_words or self.allowed

    def __or__(self, other: Features) -> Features:
        return Features(*(getattr(self, name) or getattr(other, name) for name in Features.__slots__))


def is_stale(version: int, current: int) -> bool:
    """A graph of this version reads tensors that were replaced since. Version 0 reads none that grow."""
    return 0 < version < current


class SamplingTable:
    """Owns the per-slot tensors. `add`, `add_plain`, `remove` and `commit` are the only writers."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.num_slots, self.vocab_size, self.device = num_slots, vocab_size, torch.device(device)

        self._in_bulk = False  # it has requests from `add_plain`
        kinds = {name: (column.empty, column.dtype) for name, column in _COLUMNS.items()}
        self._columns = Columns(num_slots, {**kinds, "streams": (0, torch.int64)}, self.device)
        column = self._columns.by_name
        self.temperature = column["temperature"]  # [S], 0 is greedy
        self.top_k = column["top_k"]  # [S], 0 is off
        self.top_p = column["top_p"]  # [S], 1 is off
        self.log_min_p = column["log_min_p"]  # [S], -inf is off
        self.streams = column["streams"]  # [S] noise key of seed and sample index
        self.repetition = column["repetition"]  # [S]
        self.frequency = column["frequency"]  # [S]
        self.presence = column["presence"]  # [S]
        self.penalized = column["penalized"]  # [S]
        self.rejects = column["rejects"]  # [S]: drafts are judged by rejection sampling
        self.min_tokens = column["min_tokens"]  # [S]

        def ragged(*shape: int) -> Tensor:
            return torch.full((num_slots, *shape), PADDING, dtype=torch.int64, device=self.device)

        # widths grow with the longest list so far
        self.end_ids = ragged(0)  # [S, E] never chosen before min_tokens
        self.bias_ids = ragged(0)  # [S, N]
        self.bias = torch.zeros(num_slots, 0, device=self.device)  # [S, N]
        self.bad_words = ragged(0, 1)  # [S, W, L] each word flush right
        self.tails = ragged(0)  # [S, L - 1] last emitted tokens, flush right

        self.allowed = torch.zeros(0, -(-vocab_size // 32), dtype=torch.int32, device=self.device)  # [S, W] bits
        # V times as large as the rest: made when the first request has penalties
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=self.device)  # [S, V] emitted so far
        self.prompt_seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=self.device)  # [S, V]

        self.token_hashes = hash_tokens(torch.arange(vocab_size, dtype=torch.int32, device=self.device))  # [V]
        self._features: dict[int, Features] = {}
        self._captured = self._addresses()
        self.version = 0  # grows when a tensor is replaced by a wider one: captured graphs read the old one

    def add(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        sample: int = 0,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        end_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """Give `slot` to a request. output: the tokens that it emitted before it was preempted.

        `end_ids` (EOS and stop ids) are not chosen while fewer than `min_tokens` were emitted. The last token of a
        bad word is not chosen where the emitted tokens end with the ones before it; the prompt does not count.
        """
        assert not self._in_bulk, "the table has requests from `add_plain`, which the host does not know"
        self._check_ids("logit_bias", list(params.logit_bias))
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("bad_words", [token for word in bad_words for token in word])
        if params.penalized:
            self._check_ids("prompt", prompt)
            self._check_ids("output", output)
        if not all(bad_words):
            raise InvalidRequest(f"bad_words={[list(w) for w in bad_words]}: each must have at least one token")
        ends = [token for token in end_ids if 0 <= token < self.vocab_size] if params.min_tokens else []
        features = Features.of(params, self.vocab_size, ends=bool(ends), bad_words=bool(bad_words))
        self._features[slot] = features
        try:
            self._write(slot, params, features, seed, sample, prompt, output, ends, bad_words)
        finally:  # also where the memory for a wider tensor was not there
            addresses = self._addresses()
            if addresses != self._captured:
                self._captured, self.version = addresses, self.version + 1

    def add_plain(self, slots: Tensor, temperatures: Tensor, seeds: Tensor) -> None:
        """Give distinct `slots` [B] to requests with a temperature [B], a seed [B] and no other parameter.

        For thousands of requests: three launches for all. The tensors are on the device and the host does not read
        them, so the table must never have requests from `add`.
        """
        assert not self._features, "the table has requests from `add`, which would be sent again over these"
        self._in_bulk = True
        sampled = torch.where(temperatures > 0, temperatures.clamp_min(SMALLEST_TEMPERATURE), 0.0)
        self.temperature.index_copy_(0, slots, sampled.to(torch.float32))
        self.streams.index_copy_(0, slots, stream_keys(seeds, torch.zeros_like(seeds)))

    def _write(
        self,
        slot: int,
        params: SamplingParams,
        features: Features,
        seed: int,
        sample: int,
        prompt: Sequence[int],
        output: Sequence[int],
        ends: Sequence[int],
        bad_words: Sequence[Sequence[int]],
    ) -> None:
        numbers = {name: column.of(params, features) for name, column in _COLUMNS.items()}
        numbers["streams"] = stream_key(seed, sample)
        self._columns.write(slot, numbers)
        self.end_ids = self._fill(self.end_ids, slot, torch.tensor(ends, dtype=torch.int64))
        self.bias_ids = self._fill(self.bias_ids, slot, torch.tensor(list(params.logit_bias), dtype=torch.int64))
        self.bias = self._fill(self.bias, slot, torch.tensor(list(params.logit_bias.values()), dtype=torch.float32), 0)
        self._add_allowed(slot, params.allowed_token_ids)
        self._add_bad_words(slot, bad_words, output)
        self._add_penalties(slot, params, prompt, output)

    def _addresses(self) -> list[int]:
        """Addresses of the tensors that may be replaced by wider ones."""
        biased = (self.end_ids, self.bias_ids, self.bias, self.allowed)
        grown = (*biased, self.bad_words, self.tails, self.counts, self.prompt_seen)
        return [tensor.data_ptr() for tensor in grown]

    def remove(self, slot: int) -> None:
        """Take the slot back. The next `add` overwrites its row."""
        self._features.pop(slot, None)

    def features(self, slots: Sequence[int]) -> Features:
        """The features of these slots together. Reads no tensor."""
        together = Features()
        for wanted in {self._features[slot] for slot in slots}:
            together |= wanted
        return together

    def version_of(self, features: Features) -> int:
        """The version of the tensors that a step with these features reads; 0: they are never replaced."""
        return self.version if features.adjusts else 0

    def commit(self, slots: Tensor, tokens: Tensor, lengths: Tensor, features: Features | None = None) -> None:
        """Requests in distinct `slots` [B] emitted `tokens[b, :lengths[b]]` of tokens [B, K]. -1 is no token.

        features: of these requests together; None: of all that run.
        """
        wanted = self._features.values() if features is None else (features,)
        penalties, words = any(f.penalties for f in wanted), any(f.bad_words for f in wanted)
        if not (penalties or words):
            return
        places = torch.arange(tokens.shape[1], device=self.device)
        emitted = (places < lengths[:, None]) & (tokens >= 0)  # [B, K]
        if penalties:
            flat = slots[:, None] * self.vocab_size + tokens.clamp(min=0)  # [B, K]
            self.counts.view(-1).scatter_add_(0, flat.flatten(), emitted.to(torch.int32).flatten())
        if words:
            tails = last_tokens(self.tails[slots], torch.where(emitted, tokens, PADDING))
            self.tails.index_copy_(0, slots, tails)

    def noise_keys(self, rows: SampleRows) -> Tensor:
        """Keys [R, 2] int32 of the noise that decides these rows."""
        return position_keys(self.streams[rows.slots], rows.positions)

    def apart(self, whose: str, features: Features) -> SamplingTable:
        """A view in which requests with rejection sampling have noise of the drafter `whose` own.

        Rejection sampling needs draws that are independent of all other proposals for the position, and of the choice
        of a step without drafts. Requests with exact verification keep the noise by which draft and target choose
        alike. features: of the requests in question.
        """
        if not features.rejection:
            return self
        view = copy.copy(self)
        salt = torch.full_like(self.streams, zlib.crc32(whose.encode()) + (1 << 32))  # no sample has so high an index
        view.streams = torch.where(self.rejects, stream_keys(self.streams, salt), self.streams)
        return view

    def _add_penalties(self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
        if not params.penalized:
            return
        if self.counts.shape[0] == 0:  # both or, where memory is short, neither
            counts, seen = (old.new_zeros(self.num_slots, self.vocab_size) for old in (self.counts, self.prompt_seen))
            self.counts, self.prompt_seen = counts, seen
        counted = torch.tensor(list(output), dtype=torch.int64).bincount(minlength=self.vocab_size)
        self.counts[slot] = _sent(counted.to(torch.int32), self.device)
        places = _sent(torch.tensor(list(prompt), dtype=torch.int64), self.device)
        self.prompt_seen[slot].zero_().index_fill_(0, places, True)  # to assign a number to places may wait

    def _add_allowed(self, slot: int, tokens: Sequence[int] | None) -> None:
        if tokens is None and not self.allowed.shape[0]:
            return
        if not self.allowed.shape[0]:
            self.allowed = self.allowed.new_full((self.num_slots, self.allowed.shape[1]), -1)
        bits = torch.ones(self.allowed.shape[1], 32, dtype=torch.bool)  # [W, 32]
        if tokens is not None:
            bits.zero_().view(-1)[torch.tensor(tokens, dtype=torch.int64)] = True
        words = (bits.to(torch.int64) << torch.arange(32)).sum(dim=1).to(torch.int32)  # the last bit is the sign
        self.allowed[slot] = _sent(words, self.device)

    def _add_bad_words(self, slot: int, words: Sequence[Sequence[int]], output: Sequence[int]) -> None:
        _, count, length = self.bad_words.shape
        more_words = max(0, len(words) - count)
        longer = max(0, max(map(len, words), default=0) - length)
        if more_words or longer:
            wider = pad(self.bad_words, (longer, 0, 0, more_words), value=PADDING)
            self.bad_words, self.tails = wider, pad(self.tails, (longer, 0), value=PADDING)
        _, count, length = self.bad_words.shape
        if not count:
            return
        flush_right = [[PADDING] * (length - len(word)) + list(word) for word in words]
        flush_right += [[PADDING] * length] * (count - len(words))
        self.bad_words[slot] = _sent(torch.tensor(flush_right, dtype=torch.int64).view(count, length), self.device)
        width = length - 1
        tail = list(output[-width:]) if width else []
        self.tails[slot] = _sent(torch.tensor([PADDING] * (width - len(tail)) + tail, dtype=torch.int64), self.device)

    @staticmethod
    def _fill(table: Tensor, slot: int, values: Tensor, padding: int = PADDING) -> Tensor:
        """Write `values` [n] and padding into a row of `table` [S, W]. Where n > W it is widened to a power of two:
        all graphs that read it must be captured again."""
        if not (values.shape[0] or table.shape[1]):
            return table
        if values.shape[0] > table.shape[1]:
            width = 1 << (values.shape[0] - 1).bit_length()
            table = pad(table, (0, width - table.shape[1]), value=padding)
        table[slot] = _sent(pad(values, (0, table.shape[1] - values.shape[0]), value=padding), table.device)
        return table

    def _check_ids(self, key: str, tokens: Sequence[int]) -> None:
        wrong = [token for token in tokens if not 0 <= token < self.vocab_size]
        if wrong:
            raise InvalidRequest(f"{key}: token {wrong[0]} must be 0 to {self.vocab_size - 1} (the vocabulary)")


class Columns:
    """Columns [S] by name, which the host writes by rows and the device reads.

    To set one number of a tensor on a GPU waits until all that is queued there is done. So the columns lie in one block
    of memory with a twin on the host, which writes there and sends the whole block without waiting.

    kinds: of each column the value before the first write, and the type.
    """

    def __init__(self, rows: int, kinds: Mapping[str, tuple[float, torch.dtype]], device: torch.device) -> None:
        places: dict[str, tuple[int, int]] = {}
        size = 0
        for name, (_, dtype) in kinds.items():
            places[name] = size, size + rows * dtype.itemsize
            size = -(-places[name][1] // _ALIGNED) * _ALIGNED

        def columns(block: Tensor) -> dict[str, Tensor]:
            return {name: block[begin:end].view(kinds[name][1]) for name, (begin, end) in places.items()}

        self._host = torch.zeros(size, dtype=torch.uint8)
        self._block = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._written = {name: column.numpy() for name, column in columns(self._host).items()}
        for name, (value, _) in kinds.items():
            self._written[name][:] = value
        self.by_name = columns(self._block)
        self._send()

    def write(self, row: int, values: Mapping[str, float]) -> None:
        """Write numbers of one row; the others stay as they are."""
        for name, value in values.items():
            self._written[name][row] = value
        self._send()

    def _send(self) -> None:
        """Copy the block to the device. Work that was queued before still reads the old numbers."""
        if self._block is not self._host:
            host = self._host.pin_memory() if self._block.is_cuda else self._host
            self._block.copy_(host, non_blocking=True)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """The same on the device, without waiting for queued work."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def last_tokens(tail: Tensor, more: Tensor) -> Tensor:
    """The last W tokens of `tail` [N, W] followed by `more` [N, M], flush right; -1 is padding wherever it stands."""
    both = torch.cat((tail, more), dim=1)
    padding_first = torch.argsort((both >= 0).to(torch.uint8), dim=1, stable=True)
    return both.gather(1, padding_first)[:, both.shape[1] - tail.shape[1] :]
