"""The backend of a CPU: prompts and drafts share one pass, and the host waits for its result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.verdict import NOBODY, Verdict
from slipstream.engine.backend import Backend, Parts
from slipstream.engine.chunks import ChunkRule
from slipstream.engine.config import EngineConfig
from slipstream.engine.drafts import Guesses, Plan
from slipstream.engine.flight import Flight, Member, StepTimes
from slipstream.engine.packing import PackedPass, pack
from slipstream.engine.prefix_readers import PrefixReaders
from slipstream.engine.schedule import Schedule
from slipstream.engine.state import Answer
from slipstream.kv.cache import compaction
from slipstream.models.runner import Runner
from slipstream.sampling.choose import choose
from slipstream.sampling.table import Features
from slipstream.verify.exact import verify_exact
from slipstream.verify.rejection import mixed_choices


@dataclass(slots=True, kw_only=True)
class EagerFlight(Flight):
    """A step that is over."""

    told: list[Verdict]
    packed: PackedPass
    all_logits: Tensor  # [R, V]
    draft_s: float
    verify_s: float

    def verdicts(self) -> list[Verdict]:
        return self.told

    def logits(self) -> Tensor | None:
        return self.all_logits if self.reads_logits else None

    def row_of(self, members: Sequence[Member]) -> Tensor:
        numbers = {id(member): number for number, member in enumerate(self.members)}
        return self.packed.row_of[[numbers[id(member)] for member in members]]


class EagerBackend(Backend):
    depth = 0
    spare = 0

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.prefix_readers = PrefixReaders(parts.drafting, parts.prefixes)

    @staticmethod
    def chunk_rule(target: Runner, config: EngineConfig) -> ChunkRule:
        return ChunkRule(config.pass_tokens(target.device.type))

    def launch(
        self,
        batch: Schedule,
        plan: Plan,
        *,
        lagged: Mapping[str, Sequence[Answer]],
        waiting_since: float | None,
    ) -> EagerFlight:
        parts, decodes, chunks = self._parts, batch.decodes, batch.chunks
        began = time.perf_counter()
        draft, authors = plan.joined(self._guess(plan, decodes), parts.target.device)
        drafted = time.perf_counter()
        features = parts.sampling.features([a.slot for a in decodes] + [chunk.answer.slot for chunk in chunks])
        packed = pack(decodes, chunks, draft, paths=features.penalties or features.bad_words)
        logits = parts.target.forward(packed.batch, parts.cache)
        draft = draft.extended(len(packed.emitting) - len(decodes))  # an empty one for each prompt that ends here
        choices = self._choose(packed, draft, features, logits)
        verdicts = verify_exact(draft, choices)
        if not draft.is_chain:
            moves = compaction(packed.slot_of_row, verdicts.path, verdicts.accepted)
            parts.cache.move(moves.src, moves.dst)
        shown = choices if parts.drafting.read_choices(decodes) else None
        told = verdicts.told([answer.id for answer in packed.emitting], draft.counts, shown)
        told[: len(decodes)] = map(Verdict.by, told, authors)
        emitted = [(a.slot, len(v.tokens)) for a, v in zip(packed.emitting, told, strict=True)]
        slots, lengths = torch.tensor(emitted, dtype=torch.int64).view(-1, 2).to(choices.device).unbind(1)
        parts.sampling.commit(slots, verdicts.tokens, lengths)
        for chunk in chunks:
            parts.scheduler.commit(chunk)
        whose = [*authors, *[NOBODY] * (len(told) - len(decodes))]
        members = [
            Member.of(answer, by, verdict.drafted, decodes=i < len(decodes))
            for i, (answer, by, verdict) in enumerate(zip(packed.emitting, whose, told, strict=True))
        ]
        read_rows = sum(chunk.rows for chunk in chunks)
        return EagerFlight(
            members=tuple(members),
            decodes=len(decodes),
            drafts=plan.drafts,
            hosts=(),  # their time is measured while they guess
            rows=packed.batch.num_rows - read_rows,
            read_rows=read_rows,
            expected_gain=parts.drafting.planner.expected_gain,
            steady=not chunks,
            reads_logits=any(answer.params.logprobs is not None for answer in packed.emitting),
            told=told,
            packed=packed,
            all_logits=logits,
            draft_s=drafted - began + plan.seconds,
            verify_s=time.perf_counter() - drafted,
        )

    def _guess(self, plan: Plan, decodes: Sequence[Answer]) -> dict[str, Guesses]:
        """Let the device drafters of the plan guess."""
        guessed: dict[str, Guesses] = {}
        for size in plan.drafts:
            shares = [dict(shares).get(size.drafter, 0) for shares in plan.shares]
            mine = [i for i, nodes in enumerate(shares) if nodes]
            answers, budgets = [decodes[i] for i in mine], [shares[i] for i in mine]
            guessed[size.drafter] = Guesses(mine, self._parts.drafting.ask(size, answers, budgets))
        return guessed

    def _choose(self, packed: PackedPass, draft: Draft, features: Features, logits: Tensor) -> Tensor:  # [E, K + 1]
        """The target's token at each row."""
        parts = self._parts
        allowed = None
        if features.grammar:
            constraining, trees = parts.drafting.constraining, draft.tree
            allowed = constraining.allowed(packed.emitting, draft.counts.tolist(), trees)  # [R, W]
        choices = packed.choices(choose(logits, packed.rows, parts.sampling, features, allowed=allowed))
        if not features.rejection:
            return choices
        return mixed_choices(
            choices, logits, packed.rows, packed.row_of, draft, parts.sampling, features, allowed=allowed
        )

    def times(self, flight: Flight, lasted_s: float) -> StepTimes:
        assert isinstance(flight, EagerFlight)
        host_s = max(0.0, lasted_s - flight.draft_s - flight.verify_s)
        rows = flight.rows, flight.read_rows, flight.expected_gain
        return StepTimes(host_s, flight.draft_s, flight.verify_s, *rows)
