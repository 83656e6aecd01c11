"""How an engine is set up. One frozen object, so that two places cannot disagree."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from slipstream.core.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.plan.planner import Planner

PlannerName = Literal["adaptive", "fixed"]
RoundsName = Literal["queued", "eager"]

_DRAFT_ROWS = 256
_STEP_TOKENS = {"cpu": 512, "cuda": 8192}
_PASS_TOKENS = 2048
_FEW_BYTES = 1024
"""Fewer than any page has."""
_UNITS = {"": 1, **{u: 1000**n for n, u in enumerate("kmgt", 1)}, **{f"{u}i": 1024**n for n, u in enumerate("kmgt", 1)}}

ROW_SLOPE = {"cpu": 0.15, "cuda": 0.001}
"""What one more row adds to a pass, as a part of the first one, until the engine has seen or measured its own."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and choices of one engine.

    memory: bytes for the caches (target and drafts) and the workspace of a pass, beyond the weights. A part such
        as 0.9 means that part of a GPU's whole memory, weights and other programs included, and of what is free beside
        a CPU. None: a sensible part of what is free.
    max_model_len: longest prompt plus answer; None: as long as the model and the memory allow.
    max_num_seqs: most requests that run at once.
    max_num_batched_tokens: most prompt tokens that one step reads. Beside requests that decode it reads fewer, by their
        measured time; None: 512 on a CPU, 8192 on a GPU, or two for each of max_num_seqs.
    max_draft_rows: most rows of one pass that are last tokens or guesses, over all requests; None: 256, or one for
        each of max_num_seqs.
    page_size: tokens of a page of the cache.
    draft_tokens: most tokens to guess at a time; None: what the drafter is made for.
    planner: "adaptive" drafts what pays; "fixed" always drafts as much as was asked for.
    min_gain: how many times as fast as plain decoding drafts must be, as expected before and as measured,
        for more of them to be made.
    max_draft_memory: most that drafts may take of the cache: what drafters keep there themselves (their own K and V,
        hidden states), and the places of guesses that are being checked. Bytes, or a part of the cache such as 0.2;
        None: no limit.
    measure_costs: time passes and drafts before the first request, so that the first plans are right already. True:
        now; False: never; None: where it takes seconds at the most, and once for a machine and model.
    warm_up: compile and record before the first request what requests will most likely need, on a GPU: a start takes
        seconds longer, and longer still where kernels must be compiled, once on a machine; no request waits for it.
    rounds: "queued" lets the device work ahead of the host, "eager" waits for each round; None: queued on a GPU.
    graphs: capture queued rounds as CUDA graphs. The tokens are the same without; it is slower, and easier to debug.
    prefix_caching: keep the pages of prompts that were computed, as long as nobody needs the room, for prompts that
        begin alike. The tokens are the same without.
    max_queue: most answers that may wait for their turn; further requests are refused with `QueueFull`. None: no limit.
    strict_drafter: raise what a drafter raises, and why it is dropped, instead of going on without it. For those who
        write one: every request that runs ends with the error.
    """

    memory: int | float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    max_draft_rows: int | None = None
    page_size: int = 16
    draft_tokens: int | None = None
    planner: PlannerName = "adaptive"
    min_gain: float = 1.0
    max_draft_memory: int | float | None = None
    measure_costs: bool | None = None
    warm_up: bool = False
    rounds: RoundsName | None = None
    graphs: bool = True
    prefix_caching: bool = True
    max_queue: int | None = None
    strict_drafter: bool = False

    def __post_init__(self) -> None:
        for key in ("max_model_len", "draft_tokens"):
            self._check(key, getattr(self, key) is None or _whole(getattr(self, key)), "a whole number, or None")
        for key in ("max_num_seqs", "page_size"):
            self._check(key, _whole(getattr(self, key)) and getattr(self, key) >= 1, "1 or more")
        rows, tokens = self.max_draft_rows, self.max_num_batched_tokens
        self._check("max_draft_rows", rows is None or (_whole(rows) and rows >= 1), "1 or more")
        self._check("max_num_batched_tokens", tokens is None or (_whole(tokens) and tokens >= 1), "1 or more")
        self._check("max_model_len", self.max_model_len is None or self.max_model_len >= 2, "2 or more")
        self._check("memory", self.memory is None or _size(self.memory), "whole bytes, or a part such as 0.9")
        self._check("memory", self.memory is None or self.memory > 0, "above 0 bytes")
        self._check("draft_tokens", self.draft_tokens is None or 0 <= self.draft_tokens <= 63, "0 to 63")
        self._check("planner", self.planner in get_args(PlannerName), f"one of {', '.join(get_args(PlannerName))}")
        self._check("rounds", self.rounds in (None, *get_args(RoundsName)), f"one of {', '.join(get_args(RoundsName))}")
        gain = self.min_gain
        self._check("min_gain", isinstance(gain, int | float) and gain >= 1, "1 or more, such as 1.1")
        planned = self.planner != "fixed" or gain == 1
        self._check("min_gain", planned, "1 with planner='fixed', which drafts whatever is gained; take 'adaptive'")
        share = self.max_draft_memory
        right = share is None or (_size(share) and share >= 0)
        self._check("max_draft_memory", right, "whole bytes, or a part of the cache such as 0.2")
        self._check("measure_costs", self.measure_costs in (None, True, False), "True, False, or None for the usual")
        for key in ("graphs", "prefix_caching", "warm_up", "strict_drafter"):
            self._check(key, isinstance(getattr(self, key), bool), "True or False")
        queue = self.max_queue
        self._check("max_queue", queue is None or (_whole(queue) and queue >= 0), "0 or more, or None for no limit")
        # every running request must be able to take its next step in one pass
        self._check(
            "max_draft_rows", rows is None or rows >= self.max_num_seqs, f"at least max_num_seqs={self.max_num_seqs}"
        )
        self._check(
            "max_num_batched_tokens",
            tokens is None or tokens >= self.max_num_seqs,
            f"at least max_num_seqs={self.max_num_seqs}",
        )

    @property
    def draft_rows(self) -> int:
        """Most rows of one pass that are last tokens or guesses."""
        return self.max_draft_rows or max(_DRAFT_ROWS, self.max_num_seqs)

    def make_planner(self, device: str) -> Planner:
        """A planner for a device of this type."""
        from slipstream.plan.planner import AdaptivePlanner, Planner  # imports torch, which `--help` must not wait for

        return Planner() if self.planner == "fixed" else AdaptivePlanner(ROW_SLOPE[device], min_gain=self.min_gain)

    def step_tokens(self, device: str) -> int:
        """Most prompt tokens of one step on a device of this type. Decodes leave half of it at least."""
        return self.max_num_batched_tokens or max(_STEP_TOKENS[device], 2 * self.max_num_seqs)

    def pass_tokens(self, device: str) -> int:
        """Most prompt tokens of one of its passes."""
        return min(self.step_tokens(device), max(_PASS_TOKENS, 2 * self.max_num_seqs))

    def _check(self, key: str, right: bool, remedy: str) -> None:
        if not right:
            raise ConfigError(f"{key}={getattr(self, key)!r}: must be {remedy}")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _size(value: object) -> bool:
    """Whole bytes, or a part of something: 2e9 would be all of it."""
    return _whole(value) or (isinstance(value, float) and value <= 1)


def parse_bytes(size: str | int | None, key: str = "memory") -> int | None:
    """ "2GiB", "512MB", "1e9" or a number of bytes."""
    if size is None or isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?\s*", str(size).lower())
    try:
        if match is not None:
            return int(float(match[1]) * _UNITS[match[2] or ""])
    except (ValueError, OverflowError):  # "1.2.3", or more than there are numbers for
        pass
    raise ConfigError(f"{key}={size!r}: must be bytes or a size such as 512MB or 2GiB")


def parse_share(size: str | int | float | None, key: str) -> int | float | None:
    """As `parse_bytes`, or a part: "20%" and "0.2" are a fifth."""
    if isinstance(size, float) or size is None:
        return size
    text = str(size).strip()
    if text.isdecimal() and 0 < int(text) < _FEW_BYTES:
        raise too_few_bytes(key, int(text))
    part = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*%", text)
    if part is not None and float(part[1]) <= 100:
        return float(part[1]) / 100
    if re.fullmatch(r"0?\.[0-9]+|1\.0*", text):
        return float(text)
    is_part = part is not None or re.fullmatch(r"[0-9]+\.[0-9]*", text)  # what has a point and no unit was meant as one
    with suppress(ConfigError):
        if not is_part:
            return parse_bytes(size, key)
    raise ConfigError(f"{key}={size!r}: must be a part such as 0.2 or 20%, or a size such as 512MB or 2GiB")


def too_few_bytes(key: str, size: int, page: int | None = None) -> ConfigError:
    """So few are a part or megabytes whose sign was forgotten. page: bytes of one, where that is known."""
    hold = "as a page has" if page is None else f"as a page has, {page:,}"
    part = f"write {size}% or {size / 100:g} for a part, {size}MiB for bytes"
    return ConfigError(
        f"{key}={size}: must be as many bytes {hold}; {part if size <= 100 else 'write 512MiB, say, or 20%'}"
    )
