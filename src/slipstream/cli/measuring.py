"""Shared by the commands that measure: the machine's part of a report, a progress bar, and Ctrl-C."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from slipstream import __version__
from slipstream.bench import memory
from slipstream.cli.show import note


def versions() -> dict[str, str]:
    import torch
    import transformers

    return {
        "slipstream": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def hardware() -> dict[str, Any]:
    import torch

    return {
        "cpu": memory.cpu_model(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def load_before() -> dict[str, Any]:
    """The load of the machine by other programs. Call it before the measurement starts."""
    load = memory.load_average()
    return {"load_before": load, "busy": memory.busy(load, os.cpu_count() or 1)}


def busy_warning(load: Mapping[str, Any]) -> list[str]:
    """One line if `load_before` found a busy machine, else none."""
    if not load["busy"]:
        return []
    return [
        f"warning: the machine was busy before this run (load {load['load_before']:.1f} on {os.cpu_count() or 1} "
        "cores): do not trust these rates"
    ]


def counting_bar(*, auto_refresh: bool = True) -> Progress:
    """A progress bar on stderr, hidden where that is no terminal. auto_refresh: a thread of its own redraws it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=auto_refresh)


class StopOnInterrupt:
    """A context in which the first Ctrl-C ends only the block, if there are results to show; the second one raises.

    It may be entered again for the work that follows.
    """

    def __init__(self, has_results: Callable[[], object]) -> None:
        self.happened = False
        self._has_results = has_results

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, KeyboardInterrupt) or self.happened or not self._has_results():
            return False
        self.happened = True
        note("stopping: the results so far follow (Ctrl-C again ends at once)")
        return True
