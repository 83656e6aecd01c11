"""From options to an engine: fetched before torch is imported, loaded visibly, closed at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slipstream.cli.options import Common
from slipstream.drafters import DrafterSpec, parse_merged, places
from slipstream.drafters.places import naming
from slipstream.models.paths import Progress
from slipstream.models.resolve import WAYS, resolve

if TYPE_CHECKING:
    from slipstream.drafters.base import Drafter
    from slipstream.engine.llm import LLM

    Named = str | Drafter  # as on the command line, or made by the command itself


def fetch(common: Common, name: str, on_fetch: Progress, ways: str = WAYS) -> str:
    """The folder of a model. What cannot be had is said here, not after seconds of imports."""
    return str(resolve(name, on_fetch, trust_remote_code=common.trust_remote_code, ways=ways))


def fetch_draft(common: Common, drafter: Named, on_fetch: Progress) -> Named:
    if not isinstance(drafter, str):
        return drafter
    specs = parse_merged(drafter)
    if all(spec.place is None for spec in specs):
        return drafter
    return "+".join(str(_fetched(common, spec, on_fetch)) for spec in specs)


def _fetched(common: Common, spec: DrafterSpec, on_fetch: Progress) -> DrafterSpec:
    if spec.place is None:
        return spec
    with naming(f"--drafter {spec}"):
        return spec.moved(fetch(common, spec.place, on_fetch, places.WAYS))


def use_threads(count: int | None) -> None:
    """Before anything is computed: torch divides its work among so many threads from then on."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


def open_llm(
    common: Common, drafters: Sequence[Named], on_fetch: Progress, on_load: Progress | None, **more: Any
) -> LLM:
    """Load the engine. The one place where the command line does, so tests put a stand-in here."""
    model = fetch(common, common.model, on_fetch)
    named = [fetch_draft(common, drafter, on_fetch) for drafter in drafters]
    use_threads(common.threads)
    from slipstream.engine.llm import LLM

    return LLM(
        model,
        drafter=named or None,
        draft_tokens=common.draft_tokens,
        dtype=common.dtype,
        device=common.device,
        memory=common.memory,
        max_model_len=common.max_model_len,
        trust_remote_code=common.trust_remote_code,
        graphs=not common.no_graphs,
        on_progress=on_load,
        **{"planner": common.planner_or("adaptive"), **common.planning, **more, **common.caching},
    )


def plain_line(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def line_of_long_steps(message: str) -> None:
    """What is done once on a machine may take a minute, and who waits should know for what; the rest is quick."""
    if "(once)" in message:
        plain_line(message)


@contextmanager
def loaded(common: Common, drafters: Sequence[Named], **more: Any) -> Iterator[LLM]:
    """The engine, closed at the end.

    On a terminal stderr shows what is being done; elsewhere only what may take long, line by line: what is fetched, and
    what is compiled, checked and measured when a model is opened for the first time.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"loading {common.model}") as status:
            llm = open_llm(common, drafters, status.update, status.update, **more)
    else:
        llm = open_llm(common, drafters, plain_line, line_of_long_steps, **more)
    try:
        yield llm
    finally:
        llm.close()
