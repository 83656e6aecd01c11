"""A small model as drafter: it runs ahead token by token, and the target checks the whole run in one pass.

It samples by the target's rule with the same noise, temperature, penalties and masks: where the two models agree in
distribution, they mostly pick the same token. For requests with rejection sampling, which has noise of its own, it
reports the distribution of each guess. Its cache uses the target's page table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DeviceDrafter, DraftRequest, DraftRound, Needs, Opening, Services
from slipstream.drafters.translated import TranslatedDrafter
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kernels.gpu.rows import last_rows
from slipstream.kv.cache import KVCache
from slipstream.kv.pages import PageCopy
from slipstream.models.batch import PassBatch, sent
from slipstream.models.graphs import PROMPT_ROWS
from slipstream.models.headers import stored_names
from slipstream.models.heads.checkpoint import check_kind
from slipstream.models.load import shares_embeddings
from slipstream.models.resolve import shown_name
from slipstream.models.runner import Runner
from slipstream.sampling.choose import choose, processed
from slipstream.sampling.rows import SampleRows

_FEW, _FAR = 8, 32
"""Up to 8 requests: a draft can reread up to 32 of their last tokens."""


@dataclass(slots=True)
class _Progress:
    """The draft model's progress in a request."""

    length: int = 0  # tokens whose K and V are in the draft's cache
    base: int = 0  # the request's tokens when the last draft began
    depth: int = 0  # length of that draft


