"""A draft model with another tokenizer than the target's: it reads the request's text in its own tokens.

Two ways, chosen by what the vocabularies share. All but a few tokens: ids are mapped one by one, and the draft chooses
among the shared ones by the target's own rule. Otherwise through the text: what was said is tokenized again for the
draft, and its guess for the target. Its cache has pages of its own, since its tokens are not the target's. The host
takes part in every round, so nothing here is captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream.core.draft import Tree
from slipstream.drafters.base import DraftRequest, HostDrafter, Needs, Services
from slipstream.drafters.retokenize import GrowingText, Recut, decode, translate
from slipstream.drafters.vocabularies import Shared
from slipstream.kv.cache import KVCache
from slipstream.kv.pages import OutOfPages, PagePool, PageTable
from slipstream.models.batch import PassBatch
from slipstream.models.runner import Runner
from slipstream.sampling.choose import choose
from slipstream.sampling.rows import SampleRows

_EMPTY = Tree()


@dataclass(slots=True)
class _Reading:
    """One request as the draft reads it."""

    table: PageTable
    text: GrowingText
    recut: Recut
    ids: list[int] = field(default_factory=list)  # what was said, in the draft's tokens
    cached: list[int] = field(default_factory=list)  # tokens whose K and V are in the cache, guesses among them
    mapped: int = 0  # the target's tokens that are in `ids`, where ids are mapped


@dataclass(frozen=True, slots=True)
class _Read:
    """Of the requests that were asked for, those who are read to the end, and what the draft thinks comes next."""

    rows: list[int]
    logits: Tensor  # [B, V]


@dataclass(frozen=True, slots=True)
class _Guesses:
    """[K, B] int64 each: what the draft chose, in its own ids and in the target's, right where both have the token."""

    own: Tensor
    target: Tensor


