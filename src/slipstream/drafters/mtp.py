"""Native multi-token prediction: the modules in the target's own checkpoint guess, one after another.

One module is a head like any other (`heads.py`). Several modules make one guess each: module j reads at position i the
token at i + 1 + j and module j - 1's output at the same position, so all of them stand at the same positions and see
the whole text. A module's outputs are kept beside K and V, for the next module to read when a text comes in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.drafters.base import DeviceTree, DraftRound, Opening, Services
from slipstream.drafters.heads import Chains, FeatureDrafter, Stretch, head_batch
from slipstream.kernels.gpu.rows import RECENT
from slipstream.kv.cache import KVCache
from slipstream.kv.pages import PageCopy
from slipstream.models.batch import PassBatch, sent
from slipstream.models.heads.checkpoint import read_config
from slipstream.models.heads.mtp import MtpHead
from slipstream.models.heads.mtp_files import find_modules

if TYPE_CHECKING:
    from slipstream.models.runner import Runner

_DEPTH = 3  # default length of a chain: one repeated module is seldom right further ahead


class MtpDrafter(FeatureDrafter):
    """Drafts with the target's own modules: chains, or with one module and `width` above 1 trees."""

    name: ClassVar[str] = "mtp"

    def __init__(self, head: MtpHead, *, depth: int | None = None, width: int = 1, nodes: int = 16) -> None:
        depth = max(_DEPTH, len(head.layers)) if depth is None else depth
        self.modules = min(len(head.layers), depth)
        if width > 1 and self.modules > 1:
            raise ConfigError(f"width={width}: {self.modules} modules guess chains; use width=1")
        super().__init__(head, depth=depth, width=width, nodes=nodes)
        self.rereads -= self.modules - 1  # a module's last positions were read with guessed tokens
        self.reads_ahead = self.modules  # the last one reads at position i the token at i + modules
        self._kept = (self.modules - 1) * head.hidden_size  # numbers kept of each position, for the next modules
        self._states: KVCache | None = None

    @classmethod
    def check(cls, opening: Opening) -> None:
        find_modules(opening.model_path, read_config(opening.model_path))

    @classmethod
    def open(cls, opening: Opening, target: Runner) -> MtpDrafter:
        return cls(MtpHead.open(opening.model_path, target))

    def page_bytes(self, page_size: int) -> int:
        return super().page_bytes(page_size) + KVCache.bytes_per_page((), page_size, self.head.dtype, self._kept)

    def attach(self, services: Services) -> None:
        super().attach(services)
        cache = self._cache
        assert cache is not None
        if self._kept:
            self._states = KVCache((), cache.num_pages, cache.page_size, cache.dtype, cache.device, self._kept)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        super().copy_pages(copies)
        if self._states is not None:
            self._states.copy_pages(copies)

    def clear_pages(self, pages: Sequence[int]) -> None:
        super().clear_pages(pages)
        if self._states is not None:
            self._states.clear([*pages, self._trash_page])

    def _read(self, batch: PassBatch) -> None:
        """Run all modules in turn; each begins one position further back, since it reads one token further on."""
        if self._states is None:
            super()._read(batch)
            return
        self._keep(0, batch.slots, self._run(batch, self._features(batch.slots), 0).features)
        for module in range(1, self.modules):
            rows = self._shifted(batch, module)
            if rows is None:
                return  # the text is too short for this and the following modules
            self._keep(module, rows.slots, self._run(rows, self._made(module - 1, rows.slots), module).features)

    def _shifted(self, batch: PassBatch, by: int) -> PassBatch | None:
        """The same tokens at positions `by` further back; those that fall before the text are dropped."""
        stretches: list[Stretch] = []
        kept: list[int] = []
        for i, prefix in enumerate(batch.prefix_lengths):
            start, end = batch.row_starts[i] + max(0, by - prefix), batch.row_starts[i + 1]
            if start < end:
                last = prefix + end - batch.row_starts[i] - by
                stretches.append(Stretch(batch.pages[i], last - (end - start) + 1, last + 1))
                kept += range(start, end)
        if not stretches:
            return None
        index = sent(np.array(kept, dtype=np.int64), batch.input_ids.device)
        return head_batch(stretches, batch.input_ids[index], self._cache.page_size)

    def _keep(self, module: int, slots: Tensor, hidden: Tensor) -> None:
        """Keep a module's outputs for the next one."""
        if module + 1 < self.modules:
            self._plane(module).index_copy_(0, slots, hidden.to(self.head.dtype))

    def _made(self, module: int, slots: Tensor) -> Tensor:  # [N, H]
        return self._plane(module).index_select(0, slots)

    def _plane(self, module: int) -> Tensor:  # [slots, H]
        assert self._states is not None
        assert self._states.features is not None
        return self._states.features.chunk(self.modules - 1, dim=1)[module]

    def draft(self, round: DraftRound) -> Tensor | DeviceTree:
        return super().draft(round) if self._states is None else self._by_modules(round)

    def _by_modules(self, round: DraftRound) -> Tensor:  # [B, depth]
        """Run each module over the last positions again, one token further on; the last module continues alone.

        All modules run, however few guesses are wanted: a module that skips a token would miss it later.
        """
        state, lanes = round.state, round.lanes
        most = max(round.depth, self.modules)
        rows = self._last_rows(round, self.depth + 1)
        chains = Chains.behind(rows, most)
        hidden = self._features(rows.seen)  # [B * rows, H]
        length = state.length[lanes, None]  # [B, 1]
        for step in range(self.modules):
            token = rows.tokens.view(lanes.shape[0], -1) + step  # [B, rows]
            guessed = chains.guesses.T.gather(1, (token - length - 1).clamp(0, most - 1))
            ids = torch.where(token <= length, state.recent[lanes[:, None], token % RECENT], guessed)
            context = self._context(round, rows.places, rows.slots, self._starts(lanes, token.shape[1]))
            states = self.head.run(ids.flatten(), hidden, context, rows.places, step)
            hidden = states.features
            self._keep(step, rows.slots, hidden)
            self._guess(round, chains, step, states.read[rows.last])
        self._go_on(round, chains, self.modules, hidden[rows.last])
        return chains.guesses[: round.depth].T
