"""A queued engine that a test drives round by round, and drafters for it: on the device, and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream import RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import Draft, Tree
from slipstream.drafters.base import DeviceDrafter, DraftRequest, DraftRound, HostDrafter, Needs
from slipstream.engine.flight import Flight
from slipstream.engine.queued import QueuedBackend
from slipstream.engine.state import Job
from slipstream.kernels.gpu.rows import RECENT
from stepping import Stepper

OFF = SpeculationParams(enabled=False)
PARAMS = SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True)
CPU = torch.device("cpu")


class Queue(Stepper):
    """A queued engine, driven round by round."""

    def __init__(self, model: Path, drafter: Any, **config: Any) -> None:
        super().__init__(model, drafter, rounds="queued", **config)
        assert isinstance(self.engine.backend, QueuedBackend)
        self.queued = self.engine.backend

    @property
    def flights(self) -> list[Flight]:
        return list(self.engine._flights)

    def add(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> tuple[Job, list[RequestOutput]]:
        heard: list[RequestOutput] = []
        job = self._intake.job(list(prompt), params, heard.append, **{"streaming": False, **options})
        self.engine.add(job)
        return job, heard

    def check_lanes(self) -> None:
        """On the device a lane's own pages stand first, and behind them nothing but nobody's page."""
        lanes = self.queued.lanes
        for slot, pages in lanes._sent.items():
            line = lanes.state.pages[slot].tolist()
            assert line == [*pages, *([self.engine.pool.num_pages] * (len(line) - len(pages)))]

    def drain(self) -> None:
        while self.engine.busy:
            self.engine.step()
            self.engine.scheduler.check_integrity()
        self.check_lanes()
        assert self.engine.pool.free_pages == self.engine.pool.num_pages


class Echo(DeviceDrafter):
    """Guesses the last token again, on the device, and notes how often it was asked."""

    name: ClassVar[str] = "echo"
    needs: ClassVar[Needs] = Needs(device=True)
    default_draft_tokens: ClassVar[int] = 3

    def __init__(self) -> None:
        self.rounds: list[int] = []  # requests of each
        self.raises = False

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        return Draft.pack([Tree.chain([r.tokens[-1]] * n) for r, n in zip(requests, budget, strict=True)], CPU)

    def draft(self, round: DraftRound) -> Tensor:
        if self.raises:
            raise RuntimeError("out of memory, say")
        self.rounds.append(round.lanes.shape[0])
        return round.state.last[round.lanes][:, None].expand(-1, round.depth)


class First(Echo):
    """The same, but always the token 10."""

    name: ClassVar[str] = "first"

    def draft(self, round: DraftRound) -> Tensor:
        return super().draft(round) * 0 + 10


class Letters(HostDrafter):
    """Trees of what is likely to come."""

    name: ClassVar[str] = "letters"
    bounded: ClassVar[bool] = True

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        wide = Tree((10, 20, 30, 40, 10, 20), (-1, -1, -1, -1, 0, 1))
        return [Tree(wide.tokens[:nodes], wide.parents[:nodes]) for nodes in budget]


class Knowing(HostDrafter):
    """Knows how these texts go on, and tells of it now more, now less."""

    name: ClassVar[str] = "knowing"
    bounded: ClassVar[bool] = True
    default_draft_tokens: ClassVar[int] = 14

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self._asked = 0

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self._one(request, nodes) for request, nodes in zip(requests, budget, strict=True)]

    def _one(self, request: DraftRequest, nodes: int) -> Tree:
        said = list(request.tokens[request.prompt_length :])
        self._asked += 1
        rest = next((text[len(said) :] for text in self.texts if text[: len(said)] == said), list[int]())
        return Tree.chain(rest[: min(nodes, self._asked * 7 % 15)])


class KnowingAhead(Echo):
    """The same on the device, whose guesses nobody waits for: always as far as it may."""

    name: ClassVar[str] = "ahead"
    default_draft_tokens: ClassVar[int] = 14

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[list[int]] = []

    def draft(self, round: DraftRound) -> Tensor:
        return torch.tensor([self._behind(round, lane) for lane in round.lanes.tolist()])

    def _behind(self, round: DraftRound, lane: int) -> list[int]:
        length, generated = int(round.state.length[lane]), int(round.state.generated[lane])
        count = min(generated, 8)
        said = [int(round.state.recent[lane, at % RECENT]) for at in range(length + 1 - count, length + 1)]
        known = [text for text in self.texts if count and text[generated - count : generated] == said]
        rest = known[0][generated : generated + round.depth] if known else []
        return [*rest, *[0] * (round.depth - len(rest))]
