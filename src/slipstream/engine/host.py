"""What a server needs of an engine: `remote.EngineProcess`, or a stand-in in a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from slipstream.constrain.limits import CompileLimits
from slipstream.core.params import SamplingParams
from slipstream.core.snapshot import Pulse, Snapshot
from slipstream.engine.requests import Prompt
from slipstream.engine.streams import OutputStream


class Prepared(Protocol):
    """A request that nothing is wrong with, in tokens; it may be started once."""

    @property
    def id(self) -> str: ...
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def prediction(self) -> Sequence[int]: ...
    @property
    def material(self) -> Sequence[Sequence[int]]: ...
    @property
    def unenforced(self) -> Sequence[str]:
        """Rules of its form that no grammar holds."""


class EngineHost(Protocol):
    """An engine that is open. Any thread may call it; but for `prepare`, nothing here waits for the engine."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def drafters(self) -> Sequence[str]:
        """The names of those that are loaded."""

    @property
    def speculates(self) -> bool:
        """May drafts be made?"""

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        streaming: bool = True,
        compiling: CompileLimits | None = None,
    ) -> Prepared:
        """Everything that takes time or can be refused: raises `InvalidRequest`, or `QueueFull`.

        compiling: what a stranger's form may take; None: as long as it takes.
        """

    def start(self, *jobs: Any) -> OutputStream:
        """Start together what this engine prepared, for the running event loop. The stream ends when all of them have.

        Raises `RequestError` where the engine is closed.
        """

    def expect_forms(self) -> None:
        """Strangers will ask for answers of some form: have ready what tries their forms out. Does not wait for it."""

    def pulse(self) -> Pulse:
        """Does the engine live, and does it get on?"""

    def snapshot(self) -> Snapshot:
        """Where the engine stands and what it has done so far: of all answers whose end was told, at least."""

    def kill(self, why: str) -> None:
        """End the engine at once, whatever it does: what runs fails with `EngineDied`. Does not wait."""

    def close(self) -> None:
        """Abort what runs and end the engine. May be called twice."""
