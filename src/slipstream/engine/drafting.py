"""The drafters of an engine: who drafts for whom, how much, and what becomes of drafters that fail."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from slipstream.core.draft import MAX_NODES, Draft, Tree
from slipstream.core.outputs import DrafterStats
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DeviceDrafter, Drafter, DraftRequest, HostDrafter
from slipstream.drafters.guard import DrafterGuard
from slipstream.engine.state import Answer
from slipstream.kv.pages import PageCopy
from slipstream.plan.planner import Planner

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of a round, one row a decoding request, and whose they are."""

    draft: Draft
    drafters: tuple[str | None, ...]


class Drafting:
    """Calls the drafters. Whatever they do, every decoding request gets a draft, if only an empty one."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        default: str | None,
        planner: Planner,
        *,
        vocab_size: int,
        device: torch.device,
        draft_tokens: int | None,
        max_rows: int,
        max_len: int,
        reserve: Callable[[Answer, int], int],
    ) -> None:
        self.drafters = dict(drafters)
        self.default = default
        self.planner = planner
        self.guards = {n: DrafterGuard(d, vocab_size) for n, d in drafters.items() if isinstance(d, HostDrafter)}
        self.round_s = 0.0  # how long a round took lately: what a late drafter is measured by
        self._device = device
        self._draft_tokens = draft_tokens
        self._max_rows = max_rows
        self._max_len = max_len
        self._reserve = reserve
        self._failures: dict[str, dict[str, str]] = {}  # by drafter and request: what its next draft will hear of

    def start(self, answer: Answer) -> None:
        """The answer is admitted: choose its drafter and tell it."""
        wanted = answer.params.speculation
        name = wanted.drafter or ("prediction" if answer.prediction else self.default)
        if not wanted.enabled or name not in self.drafters:
            answer.drafter = None
            return
        answer.drafter = name
        answer.view = DraftRequest(
            answer.id, answer.tokens, answer.prompt_length, answer.params, answer.slot, answer.prediction
        )
        view = answer.view
        self._guarded(name, [answer], lambda: self._voice(name).start(view))

    def stop(self, answer: Answer) -> None:
        """The answer ended or was preempted."""
        self.planner.forget(answer.id)
        if answer.drafter is not None:
            voice = self._voice(answer.drafter)
            self._guarded(answer.drafter, [answer], lambda: voice.stop(answer.id))
            self._failures.get(answer.drafter, {}).pop(answer.id, None)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for drafter in self.drafters.values():
            if isinstance(drafter, DeviceDrafter):
                drafter.copy_pages(copies)

    def propose(self, decodes: Sequence[Answer]) -> Drafted:
        """Drafts for the decoding requests. Reserves the pages that they need."""
        parts: list[tuple[Sequence[int], Draft]] = []
        drafters: list[str | None] = [None] * len(decodes)
        for name in dict.fromkeys(a.drafter for a in decodes):
            if name is None:
                continue
            mine = [i for i, a in enumerate(decodes) if a.drafter == name and name not in a.refused]
            answers = [decodes[i] for i in mine]
            caps = [self._cap(answer, name, len(decodes)) for answer in answers]
            if not any(caps):
                continue
            draft = self._ask(name, answers, caps, len(decodes))
            if draft is not None and draft.width:
                parts.append((mine, draft))
                for i in mine:
                    drafters[i] = name
        return Drafted(Draft.merge(parts, len(decodes), self._device), tuple(drafters))

    def observe(self, answers: Sequence[Answer], drafters: Sequence[str | None], verdicts: Sequence[Verdict]) -> None:
        """Tell drafters and planner how the round ended."""
        for answer, drafter, verdict in zip(answers, drafters, verdicts, strict=True):
            if drafter is not None:
                self.planner.observe(drafter, answer.id, verdict.drafted, verdict.accepted)
        for name in dict.fromkeys(a.drafter for a in answers if a.drafter is not None):
            told = [v for a, v in zip(answers, verdicts, strict=True) if a.drafter == name]
            theirs = [a for a in answers if a.drafter == name]
            self._guarded(name, theirs, functools.partial(self._voice(name).observe, told))

    def _cap(self, answer: Answer, name: str, requests: int) -> int:
        """Most nodes that are of any use: limits of the request, of the context and of the pass."""
        if answer.doubted:
            return 0
        wanted = answer.params.speculation.draft_tokens
        if wanted is None:
            wanted = self._draft_tokens
        if wanted is None:
            wanted = self.drafters[name].default_draft_tokens
        left = min(answer.params.max_tokens - answer.generated, self._max_len - len(answer.tokens)) - 1
        share = self._max_rows // requests - 1
        return max(0, min(wanted, MAX_NODES, left, share))

    def _ask(self, name: str, answers: Sequence[Answer], caps: Sequence[int], rows: int) -> Draft | None:
        drafter, ids = self.drafters[name], [answer.id for answer in answers]
        views = [cast(DraftRequest, answer.view) for answer in answers]
        if isinstance(drafter, DeviceDrafter):
            budget = self.planner.budget(name, ids, caps, rows)
            budget = [self._reserve(a, b) for a, b in zip(answers, budget, strict=True)]
            if not any(budget):
                return None
            started = time.perf_counter()
            draft = self._guarded(name, answers, lambda: drafter.propose(views, budget))
            self.planner.observe_draft(name, max(budget), time.perf_counter() - started)
            return draft
        guard = self.guards[name]
        proposals = guard.propose(views, caps, self.round_s)
        failures = self._failures.setdefault(name, {})
        failures.update(proposals.failures)  # also of requests whose prompt is still being computed
        for answer in answers:
            if answer.id in failures:
                answer.refused[name] = failures.pop(answer.id)
                answer.output.speculation.by_drafter.setdefault(name, DrafterStats()).failures += 1
        trees = self.planner.trim(name, ids, proposals.trees, proposals.promises, rows)
        # where the pages do not do, the first nodes of a tree are a tree too
        fits = [self._reserve(answer, len(tree)) for answer, tree in zip(answers, trees, strict=True)]
        return Draft.pack([Tree(t.tokens[:n], t.parents[:n]) for t, n in zip(trees, fits, strict=True)], self._device)

    def _voice(self, name: str) -> DrafterGuard | Drafter:
        """Whom to call: a host drafter's guard, which takes care of its failures, or the device drafter itself."""
        return self.guards.get(name) or self.drafters[name]

    def _guarded(self, name: str, answers: Sequence[Answer], action: Callable[[], T]) -> T | None:
        """Call a drafter. One that raises is dropped for these requests, which go on undrafted."""
        try:
            return action()
        except Exception as error:
            for answer in answers:
                answer.refused[name] = f"{type(error).__name__}: {error}"
                answer.output.speculation.by_drafter.setdefault(name, DrafterStats()).failures += 1
            return None
