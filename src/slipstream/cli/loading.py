"""Open an engine from options: fetch before torch is imported, show progress, close at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from slipstream.cli.flags import naming_memory_flags
from slipstream.cli.options import Common
from slipstream.drafters import DrafterSpec, opening, parse_merged
from slipstream.drafters.opening import naming
from slipstream.models.paths import Progress
from slipstream.models.resolve import WAYS, resolve

if TYPE_CHECKING:
    from slipstream.drafters.base import Drafter
    from slipstream.engine.llm import LLM
    from slipstream.engine.remote import EngineProcess

    Named = str | Drafter  # as on the command line, or an object
    Opened = TypeVar("Opened", bound=LLM | EngineProcess)


def fetch(common: Common, name: str, on_fetch: Progress, ways: str = WAYS) -> str:
    """The folder of a model, fetched if needed. Errors come here, before seconds of imports."""
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
        return spec.moved(fetch(common, spec.place, on_fetch, opening.WAYS))


def use_threads(count: int | None) -> None:
    """Set torch's number of threads. Call it before anything is computed."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


def open_llm(
    common: Common, drafters: Sequence[Named], on_fetch: Progress, on_load: Progress | None, **more: Any
) -> LLM:
    """Load the engine in this process. Tests replace this function by a stand-in."""
    options = _options(common, drafters, on_fetch, more)
    use_threads(common.threads)
    from slipstream.engine.llm import LLM

    return LLM(**options, on_progress=on_load)


def open_process(
    common: Common, drafters: Sequence[Named], on_fetch: Progress, on_load: Progress, **more: Any
) -> EngineProcess:
    """Load the engine in a process of its own. The server's modules are imported meanwhile."""
    from slipstream.engine.remote import EngineProcess

    options = _options(common, drafters, on_fetch, more)
    meanwhile = partial(import_module, "slipstream.serve.server")
    return EngineProcess(**options, threads=common.threads, meanwhile=meanwhile, on_progress=on_load)


def _options(common: Common, drafters: Sequence[Named], on_fetch: Progress, more: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM`, with the models fetched."""
    return {
        "model": fetch(common, common.model, on_fetch),
        "drafter": [fetch_draft(common, drafter, on_fetch) for drafter in drafters] or None,
        "dtype": common.dtype,
        "device": common.device,
        "trust_remote_code": common.trust_remote_code,
        "force_pair": common.force_pair,
        **more,
        **common.engine,
    }


def plain_line(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def line_of_long_steps(message: str) -> None:
    """Print messages about steps that run once on a machine and may take a minute; skip those about quick steps."""
    if "(once" in message or message.startswith("warming up"):
        plain_line(message)


@contextmanager
def loaded(common: Common, drafters: Sequence[Named], **more: Any) -> Iterator[LLM]:
    """The engine, closed at the end."""
    with _shown(common, drafters, open_llm, more) as llm:
        yield llm


@contextmanager
def hosted(common: Common, drafters: Sequence[Named], **more: Any) -> Iterator[EngineProcess]:
    """A server's engine, closed at the end. One line reports the loading, since a silent log looks like a failure."""
    if not Console(stderr=True).is_terminal:
        plain_line(f"loading {common.model}")
    with _shown(common, drafters, open_process, more, notes=True) as host:
        yield host


@contextmanager
def _shown(
    common: Common,
    drafters: Sequence[Named],
    opened: Callable[..., Opened],
    more: Mapping[str, Any],
    *,
    notes: bool = False,
) -> Iterator[Opened]:
    """Open the engine and show progress on stderr: all of it on a terminal; elsewhere, line by line, only downloads and
    the long steps of a first start.

    notes: print the engine's notes as well; commands that print `LLM.remarks` need not.
    """
    console = Console(stderr=True)

    def shown_by(show: Progress) -> Progress:
        def show_message(message: str) -> None:
            if not message.startswith("note: "):
                show(message)
            elif notes:
                console.print(message, markup=False, highlight=False, soft_wrap=True)

        return show_message

    with naming_memory_flags():
        if console.is_terminal:
            with console.status(f"loading {common.model}") as status:
                engine = opened(common, drafters, status.update, shown_by(status.update), **more)
        else:
            engine = opened(common, drafters, plain_line, shown_by(line_of_long_steps), **more)
    with closing(engine):
        yield engine