class TranslatedDrafter(HostDrafter):
    """Drafts chains with a causal LM whose vocabulary is not the target's."""

    name: ClassVar[str] = "model"  # as which it is asked for: which of the two it is, the vocabularies decide
    needs: ClassVar[Needs] = Needs(own_cache=True)
    bounded: ClassVar[bool] = True  # it takes a few passes, and the planner is told how long they are
    costly: ClassVar[bool] = True
    default_draft_tokens: ClassVar[int] = 5

    def __init__(self, runner: Runner, own: Any, target: Any, target_size: int) -> None:
        self.runner = runner
        self.weights_bytes = runner.weights_bytes
        self._own, self._target = own, target
        shared = Shared.of(own, target, runner.vocab_size, target_size)
        self.alike = shared.alike
        self._own_of, self._target_of = shared.own_of.tolist(), shared.target_of.tolist()
        self._shared = shared.to(runner.device)
        pairs = (shared.own_of >= 0).nonzero()[:, 0]
        self._columns = pairs.to(runner.device)  # [S]: shared tokens in the target's ids
        self._own_columns = shared.own_of[pairs].to(runner.device)  # [S]: the same in the draft's
        self._special = frozenset(own.all_special_ids)
        self._services: Services | None = None
        self._pool: PagePool | None = None
        self._cache: KVCache | None = None
        self._readings: dict[str, _Reading] = {}

    def page_bytes(self, page_size: int) -> int:
        return KVCache.bytes_per_page(self.runner.layers, page_size, self.runner.dtype)

    def attach(self, services: Services) -> None:
        self._services = services
        self._pool = PagePool(services.cache_pages, services.pool.page_size)
        self._cache = self.runner.new_cache(services.cache_pages, services.pool.page_size)

    def start(self, request: DraftRequest) -> None:
        assert self._pool is not None
        recut = Recut(self._own)
        reading = _Reading(PageTable(self._pool), GrowingText(self._target), recut, list(recut.ids))
        self._readings[request.id] = reading

    def stop(self, request_id: str) -> None:
        if (reading := self._readings.pop(request_id, None)) is not None:
            reading.table.release()

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        depth = max(budget, default=0)
        asked = [i for i, nodes in enumerate(budget) if nodes and self._follow(requests[i], depth)]
        ready = self._read([requests[i] for i in asked])
        if not ready.rows:
            return [_EMPTY] * len(requests)
        drafted = [asked[row] for row in ready.rows]
        guesses = self._guess([requests[i] for i in drafted], depth, ready.logits)
        trees = [_EMPTY] * len(requests)
        lines = zip(drafted, guesses.own.T.tolist(), guesses.target.T.tolist(), strict=True)
        for i, own, target in lines:
            self._readings[requests[i].id].cached += own[:-1]  # the last guess is not read
            tokens = target if self.alike else self._said(requests[i], own)
            trees[i] = Tree.chain(tokens[: budget[i]])
        return trees

    def _follow(self, request: DraftRequest, nodes: int) -> bool:
        """Bring what was said since into the draft's tokens. False: there is nothing that it could go on from."""
        reading = self._readings[request.id]
        before = same = len(reading.ids)
        if self.alike:
            for token in request.tokens[reading.mapped :]:
                own = self._own_of[token]
                reading.ids += [own] if own >= 0 else self._recut_one(token)
            reading.mapped = len(request.tokens)
        else:
            reading.text.update(request.tokens)
            if not reading.text.whole:
                return False
            same = reading.recut.update(reading.text.text)
            reading.ids = reading.recut.ids
        known, most = min(same, before, len(reading.cached)), min(len(reading.cached), len(reading.ids))
        while known < most and reading.cached[known] == reading.ids[known]:  # guesses that were right
            known += 1
        del reading.cached[min(known, len(reading.ids) - 1) :]  # the last one is read always: it guesses
        end = len(reading.ids) + nodes
        if not reading.ids or end > self.runner.max_positions:
            return False
        try:
            reading.table.reserve(end)
        except OutOfPages:
            return False
        return True

    def _recut_one(self, token: int) -> list[int]:
        """A token that the draft does not have, by its text."""
        text = decode(self._target, [token])
        return list(self._own.encode(text, add_special_tokens=False))

    def _read(self, requests: Sequence[DraftRequest]) -> _Read:
        """One pass over what the draft has not read yet, the shortest first: long prompts take several rounds."""
        assert self._services is not None
        room = self._services.max_rows
        readings = [self._readings[request.id] for request in requests]
        missing = [len(reading.ids) - len(reading.cached) for reading in readings]
        taken: list[int] = []
        for i in sorted(range(len(readings)), key=missing.__getitem__):
            if room:
                taken.append(i)
                missing[i] = min(missing[i], room)
                room -= missing[i]
        if not taken:
            return _Read([], torch.empty(0))
        mine = [readings[i] for i in taken]
        ids = [reading.ids[len(reading.cached) :][: missing[i]] for i, reading in zip(taken, mine, strict=True)]
        logits = self._pass(mine, torch.tensor([token for part in ids for token in part]), [len(part) for part in ids])
        for reading, part in zip(mine, ids, strict=True):
            reading.cached += part
        done = [row for row, reading in enumerate(mine) if len(reading.cached) == len(reading.ids)]
        return _Read([taken[row] for row in done], logits[torch.tensor(done, device=logits.device, dtype=torch.int64)])

    def _guess(self, requests: Sequence[DraftRequest], depth: int, logits: Tensor) -> _Guesses:
        """Token by token, all requests together, without looking at what is guessed."""
        assert self._services is not None
        readings = [self._readings[request.id] for request in requests]
        slots = self._tensor([request.slot for request in requests])
        features = self._services.sampling.features([request.slot for request in requests])
        sampling = self._services.sampling.apart(self.name, features)
        lengths = self._tensor([len(request.tokens) for request in requests])
        generated = lengths - self._tensor([request.prompt_length for request in requests])
        own = torch.zeros((depth, len(requests)), dtype=torch.int64, device=self.runner.device)
        target = torch.zeros_like(own)
        for step in range(depth):
            if step:
                logits = self._pass(readings, own[step - 1], [1] * len(requests), ahead=step - 1)
            scores = logits.new_full((len(requests), sampling.vocab_size), float("-inf"))
            scores[:, self._columns] = logits[:, self._own_columns]
            path = target[:step].T if step and (features.penalties or features.bad_words) else None
            rows = SampleRows(slots, lengths + step, generated + step, path)
            target[step] = choose(scores, rows, sampling, features).clamp_min(0)
            own[step] = self._shared.own_of[target[step]].clamp_min(0)
            if not self.alike:  # what it would rather say may be none of the target's tokens: the text tells
                best = logits.argmax(1)
                own[step] = torch.where(self._shared.target_of[best] < 0, best, own[step])
        return _Guesses(own, target)

    def _said(self, request: DraftRequest, guess: list[int]) -> list[int]:
        """A guess in the target's tokens, by its text; what is special ends it."""
        end = next((i for i, token in enumerate(guess) if token in self._special), len(guess))
        reading = self._readings[request.id]
        tokens = translate(guess[:end], reading.ids, self._own, self._target, request.tokens)
        if tokens is None:  # in the middle of a word: token by token, as far as they are shared
            tokens = [self._target_of[token] for token in guess[:end]]
            if -1 in tokens:
                return tokens[: tokens.index(-1)]
        if end < len(guess) and (last := self._target_of[guess[end]]) >= 0:
            tokens.append(last)
        return tokens

    def _pass(self, readings: Sequence[_Reading], ids: Tensor, rows: Sequence[int], ahead: int = 0) -> Tensor:
        """Read `rows` tokens of each request behind those in the cache and `ahead` guesses: logits of the last ones."""
        assert self._cache is not None
        at = [len(reading.cached) + ahead for reading in readings]
        tables, device = [reading.table for reading in readings], self.runner.device
        batch = PassBatch.behind(tables, at, rows, ids.to(device), device)
        return self.runner.forward(batch, self._cache)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.runner.device)
