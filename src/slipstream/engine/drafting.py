"""The drafters of an engine: who drafts for whom, how much, and what becomes of drafters that fail."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from slipstream.core.draft import MAX_NODES, Draft, Tree
from slipstream.core.outputs import DrafterStats
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DeviceDrafter, Drafter, DraftRequest, HostDrafter
from slipstream.drafters.guard import DrafterGuard
from slipstream.engine.scheduler import Chunk
from slipstream.engine.state import Answer
from slipstream.kv.pages import PageCopy
from slipstream.models.batch import PassBatch
from slipstream.plan.planner import Planner

T = TypeVar("T")

_EMPTY = Tree()


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of a round, one row a decoding request, and whose they are."""

    draft: Draft
    drafters: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The drafts of a round whose device drafters run inside it: the host's trees, and how far the others go."""

    trees: tuple[Tree, ...]  # of the host drafters; empty for the others
    depths: tuple[int, ...]  # nodes that a device drafter is to guess for each request; 0 for the others
    drafters: tuple[str | None, ...]  # whose drafts they are

    @property
    def counts(self) -> list[int]:
        return [len(tree.tokens) or depth for tree, depth in zip(self.trees, self.depths, strict=True)]

    def only(self, kept: Sequence[int]) -> Plan:
        """For some of the requests."""
        return Plan(
            tuple(self.trees[i] for i in kept),
            tuple(self.depths[i] for i in kept),
            tuple(self.drafters[i] for i in kept),
        )

    def without(self, failed: str) -> Plan:
        """The same, but for what a device drafter was to guess that has failed."""
        return Plan(
            self.trees,
            tuple(0 if name == failed else depth for name, depth in zip(self.drafters, self.depths, strict=True)),
            tuple(None if name == failed else name for name in self.drafters),
        )

    def most(self, name: str) -> int:
        """Nodes that a device drafter is to guess for one of them at most."""
        return max([depth for drafter, depth in zip(self.drafters, self.depths, strict=True) if drafter == name])

    @property
    def devices(self) -> list[str]:
        """The device drafters that have something to do."""
        if not any(self.depths):
            return []
        return sorted({name for name, depth in zip(self.drafters, self.depths, strict=True) if name and depth})


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
        self._on_device = frozenset(n for n, d in drafters.items() if isinstance(d, DeviceDrafter))
        self._reading = frozenset(n for n, d in drafters.items() if d.needs.choices)
        self.round_s = 0.0  # how long a round took lately: what a late drafter is measured by
        self._resting: set[str] = set()  # host drafters that nobody waits for in this round
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
        self.planner.next_round()
        parts: list[tuple[Sequence[int], Draft]] = []
        drafters: list[str | None] = [None] * len(decodes)
        for name, mine, caps in self._groups(decodes):
            draft = self._ask(name, [decodes[i] for i in mine], caps, len(decodes))
            if draft is not None and draft.width:
                parts.append((mine, draft))
                for i in mine:
                    drafters[i] = name
        return Drafted(Draft.merge(parts, len(decodes), self._device), tuple(drafters))

    def plan(self, decodes: Sequence[Answer]) -> Plan:
        """As `propose`, but what device drafters guess stays on the device: they are told how far to go."""
        self.planner.next_round()
        trees = [_EMPTY] * len(decodes)
        depths = [0] * len(decodes)
        drafters: list[str | None] = [None] * len(decodes)
        for name, mine, caps in self._groups(decodes):
            answers = [decodes[i] for i in mine]
            if name in self._on_device:
                budgets = self._budgets(name, answers, caps, len(decodes))
                for i, depth in zip(mine, budgets, strict=True):
                    depths[i] = depth
            else:
                for i, tree in zip(mine, self._trees(name, answers, caps, len(decodes)), strict=True):
                    trees[i] = tree
            for i in mine:
                drafters[i] = name
        return Plan(tuple(trees), tuple(depths), tuple(drafters))

    def drop(self, answers: Sequence[Answer], name: str, error: BaseException | None) -> None:
        """A device drafter failed inside a round: it drafts for none of these any more."""
        for answer in answers:
            if answer.drafter == name:
                self._drop(answer, name, error)

    def read(self, chunks: Sequence[Chunk], batch: PassBatch) -> None:
        """The target computes these prompts: device drafters that will draft for one of them read along."""
        for name, drafter in self.drafters.items():
            mine = [chunk.answer for chunk in chunks if chunk.answer.drafter == name]
            if mine and isinstance(drafter, DeviceDrafter):
                self._guarded(name, mine, functools.partial(drafter.read, batch))

    def catch_up(self, answers: Sequence[Answer]) -> None:
        """These were decoded without drafts for a while: let their device drafters read what they missed."""
        for name in dict.fromkeys(answer.drafter for answer in answers):
            drafter = self.drafters[cast(str, name)]
            assert isinstance(drafter, DeviceDrafter)
            mine = [answer for answer in answers if answer.drafter == name]
            views = [cast(DraftRequest, answer.view) for answer in mine]
            known = [answer.behind or 0 for answer in mine]
            self._guarded(cast(str, name), mine, functools.partial(drafter.catch_up, views, known))
            for answer in mine:
                answer.behind = None

    def follows(self, answers: Sequence[Answer], plan: Plan) -> None:
        """Note whose device drafter stops following, because it guesses for nobody in this round.

        Where it guesses for one, it reads the last tokens of all.
        """
        idle = self._on_device - set(plan.devices)
        if not idle:
            return
        for answer in answers:
            if answer.behind is None and answer.drafter in idle:
                answer.behind = max(0, answer.cached - 1)

    def waits(self, answers: Sequence[Answer]) -> bool:
        """Does somebody draft on the host for one of these, and so need to know its tokens first?"""
        self._resting = {name for name in self.guards if self.planner.rests(name, len(answers))}
        awake = {n for n, guard in self.guards.items() if guard.dropped is None and n not in self._resting}
        return any(a.drafter in awake and a.drafter not in a.refused for a in answers)

    def read_choices(self, answers: Sequence[Answer]) -> bool:
        """Does somebody who drafts for one of these want to know what the target chose at every node?"""
        return bool(self._reading) and any(answer.drafter in self._reading for answer in answers)

    def _groups(self, decodes: Sequence[Answer]) -> Iterator[tuple[str, list[int], list[int]]]:
        """For each drafter with something to do: which requests are its, and how much is of any use to them."""
        groups: dict[str, list[int]] = {}
        for i, answer in enumerate(decodes):
            name = answer.drafter
            if name is not None and name not in self._resting and name not in answer.refused:
                groups.setdefault(name, []).append(i)
        for name, mine in groups.items():
            caps = self._caps(name, [decodes[i] for i in mine], len(decodes))
            if any(caps):
                yield name, mine, caps

    def observe(self, answers: Sequence[Answer], drafters: Sequence[str | None], verdicts: Sequence[Verdict]) -> None:
        """Tell drafters and planner how the round ended."""
        told: dict[str, tuple[list[Answer], list[Verdict]]] = {}
        for answer, drafter, verdict in zip(answers, drafters, verdicts, strict=True):
            if drafter is not None and verdict.drafted:
                # of a tree no more can be accepted than it has levels
                reached = min(verdict.drafted, self._levels(drafter) or verdict.drafted)
                self.planner.observe(drafter, answer.id, reached, verdict.accepted)
            if answer.drafter is not None:
                if answer.drafter not in told:
                    told[answer.drafter] = ([], [])
                theirs, parts = told[answer.drafter]
                theirs.append(answer)
                parts.append(verdict)
        for name, (theirs, parts) in told.items():
            self._guarded(name, theirs, functools.partial(self._voice(name).observe, parts))

    def _caps(self, name: str, answers: Sequence[Answer], requests: int) -> list[int]:
        """Most nodes that are of any use: limits of the requests, of the context and of the pass."""
        drafter = self.drafters[name]
        usual = drafter.default_draft_tokens if self._draft_tokens is None else self._draft_tokens
        ends = drafter.max_positions  # a draft with a shorter context than the target stops where it ends
        most = drafter.most_nodes if isinstance(drafter, DeviceDrafter) else MAX_NODES
        share = min(self._max_rows // requests - 1, most)
        context = self._max_len - 1 if ends is None else min(self._max_len - 1, ends)
        caps: list[int] = []
        for answer in answers:
            params, length = answer.params, len(answer.tokens)
            wanted = params.speculation.draft_tokens
            useful = min(
                usual if wanted is None else wanted,
                share,
                params.max_tokens - (length - answer.prompt_length) - answer.queued - 1,
                context - length - answer.coming,
            )
            caps.append(0 if useful < 0 or answer.doubted else useful)
        return caps

    def _ask(self, name: str, answers: Sequence[Answer], caps: Sequence[int], rows: int) -> Draft | None:
        drafter = self.drafters[name]
        if not isinstance(drafter, DeviceDrafter):
            trees = self._trees(name, answers, caps, rows)
            return Draft.pack(trees, self._device) if any(trees) else None
        budget = self._budgets(name, answers, caps, rows)
        if not any(budget):
            return None
        views = [cast(DraftRequest, answer.view) for answer in answers]
        started = time.perf_counter()
        draft = self._guarded(name, answers, lambda: drafter.propose(views, budget))
        self.observe_draft(name, max(budget), time.perf_counter() - started)
        return draft

    def observe_draft(self, name: str, nodes: int, seconds: float) -> None:
        """A device drafter took this long for so many nodes. Of a tree all levels are computed, whatever is kept."""
        self.planner.observe_draft(name, 1 if self._levels(name) else nodes, seconds)

    def makes_trees(self, names: Sequence[str]) -> bool:
        """Does one of these device drafters guess trees?"""
        return any(self._levels(name) for name in names)

    def _levels(self, name: str) -> int:
        """Of the trees that a device drafter makes; 0 for all others."""
        drafter = self.drafters[name]
        return drafter.depth if isinstance(drafter, DeviceDrafter) and drafter.makes_trees else 0

    def _budgets(self, name: str, answers: Sequence[Answer], caps: Sequence[int], rows: int) -> list[int]:
        """How far a device drafter is to go for each request: as far as pays, and as far as there are pages."""
        ids = [answer.id for answer in answers]
        levels = self._levels(name)
        plan = functools.partial(self.planner.budget_trees, levels=levels) if levels else self.planner.budget
        budget = plan(name, ids, caps, rows)
        return [self._reserve(answer, nodes) for answer, nodes in zip(answers, budget, strict=True)]

    def _trees(self, name: str, answers: Sequence[Answer], caps: Sequence[int], rows: int) -> list[Tree]:
        """What a host drafter guesses, cut to what pays and to what there are pages for."""
        views = [cast(DraftRequest, answer.view) for answer in answers]
        proposals = self.guards[name].propose(views, caps, self.round_s)
        failures = self._failures.setdefault(name, {})
        failures.update(proposals.failures)  # also of requests whose prompt is still being computed
        if failures:
            for answer in answers:
                if answer.id in failures:
                    answer.refused[name] = failures.pop(answer.id)
                    answer.output.speculation.by_drafter.setdefault(name, DrafterStats()).failures += 1
        ids = [answer.id for answer in answers]
        trees = self.planner.trim(name, ids, proposals.trees, proposals.promises, rows)
        return [
            self._fitting(answer, tree) if tree.tokens else tree for answer, tree in zip(answers, trees, strict=True)
        ]

    def _fitting(self, answer: Answer, tree: Tree) -> Tree:
        """As much of the tree as there are pages for: the first nodes of a tree are a tree too."""
        fits = self._reserve(answer, len(tree))
        return tree if fits == len(tree) else Tree(tree.tokens[:fits], tree.parents[:fits])

    def _voice(self, name: str) -> DrafterGuard | Drafter:
        """Whom to call: a host drafter's guard, which takes care of its failures, or the device drafter itself."""
        return self.guards.get(name) or self.drafters[name]

    def _guarded(self, name: str, answers: Sequence[Answer], action: Callable[[], T]) -> T | None:
        """Call a drafter. One that raises is dropped for these requests, which go on undrafted."""
        try:
            return action()
        except Exception as error:
            for answer in answers:
                self._drop(answer, name, error)
            return None

    @staticmethod
    def _drop(answer: Answer, name: str, error: BaseException | None) -> None:
        answer.refused[name] = f"{type(error).__name__}: {error}"
        answer.output.speculation.by_drafter.setdefault(name, DrafterStats()).failures += 1