class ModelDrafter(DeviceDrafter):
    """Drafts chains with a causal LM that shares the target's vocabulary."""

    name: ClassVar[str] = "model"
    needs: ClassVar[Needs] = Needs(device=True, own_cache=True, probabilities=True)
    default_draft_tokens: ClassVar[int] = 5
    planned_draft_tokens: ClassVar[int] = 11  # for predictable text; fills the rows of a captured pass
    rereads = 8
    fewer_rereads = (2, 8)
    _services: Services  # set by `attach`, as the next one
    _cache: KVCache

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.weights_bytes = runner.weights_bytes
        self.max_positions = runner.max_positions
        # larger ids are a wider target's padding; the draft reads another token instead, and guesses badly
        self._known_ids = cast(Tensor, runner.model.get_input_embeddings().weight).shape[0]
        self._progress: dict[str, _Progress] = {}

    @classmethod
    def reaches(cls, requests: int) -> int:
        return _FAR if requests <= _FEW else cls.rereads

    @classmethod
    def check(cls, opening: Opening) -> None:
        folder = cls._folder(opening)
        check_kind(folder, stored_names(folder), cls.name)
        if not shares_embeddings(folder):
            opening.load_tokenizer(folder)

    @classmethod
    def open(cls, opening: Opening, target: Runner) -> ModelDrafter | TranslatedDrafter:
        """A `ModelDrafter` if the draft has the target's vocabulary, else a `TranslatedDrafter`."""
        folder = cls._folder(opening)
        if shares_embeddings(folder):  # and so the vocabulary
            return cls(opening.open_runner(folder, target))
        own: Any = opening.load_tokenizer(folder)
        runner = opening.open_runner(folder, None)
        if own.get_vocab() == opening.tokenizer.get_vocab():
            return cls(runner)
        drafter = TranslatedDrafter(runner, own, opening.tokenizer, target.vocab_size)
        how = "ids are mapped" if drafter.alike else "it drafts through the text"
        drafter.remark = f"{shown_name(folder)} has another vocabulary than the target: {how}"
        opening.say(drafter.remark)
        return drafter

    @staticmethod
    def _folder(opening: Opening) -> Path:
        assert opening.path is not None  # its registration requires a path
        return opening.resolve(opening.path)

    def page_bytes(self, page_size: int) -> int:
        return KVCache.bytes_per_page(self.runner.layers, page_size, self.runner.dtype)

    def attach(self, services: Services) -> None:
        self._services = services
        self._cache = self.runner.new_cache(services.cache_pages, services.pool.page_size)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        self._cache.copy_pages(copies)

    def clear_pages(self, pages: Sequence[int]) -> None:
        self._cache.clear(pages)

    def start(self, request: DraftRequest) -> None:
        self._progress[request.id] = _Progress()

    def resume(self, request_id: str, known: int) -> None:
        self._progress[request_id].length = known

    def has_read(self, request_id: str) -> int:
        return self._progress[request_id].length

    def stop(self, request_id: str) -> None:
        self._progress.pop(request_id, None)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            progress = self._progress.get(verdict.request_id)
            if progress is not None and progress.depth:
                # the last guess was never read, and what follows the first wrong one is useless
                progress.length = progress.base + min(verdict.accepted, progress.depth - 1)
                progress.depth = 0

    def read(self, batch: PassBatch) -> None:
        """Run beside the target. A request beyond the draft's context is not drafted for: its rows may be wrong."""
        parts = zip(batch.prefix_lengths, batch.row_starts, batch.row_starts[1:], strict=False)
        ends = [prefix + end - start for prefix, start, end in parts]
        if min(ends) <= self.runner.max_positions:
            self.runner.forward(self._own(batch), self._cache)

    def capture_prompts(self, trash_slot: int, pool: Any) -> None:
        self.runner.capture_prompts(self._cache, trash_slot, pool)

    def catch_up(self, requests: Sequence[DraftRequest], known: Sequence[int]) -> None:
        """Read all of them together, in passes of up to `max_rows` rows; mostly a few tokens each."""
        room = most = self._services.max_rows
        missed: list[tuple[DraftRequest, int, int]] = []  # request, first and end of the tokens to read
        for request, start in zip(requests, known, strict=True):
            at, end = start, len(request.tokens) - 2
            while at < end:
                rows = min(end - at, room)
                missed.append((request, at, at + rows))
                at, room = at + rows, room - rows
                if not room:
                    self._read_missed(missed)
                    missed, room = [], most
        if missed:
            self._read_missed(missed)

    def _read_missed(self, missed: Sequence[tuple[DraftRequest, int, int]]) -> None:
        ids = [token for request, at, end in missed for token in request.tokens[at:end]]
        given = sent(np.array(ids, dtype=np.int64), self.runner.device)
        whose, starts, ends = zip(*missed, strict=True)
        rows = [end - at for at, end in zip(starts, ends, strict=True)]
        self.runner.forward(self._own(self._batch(whose, starts, rows, given)), self._cache)

    def draft(self, round: DraftRound) -> Tensor:
        """Guess step by step, each a pass of one row a request; the first pass rereads the last tokens.

        If every guess of the step before was right, the last one has not been read yet; others may have guessed
        further, or alone for a step or two. Rereading writes the same entries again: the device need not know how far
        behind a request is, nor wait until it has caught up.
        """
        state, lanes, size = round.state, round.lanes, self._services.pool.page_size
        sampling = self._services.sampling.apart(self.name, round.features)
        requests, device = lanes.shape[0], lanes.device
        ahead = torch.arange(round.depth, device=device)[:, None]  # [depth, 1]
        # requests at the last position are not drafted for
        last = min(self.runner.max_positions, state.pages.shape[1] * size) - 1
        at = (state.length[lanes] + ahead).clamp_(0, last)  # [depth, B]
        slots = state.pages[lanes, at // size].long() * size + at % size  # [depth, B]
        generated = state.generated[lanes] + ahead  # [depth, B]
        next_at = at + 1  # [depth, B]
        guesses = torch.zeros((round.depth, requests), dtype=torch.int64, device=device)
        one = torch.arange(requests + 1, dtype=torch.int32, device=device)
        count = next((few for few in self.fewer_rereads if few >= round.recent), self.reaches(requests))
        trash_slot = (self._services.cache_pages - 1) * size  # if steps are queued, the last page is for padding
        rows = last_rows(state, lanes, count, page_size=size, trash_slot=trash_slot, last_place=last, shift=0)
        begin = self._layout(round, rows.places, rows.slots, count * one)
        logits = self.runner.run(self._known(rows.ids), begin, self._cache, rows.last)
        for depth in range(round.depth):
            if depth:
                row = self._layout(round, at[depth], slots[depth], one)
                logits = self.runner.run(self._known(guesses[depth - 1]), row, self._cache)
            wants_path = depth and (round.features.penalties or round.features.bad_words)
            guessed = SampleRows(
                slots=lanes,
                positions=next_at[depth],
                generated=generated[depth],
                path=guesses[:depth].T if wants_path else None,
            )
            logits = self._fit(logits)
            chosen = choose(logits, guessed, sampling, round.features)
            torch.clamp_min(chosen, 0, out=guesses[depth])  # the target rejects nonsense
            if round.q is not None:
                round.q[:, depth] = processed(logits, guessed, sampling, round.features).softmax(1)
        return guesses.T

    def _layout(self, round: DraftRound, positions: Tensor, slots: Tensor, starts: Tensor) -> RowLayout:
        state, size = round.state, self._services.pool.page_size
        return RowLayout(positions, slots, starts, round.lanes, state.length, state.pages, None, size, round.keys)

    def _known(self, ids: Tensor) -> Tensor:
        """Clamp ids to the draft's vocabulary; padding rows may hold anything."""
        return ids.clamp(0, self._known_ids - 1)

    def _own(self, batch: PassBatch) -> PassBatch:
        """The target's rows for this model, with one unused row of logits."""
        return replace(
            batch,
            input_ids=self._known(batch.input_ids),
            positions=batch.positions.clamp_max(self.runner.max_positions - 1),
            logit_rows=batch.slots.new_zeros(1),
            # its states decide no token, and a small model is faster in a captured pass
            wide=batch.size > PROMPT_ROWS[-1],
        )

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        device = self.runner.device
        tokens = torch.zeros((len(requests), max(budget, default=0)), dtype=torch.int64, device=device)
        q = self._distributions_for(requests, tokens.shape[1])
        ready = self._catch_up(requests, budget, tokens, q)
        for depth in range(1, tokens.shape[1]):
            active = [i for i in ready if budget[i] > depth]
            if not active:
                break
            rows = [1] * len(active)
            ids = tokens[active, depth - 1]
            at = [len(requests[i].tokens) + depth - 1 for i in active]
            self._pass([requests[i] for i in active], active, at, rows, ids, depth, tokens, q)
        counts = [budget[i] if i in ready else 0 for i in range(len(requests))]
        for request, count in zip(requests, counts, strict=True):
            progress = self._progress[request.id]
            progress.base, progress.depth = len(request.tokens), count
            if count:
                progress.length = len(request.tokens) + count - 1
        parents = torch.arange(-1, tokens.shape[1] - 1, device=device).expand(len(requests), -1)
        return Draft(tokens, parents, torch.tensor(counts, dtype=torch.int64, device=device), True, q)

    def _distributions_for(self, requests: Sequence[DraftRequest], width: int) -> Tensor | None:  # [B, K, V]
        """Room for the distributions of the guesses, if a request needs them."""
        if not any(request.params.rejects for request in requests):
            return None
        shape = (len(requests), width, self._services.sampling.vocab_size)
        return torch.zeros(shape, dtype=torch.float32, device=self.runner.device)

    def _catch_up(
        self, requests: Sequence[DraftRequest], budgets: Sequence[int], tokens: Tensor, q: Tensor | None
    ) -> list[int]:
        """Read new tokens, one pass at most. Returns the requests read to their end: `tokens` has their first guess."""
        room = self._services.max_rows
        active: list[int] = []
        at: list[int] = []
        rows: list[int] = []
        ids: list[int] = []
        ready: list[int] = []
        unread = [len(request.tokens) - self._progress[request.id].length for request in requests]
        for i in sorted(range(len(requests)), key=unread.__getitem__):  # short ones first: a long prompt can wait
            request = requests[i]
            known = self._progress[request.id].length
            count = min(unread[i], room)
            if not budgets[i] or not count:
                continue
            room -= count
            active.append(i)
            at.append(known)
            rows.append(count)
            ids.extend(request.tokens[known : known + count])
            self._progress[request.id].length = known + count
            if known + count == len(request.tokens):
                ready.append(i)
        if active:
            given = sent(np.array(ids, dtype=np.int64), self.runner.device)
            self._pass([requests[i] for i in active], active, at, rows, given, 0, tokens, q)
        return ready

    def _pass(
        self,
        requests: Sequence[DraftRequest],
        columns: Sequence[int],  # each request's row in `tokens`
        at: Sequence[int],  # position of each request's first row
        rows: Sequence[int],
        ids: Tensor,  # [N]
        depth: int,
        tokens: Tensor,  # [B, K]: column `depth` gets the guesses
        q: Tensor | None,  # [B, K, V]: column `depth` gets their distributions
    ) -> None:
        """Read the rows of each request and guess the next token."""
        batch = self._batch(requests, at, rows, ids)
        logits = self._fit(self.runner.forward(batch, self._cache))
        features = self._services.sampling.features([request.slot for request in requests])
        sampling = self._services.sampling.apart(self.name, features)
        index = self._tensor(columns)
        guessed = SampleRows(
            slots=self._tensor([request.slot for request in requests]),
            positions=batch.positions[batch.logit_rows] + 1,
            generated=self._tensor([len(r.tokens) - r.prompt_length + depth for r in requests]),
            path=tokens[index, :depth] if depth and (features.penalties or features.bad_words) else None,
        )
        # nonsense becomes token 0, which the target rejects
        tokens[index, depth] = choose(logits, guessed, sampling, features).clamp_min(0)
        if q is not None:
            q[index, depth] = processed(logits, guessed, sampling, features).softmax(1)

    def _batch(
        self, requests: Sequence[DraftRequest], at: Sequence[int], rows: Sequence[int], ids: Tensor
    ) -> PassBatch:
        """A pass over `rows` tokens of each request from position `at`, with logits of the last rows."""
        tables = [self._services.page_table(request.id) for request in requests]
        return PassBatch.behind(tables, at, rows, self._known(ids), self.runner.device)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.runner.device)

    def _fit(self, logits: Tensor) -> Tensor:
        """Cut or pad the logits to the target's vocabulary, since models pad theirs differently."""
        width = self._services.sampling.vocab_size
        if logits.shape[1] >= width:
            return logits[:, :width]
        return torch.nn.functional.pad(logits, (0, width - logits.shape[1]), value=float("-inf"))
