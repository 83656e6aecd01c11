"""Plans the memory of an engine before it takes requests: how many pages, and how long a context, fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from slipstream.core.draft import MAX_NODES
from slipstream.core.errors import CapacityError
from slipstream.drafters.base import DeviceDrafter, Drafter
from slipstream.engine.config import EngineConfig, too_few_bytes
from slipstream.engine.draft_loops import q_bytes
from slipstream.engine.requests import MemoryPlan
from slipstream.kernels.gpu.jit import has_kernels
from slipstream.kernels.gpu.paged import kept_bytes
from slipstream.kv.cache import KVCache
from slipstream.models.runner import Runner
from slipstream.models.taps import Taps
from slipstream.verify.rejection import JUDGED_ROWS

_CPU_DEFAULT = 2**31
_CPU_SHARE = 0.5
_GPU_SHARE = 0.85
_FEWEST_PAGES = 2
_LOGIT_COPIES = 3
"""Copies of a row of logits: from the model, processed, and one more during sampling."""


def plan_memory(target: Runner, drafts: Sequence[Drafter], config: EngineConfig) -> MemoryPlan:
    """Divide the budget into workspace and pages. Raises `CapacityError` if the requested context does not fit."""
    budget = config.memory if isinstance(config.memory, int) else _budget(target.device, config.memory)
    rows = max(config.draft_rows, 3 * JUDGED_ROWS) if drafts else config.draft_rows
    page = _page_bytes(target, drafts, config)
    workspace = rows * target.vocab_size * 4 * _LOGIT_COPIES
    if has_kernels(target.device):
        workspace += _attention_bytes(target, config) + page  # the trash page
    workspace += q_bytes(drafts, config.draft_tokens, config.max_num_seqs + 1, target.vocab_size)
    workspace += sum(draft.workspace_bytes(config.max_num_seqs + 1) for draft in drafts)
    asked = config.max_model_len
    if asked is not None and asked > target.max_positions:
        raise CapacityError(
            f"max_model_len={asked}: the model has only {target.max_positions} positions; ask for at most that"
        )
    longest = asked or target.max_positions
    wanted = -(-longest // config.page_size)
    room = max(0, (budget - workspace) // page)  # pages
    if room < (wanted if asked else _FEWEST_PAGES):
        raise CapacityError(_too_little(config, budget, workspace, page, room))
    pages = min(room, wanted * config.max_num_seqs)
    length = min(longest, pages * config.page_size)
    drafts_page = page - _page_bytes(target, (), config)
    return MemoryPlan(
        weights_bytes=target.weights_bytes,
        draft_weights_bytes=sum(draft.weights_bytes for draft in drafts),
        cache_bytes=pages * page,
        workspace_bytes=workspace,
        num_pages=pages,
        max_model_len=length,
        limit="model" if length == target.max_positions else "max_model_len" if asked else "memory",
        max_positions=target.max_positions,
        draft_cache_bytes=pages * drafts_page,
        draft_places=_places(config, pages, page, drafts_page),
    )


def drafter_bytes(target: Runner, drafter: Drafter, plan: MemoryPlan, config: EngineConfig) -> int:
    """Planned bytes of one drafter. Hidden states that several drafters read count for each of them."""
    page = _page_bytes(target, [drafter], config) - _page_bytes(target, (), config)
    return drafter.weights_bytes + plan.num_pages * page + drafter.workspace_bytes(config.max_num_seqs + 1)


def _places(config: EngineConfig, pages: int, page: int, drafts_page: int) -> int | None:
    """Most draft nodes in the cache, after what drafters keep there. Raises if they keep more than is allowed."""
    wanted = config.max_draft_memory
    if wanted is None:
        return None
    limit = wanted * pages * page if isinstance(wanted, float) else wanted
    if not isinstance(wanted, float) and 0 < wanted < page:
        raise too_few_bytes("max_draft_memory", wanted, page)
    if limit < pages * drafts_page:
        part = math.ceil(100 * drafts_page / page) / 100
        raise CapacityError(
            f"max_draft_memory={wanted!r}: drafters keep {pages * drafts_page:,} bytes of the cache's "
            f"{pages * page:,} for themselves; allow {-(-pages * drafts_page // 2**20)}MiB or {part:.2f} at least, or "
            "leave out those that have K and V of their own or read hidden states (suffix and ngram have none)"
        )
    return int((limit - pages * drafts_page) // page) * config.page_size


def _page_bytes(target: Runner, drafts: Sequence[Drafter], config: EngineConfig) -> int:
    """Bytes of a page: the target's K and V, the hidden states that drafters read, and the drafters' own entries."""
    features = target.width_of(Taps.union([draft.taps for draft in drafts if isinstance(draft, DeviceDrafter)]))
    own = KVCache.bytes_per_page(target.layers, config.page_size, target.dtype, features)
    return own + sum(draft.page_bytes(config.page_size) for draft in drafts)


def _attention_bytes(target: Runner, config: EngineConfig) -> int:
    """Bytes of attention's partial results for the longest context, until they are summed."""
    longest = (config.max_model_len or target.max_positions) + 1 + MAX_NODES
    heads = target.query_heads
    return max(kept_bytes(heads, shape.kv_heads, shape.value_dim, longest) for shape in target.layers)


def _too_little(config: EngineConfig, budget: int, workspace: int, page: int, room: int) -> str:
    """The message of the error: the needed memory, and the remedies. A shorter context helps only if any page fits."""
    asked = config.max_model_len
    wanted = -(-asked // config.page_size) if asked else _FEWEST_PAGES
    needed = workspace + wanted * page
    remedy = f"give memory={-(-needed // 2**20)}MiB or more"
    if room * config.page_size >= 2:
        remedy += f", or ask for max_model_len={room * config.page_size} or less"
    given = f"memory={budget:,} bytes" if config.memory is not None else f"memory: {budget:,} bytes are available"
    context = f"a context of {asked} tokens" if asked else "even a short context"
    return f"{given}: {context} needs {needed:,} ({wanted * page:,} of cache and {workspace:,} of workspace); {remedy}"


def _budget(device: torch.device, part: float | None) -> int:
    """Bytes within this part of the memory; None: most of a GPU's free memory, less of a CPU's, which others share."""
    free = available_bytes(device)
    if part is not None:
        whole = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else free
        return max(0, int(free - (1 - part) * whole))
    return int(free * _GPU_SHARE if device.type == "cuda" else min(_CPU_DEFAULT, free * _CPU_SHARE))


def available_bytes(device: torch.device) -> float:
    """Bytes that this process can still allocate: on a GPU, or within the machine and its container."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    found = [float("inf")]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024)
    with suppress(OSError, ValueError):
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found.append(max(0, limit - used))
    return min(found)
