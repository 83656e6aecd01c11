"""The bar of what is counted, on stderr if that is a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def counting_bar(*, auto_refresh: bool = True) -> Progress:
    """auto_refresh: it moves by a thread of its own."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=auto_refresh)
