"""The settings of an engine: each is declared once, as a field of `EngineConfig`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from slipstream.core.errors import ConfigError
from slipstream.core.settings import check_settings, is_whole, setting

if TYPE_CHECKING:
    from slipstream.plan.planner import Planner

PlannerName = Literal["adaptive", "fixed"]
RoundsName = Literal["queued", "eager"]

_DRAFT_ROWS = 256
_STEP_TOKENS = {"cpu": 512, "cuda": 8192}
_PASS_TOKENS = 2048
_FEW_BYTES = 1024
"""Less than a page has: a smaller number of bytes is a mistake."""
_UNITS = {"": 1, **{u: 1000**n for n, u in enumerate("kmgt", 1)}, **{f"{u}i": 1024**n for n, u in enumerate("kmgt", 1)}}

ROW_SLOPE = {"cpu": 0.15, "cuda": 0.001}
"""Cost of one more row in a pass, relative to a pass of one row, until the planner has measured it."""

_MODEL, _SPECULATION = "model", "speculation"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of one engine, which are also parameters of `LLM`. Those with a `metavar` or `flag` are options.

    memory: Memory for the cache, beyond the weights, such as 512MiB or 2GiB, or a part: 90% of a GPU's, weights and
        other programs included. More lets longer and more requests run at once. Default: up to 2GiB on a CPU, most of
        what is free on a GPU.
    max_model_len: Longest prompt and answer together, such as 4096. Default: as long as the model and the memory allow.
    max_num_seqs: Most answers in progress at once.
    max_num_batched_tokens: Most prompt tokens of one step. A step that also decodes reads fewer, by their measured
        time. Default: 512 on a CPU, 8192 on a GPU, or two for each of max_num_seqs.
    max_draft_rows: Most rows of a pass for last tokens and draft nodes, over all requests. Default: 256, or one for
        each of max_num_seqs.
    page_size: Tokens of a page of the cache.
    draft_tokens: Most tokens to draft in a step, such as 8; fewer where more do not pay. Default: the drafter's own.
    planner: How much to draft. adaptive: as much as pays by measured costs, none where none pays. fixed: always as much
        as allowed, whether it pays or not. Default: adaptive; audit: fixed.
    min_gain: Draft only where that is expected to be X times as fast as plain decoding, such as 1.1. Default: 1.
    max_draft_memory: Most of the cache that drafts may take: 512MB, or 20% of it. A drafter that needs more is refused.
        Default: no limit.
    measure_costs: Time passes and drafts before the first request, now or never. Default: once for a machine and model,
        where it takes seconds at the most.
    warm_up: On a GPU, compile and capture what requests will need before the first one: seconds, and longer the first
        time on a machine. Without, the first requests wait for it. Default: on for serve, and for bench with --rate.
    rounds: queued queues the next step before the last one is read, eager waits for each step; None: queued on a GPU.
    graphs: On a GPU: run every step as it stands instead of capturing it as a CUDA graph. The same tokens, slower; try
        it where capturing fails.
    prefix_caching: Keep computed prompts in the cache for others that begin alike: the same tokens, sooner. Default:
        on; off for bench and tune, where the same prompts come again and again.
    max_queue: Most answers that may wait; further requests are refused with `QueueFull`.
    strict_drafter: End with the error of a drafter that fails or is dropped, instead of going on without it. For
        developing drafters.
    """

    memory: int | float | None = setting(str, None, metavar="SIZE", panel=_MODEL, checked=False)
    max_model_len: int | None = setting(int, None, low=2, metavar="TOKENS", panel=_MODEL)
    max_num_seqs: int = setting(int, 32, low=1, metavar="N", panel=_MODEL)
    max_num_batched_tokens: int | None = setting(int, None, low=1, metavar="TOKENS", panel=_MODEL)
    max_draft_rows: int | None = setting(int, None, low=1)
    page_size: int = setting(int, 16, low=1)
    draft_tokens: int | None = setting(int, None, low=0, high=63, metavar="K", panel=_SPECULATION)
    planner: PlannerName = setting(str, "adaptive", choices=get_args(PlannerName), metavar="NAME", panel=_SPECULATION)
    min_gain: float = setting(float, 1.0, low=1, metavar="X", panel=_SPECULATION)
    max_draft_memory: int | float | None = setting(str, None, metavar="SIZE", panel=_SPECULATION, checked=False)
    measure_costs: bool | None = setting(bool, None, flag="--measure-costs/--no-measure-costs", panel=_SPECULATION)
    warm_up: bool = setting(bool, False, flag="--warm-up/--no-warm-up", panel=_MODEL)
    rounds: RoundsName | None = setting(str, None, choices=get_args(RoundsName))
    graphs: bool = setting(bool, True, flag=" /--no-graphs", panel=_MODEL)
    prefix_caching: bool = setting(bool, True, flag="--enable-prefix-caching/--no-enable-prefix-caching", panel=_MODEL)
    max_queue: int | None = setting(int, None, low=0)
    strict_drafter: bool = setting(bool, False, flag="--strict-drafter", panel=_SPECULATION)

    def __post_init__(self) -> None:
        check_settings(self)
        memory, drafts = self.memory, self.max_draft_memory
        self._check("memory", memory is None or _is_size(memory), "whole bytes, or a part such as 0.9")
        self._check("memory", memory is None or memory > 0, "above 0 bytes")
        right = drafts is None or (_is_size(drafts) and drafts >= 0)
        self._check("max_draft_memory", right, "whole bytes, or a part of the cache such as 0.2")
        right = self.planner != "fixed" or self.min_gain == 1
        self._check("min_gain", right, "1 with planner='fixed', which drafts whatever is gained; take 'adaptive'")
        for key in ("max_draft_rows", "max_num_batched_tokens"):  # a pass must hold a step of every running request
            most = getattr(self, key)
            self._check(key, most is None or most >= self.max_num_seqs, f"at least max_num_seqs={self.max_num_seqs}")

    def _check(self, key: str, right: bool, remedy: str) -> None:
        if not right:
            raise ConfigError(f"{key}={getattr(self, key)!r}: must be {remedy}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EngineConfig:
        """Take the settings among these values. Amounts of memory may be texts such as "2GiB" or "20%"."""
        found: dict[str, Any] = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        for key in found.keys() & {"memory", "max_draft_memory"}:
            found[key] = parse_share(found[key], key)
        return cls(**found)

    @property
    def draft_rows(self) -> int:
        """Most rows of one pass for last tokens and draft nodes."""
        return self.max_draft_rows or max(_DRAFT_ROWS, self.max_num_seqs)

    def make_planner(self, device: str) -> Planner:
        """A planner for this type of device."""
        from slipstream.plan.planner import AdaptivePlanner, Planner  # imports torch, which `--help` must not wait for

        return Planner() if self.planner == "fixed" else AdaptivePlanner(ROW_SLOPE[device], min_gain=self.min_gain)

    def step_tokens(self, device: str) -> int:
        """Most prompt tokens of one step on this type of device."""
        return self.max_num_batched_tokens or max(_STEP_TOKENS[device], 2 * self.max_num_seqs)

    def pass_tokens(self, device: str) -> int:
        """Most prompt tokens of one of its passes."""
        return min(self.step_tokens(device), max(_PASS_TOKENS, 2 * self.max_num_seqs))


def _is_size(value: object) -> bool:
    """Whole bytes, or a part up to 1: a float such as 2e9 is neither."""
    return is_whole(value) or (isinstance(value, float) and value <= 1)


def parse_bytes(size: str | int | None, key: str = "memory") -> int | None:
    """Parse "2GiB", "512MB", "1e9" or a number of bytes."""
    if size is None or isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?\s*", str(size).lower())
    with suppress(ValueError, OverflowError):  # "1.2.3", or more than a float holds
        if match is not None:
            return int(float(match[1]) * _UNITS[match[2] or ""])
    raise ConfigError(f"{key}={size!r}: must be bytes or a size such as 512MB or 2GiB")


def parse_share(size: str | int | float | None, key: str) -> int | float | None:
    """Parse a size as `parse_bytes` does, or a part such as "20%" or "0.2"."""
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
    is_part = part is not None or re.fullmatch(r"[0-9]+\.[0-9]*", text)  # a number with a point and no unit
    with suppress(ConfigError):
        if not is_part:
            return parse_bytes(size, key)
    raise ConfigError(f"{key}={size!r}: must be a part such as 0.2 or 20%, or a size such as 512MB or 2GiB")


def too_few_bytes(key: str, size: int, page: int | None = None) -> ConfigError:
    """The error for a size below a page, which lacks its % or MiB. page: bytes of a page, if known."""
    of_page = "" if page is None else f", {page:,}"
    part = f"write {size}% or {size / 100:g} for a part, {size}MiB for bytes"
    remedy = part if size <= 100 else "write 512MiB, say, or 20%"
    return ConfigError(f"{key}={size}: must be at least the bytes of a page{of_page}; {remedy}")
