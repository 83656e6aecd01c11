"""The progress bar of a batch, for callers who ask `generate` for one as they would ask vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.core.outputs import RequestOutput


@contextmanager
def progress_bar(total: int, wanted: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """Gives what hears of each finished request. On stderr, and only if that is a terminal."""
    if not wanted:
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), rate)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, rate="")
        tokens = 0

        def finished(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(answer.token_ids) for answer in output.outputs)
            bar.update(task, advance=1, rate=f"{tokens / max(bar.tasks[0].elapsed or 0.0, 1e-3):.0f} tok/s")

        yield finished
