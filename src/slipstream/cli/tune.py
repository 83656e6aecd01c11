"""`slipstream tune`: measures drafters on the user's prompts and recommends one for each number of requests at once."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from slipstream.bench import run, tune
from slipstream.bench.prompts import load_prompts, select
from slipstream.cli.loading import loaded
from slipstream.cli.measuring import StopOnInterrupt, busy_warning, load_before
from slipstream.cli.options import Common, check_written, whole_numbers, with_options
from slipstream.cli.show import note
from slipstream.core.errors import ConfigError
from slipstream.core.settings import setting

DEFAULT_MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of `slipstream tune` alone.

    drafters: The candidates, such as ngram,suffix. Also --drafter.
    sizes: Try each also with at most K guesses, such as 3,6.
    prompts: JSON lines with 'prompt' or 'turns'. Default: ours.
    limit: Only N prompts. Default: all.
    concurrency: Requests at once, such as 1,4,16,64.
    repeats: Measure N times; the median counts.
    config: Write what `slipstream serve --config` takes, as JSON.
    plot: Draw the speeds as SVG.
    """

    drafters: str | None = setting(str, None, metavar="A,B,C", panel="speculation")
    sizes: str = setting(str, "", metavar="K[,K…]", panel="speculation")
    prompts: Path | None = setting(Path, None, metavar="FILE", panel="prompts")
    limit: int | None = setting(int, None, metavar="N", panel="prompts")
    concurrency: str = setting(str, "1,4,16", metavar="N[,N…]", panel="measuring")
    repeats: int = setting(int, 1, low=1, metavar="N", panel="measuring")
    config: Path | None = setting(Path, None, metavar="FILE", panel="output")
    plot: Path | None = setting(Path, None, metavar="FILE", panel="output")


@functools.partial(with_options, hidden=("no_speculation", "planner"))
def tune_command(
    common: Common,
    own: TuneOptions,
) -> None:
    """Measure drafters, sizes and verifiers on your own prompts, and recommend what to run.

    The last line on stdout is JSON. After Ctrl-C table and JSON have the numbers of requests at once that were done.
    """
    if common.no_speculation:
        raise ConfigError("--no-speculation: tune measures plain decoding beside its candidates anyway; leave it out")
    if common.engine.get("planner") == "fixed":
        raise ConfigError("--planner fixed: tune measures what the planner drafts; leave it out")
    levels = whole_numbers("--concurrency", own.concurrency, "1,4,16")
    tried = whole_numbers("--sizes", own.sizes, "3,6", least=0)
    if own.drafters:
        named = [name for name in own.drafters.split(",") if name]
        common = replace(common, drafter=[*(common.drafter or ()), *named])
        common.check(None, option="--drafters")
    check_written({"config": own.config, "plot": own.plot})
    params = common.sampling(max_tokens=DEFAULT_MAX_TOKENS)
    chosen = select(load_prompts(own.prompts), (), own.limit)
    load = load_before()
    with loaded(common, common.drafters, max_num_seqs=max(levels), prefix_caching=False) as llm:
        work = run.plan_work(llm, chosen, params, 1)
        options = tune.candidates(run.engine_runners(llm, common.drafters, params.speculation), tried)
        run.warm_up(work.units[0], [one.runner for one in options])
        ids, each = [unit.token_ids[0] for unit in work.units], [unit.params[0] for unit in work.units]
        rows: list[tune.Tuned] = []
        stopping = StopOnInterrupt(lambda: rows)
        with stopping:
            for found in tune.measure(options, ids, each, levels, repeats=own.repeats, on_step=_noting_levels()):
                rows += found
        remarks = llm.remarks
    left = [level for level in levels if level not in {row.concurrency for row in rows}]
    console = Console()
    console.print(table(rows))
    best = tune.best(rows)
    for level, row in best.items():
        console.print(f"{level} at once: {row.name}, {tune.how_sure(row, rows)}", markup=False, highlight=False)
    for doubt in tune.doubts(rows):
        note(f"not sure: {doubt}", style="yellow")
    if left:
        note(f"not measured: {', '.join(map(str, left))} at once", style="yellow")
    for line in (*remarks, *busy_warning(load)):
        note(line, style="yellow")
    result = {**tune.configuration(common.model, rows, common.min_gain), "not_measured": left, **load}
    if own.config is not None:
        own.config.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        winner = tune.best_of_all(rows).name
        together = " together" if len(best) > 1 else ""
        note(f"wrote {own.config}: {winner}, the best with {', '.join(map(str, best))} at once{together}")
    if own.plot is not None:
        own.plot.write_text(drawn(rows), encoding="utf-8")
    report = {**result, "seed": params.seed, "remarks": list(remarks), "rows": [asdict(row) for row in rows]}
    print(json.dumps(report, ensure_ascii=False), flush=True)
    if stopping.happened:
        raise typer.Exit(130)


def _noting_levels() -> Callable[[int, str], None]:
    """Notes each number of requests at once, in one line. A bar that is redrawn would disturb the timing."""
    seen = set[int]()

    def note_level(concurrency: int, _: str) -> None:
        if concurrency not in seen:
            seen.add(concurrency)
            note(f"measuring with {concurrency} at once")

    return note_level


def table(rows: Sequence[tune.Tuned]) -> Table:
    shown, best = Table(box=None, pad_edge=False), tune.best(rows)
    for name in ("at once", "candidate", "tok/s", "x plain", ""):
        shown.add_column(name, justify="left" if name == "candidate" else "right")
    plain = {row.concurrency: row.tokens_per_s for row in rows if row.name == run.PLAIN}
    for row in rows:
        shown.add_row(
            str(row.concurrency),
            row.name,
            f"{row.tokens_per_s:.1f}",
            f"{row.tokens_per_s / plain[row.concurrency]:.2f}",
            "best" if best[row.concurrency] is row else "",
        )
    return shown


def drawn(rows: Sequence[tune.Tuned]) -> str:
    from slipstream.train.plot import Panel, draw

    names = dict.fromkeys(row.name for row in rows)
    lines = {n: [(float(row.concurrency), row.tokens_per_s) for row in rows if row.name == n] for n in names}
    ticks = {float(row.concurrency): str(row.concurrency) for row in rows}
    return draw([Panel("tokens a second, by requests at once", lines, ticks, from_zero=True)], "slipstream tune")
