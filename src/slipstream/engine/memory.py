"""What fits: the memory of an engine, planned before it takes a request."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.core.errors import CapacityError
from slipstream.engine.config import EngineConfig
from slipstream.kv.cache import KVCache
from slipstream.models.runner import Runner

_CPU_DEFAULT = 2**31
_CPU_SHARE = 0.5
_GPU_SHARE = 0.85
_LOGIT_COPIES = 3
"""A row of logits exists as the model gave it, processed, and once more while it is sampled."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and what they allow."""

    weights_bytes: int
    draft_weights_bytes: int
    cache_bytes: int  # target and draft caches
    workspace_bytes: int  # logits of the largest pass
    num_pages: int
    max_model_len: int


def plan_memory(target: Runner, drafts: Sequence[Runner], config: EngineConfig) -> MemoryPlan:
    """Divide the budget into workspace and pages. Raises `CapacityError` where what was asked for does not fit."""
    budget = _budget(target.device) if config.memory is None else config.memory
    workspace = config.max_draft_rows * target.vocab_size * 4 * _LOGIT_COPIES
    page = sum(KVCache.bytes_per_page(r.layers, config.page_size, r.dtype) for r in (target, *drafts))
    asked = config.max_model_len
    if asked is not None and asked > target.max_positions:
        raise CapacityError(
            f"max_model_len={asked}: the model has only {target.max_positions} positions; ask for at most that"
        )
    longest = asked or target.max_positions
    wanted = -(-longest // config.page_size)
    pages = min((budget - workspace) // page, wanted * config.max_num_seqs)
    if pages < (wanted if asked else 2):
        needed = workspace + page * wanted
        raise CapacityError(
            f"memory={budget:,} bytes: a context of {longest} tokens needs {needed:,} "
            f"({page * wanted:,} of cache and {workspace:,} of workspace); give more memory, "
            "or ask for a shorter max_model_len or a smaller max_draft_rows"
        )
    return MemoryPlan(
        weights_bytes=target.weights_bytes,
        draft_weights_bytes=sum(draft.weights_bytes for draft in drafts),
        cache_bytes=pages * page,
        workspace_bytes=workspace,
        num_pages=pages,
        max_model_len=min(longest, pages * config.page_size),
    )


def _budget(device: torch.device) -> int:
    """What to take where nothing was said: most of a GPU, a modest part of a machine that others use as well."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _GPU_SHARE)
    return int(min(_CPU_DEFAULT, _available() * _CPU_SHARE))


def _available() -> float:
    """Bytes that this process may still take: of the machine, and of the container it runs in."""
    found = [float("inf")]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024)
    with suppress(OSError, ValueError):
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found.append(max(0, limit - used))
    return min(found)
