"""What a device does of a step, behind one contract: launch it, and read its result now or one step later.

`EagerBackend` (depth 0) runs a step while the host waits for it: on a CPU nothing else could use the time. On a GPU
`QueuedBackend` (depth 1) queues the next step before the host has read the tokens of the last one. `Engine.step` is
the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slipstream.core.verdict import Verdict
from slipstream.engine.chunks import ChunkRule
from slipstream.engine.config import EngineConfig
from slipstream.engine.counters import Counters
from slipstream.engine.drafting import Drafting
from slipstream.engine.drafts import Plan
from slipstream.engine.flight import Flight, StepTimes
from slipstream.engine.prefix_readers import PrefixReaders
from slipstream.engine.requests import MemoryPlan
from slipstream.engine.schedule import Schedule, Scheduler
from slipstream.engine.state import Answer
from slipstream.kv.cache import KVCache
from slipstream.kv.prefix import PrefixStore
from slipstream.models.runner import Runner
from slipstream.sampling.table import SamplingTable


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine that a backend works on."""

    target: Runner
    cache: KVCache
    sampling: SamplingTable
    scheduler: Scheduler
    drafting: Drafting
    prefixes: PrefixStore | None
    plan: MemoryPlan
    config: EngineConfig
    counters: Counters


class Backend(ABC):
    """Runs steps. It changes the cache, the sampling table and the drafters' caches; `Engine` changes the answers."""

    depth: ClassVar[int]
    """Steps that are in flight while the host delivers an earlier one."""
    spare: ClassVar[int]
    """Slots and pages beyond those of requests, for padding."""
    prefix_readers: PrefixReaders

    def __init__(self, parts: Parts, **options: Any) -> None:  # noqa: B027
        pass

    @staticmethod
    @abstractmethod
    def chunk_rule(target: Runner, config: EngineConfig) -> ChunkRule:
        """How prompts are cut into passes."""

    @abstractmethod
    def launch(
        self,
        batch: Schedule,
        plan: Plan,
        *,
        lagged: Mapping[str, Sequence[Answer]],
        waiting_since: float | None,
    ) -> Flight:
        """Run or queue everything that the device does of a step.

        plan: of `batch.decodes`. lagged: by device drafter, whom it caught up on just before.
        waiting_since: since when the device has waited for nothing but host drafters.
        """

    @abstractmethod
    def times(self, flight: Flight, lasted_s: float) -> StepTimes:
        """What the step took. Called once for each flight, in order. lasted_s: by the host's clock, since the result of
        the step before it was there, or work began after a pause."""

    def observe(self, answer: Answer, verdict: Verdict) -> None:  # noqa: B027
        """An answer's verdict was read, and its tokens are committed."""

    def rest(self) -> None:  # noqa: B027
        """Nothing is in flight: the next step begins after a pause."""

    def recover(self) -> None:
        """A step failed: forget what is in flight."""
        self.rest()
