"""From measurements to numbers: rates by task and mode, speed-ups, equality of tokens; as tables and as JSON.

A rate is tokens over seconds, summed over the prompts of a category. Of several repeats the median counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from slipstream.bench.run import PLAIN, Answer, Cell, Sample, Unit
from slipstream.bench.traffic import Outcome
from slipstream.core.outputs import SpeculationStats, parting

ALL = "all"
_PAYS = 1.02  # what differs less than this from plain decoding is noise


@dataclass(frozen=True, slots=True)
class Row:
    """One category in one mode."""

    category: str
    mode: str
    prompts: int
    prompt_tokens: int
    tokens: int
    seconds: float  # wall clock, prompts included
    prefill_s: float  # to the first token, summed over prompts
    decode_s: float  # after it
    stats: SpeculationStats
    declined: int  # steps without drafts, which were not expected to pay
    compared: int  # prompts whose tokens can be compared with plain decoding's
    same: int  # of these, how many are identical

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first over the seconds after the first."""
        return (self.tokens - self.prompts) / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """A prompt whose answer differs from plain decoding's, and the index of the first different token."""

    prompt: str
    mode: str
    at: int


@dataclass(frozen=True, slots=True)
class Summary:
    """One temperature and number of requests at once. Rows: by category, then `all`; modes in the order given."""

    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    temperature: float = 0.0
    concurrency: int = 1
    skipped: int = 0  # prompts that did not fit the model's context
    prompts: tuple[str, ...] = ()  # ids of the others, each once

    @property
    def title(self) -> str:
        return f"temperature {self.temperature:g}, {self.concurrency} at once"

    def row(self, category: str, mode: str) -> Row:
        return next(row for row in self.rows if row.category == category and row.mode == mode)

    def speedup(self, row: Row, against: str = PLAIN) -> float:
        """Tokens per second over those of the mode `against` on the same prompts."""
        base = self.row(row.category, against).tokens_per_s
        return row.tokens_per_s / base if base else 0.0

    def decode_speedup(self, row: Row, against: str = PLAIN) -> float:
        base = self.row(row.category, against).decode_tokens_per_s
        return row.decode_tokens_per_s / base if base else 0.0


def without_end(tokens: Sequence[int], eos: Collection[int]) -> tuple[int, ...]:
    """The tokens without the end-of-text token, which some engines return."""
    end = len(tokens)
    while end and tokens[end - 1] in eos:
        end -= 1
    return tuple(tokens[:end])


def median_sample(samples: Sequence[Sample]) -> Sample:
    """The sample with the median time; of two in the middle the faster."""
    return sorted(samples, key=lambda sample: sample.measured.wall_s)[(len(samples) - 1) // 2]


def summarize_cell(
    cell: Cell, modes: Sequence[str], *, eos: Collection[int] = (), sampled_apart: Collection[str] = ()
) -> Summary:
    """The summary of the samples that can be compared.

    sampled_apart: modes that draw other random numbers than plain decoding.
    """
    samples = cell.comparable(len(modes))
    units = cell.work.units[: len({sample.unit for sample in samples})]
    incomparable = sampled_apart if cell.temperature > 0 else ()
    found = summarize(units, samples, modes, eos=eos, incomparable=incomparable)
    prompts = tuple(dict.fromkeys(prompt.id for unit in units for prompt in unit.prompts))
    return replace(
        found,
        temperature=cell.temperature,
        concurrency=cell.concurrency,
        skipped=cell.work.skipped,
        prompts=prompts,
    )


def summarize(
    units: Sequence[Unit],
    samples: Sequence[Sample],
    modes: Sequence[str],
    *,
    eos: Collection[int] = (),
    incomparable: Collection[str] = (),
) -> Summary:
    """incomparable: modes whose tokens are not compared with those of plain decoding."""
    taken: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        taken.setdefault((sample.unit, sample.mode), []).append(sample)
    differences: dict[tuple[str, str], Difference] = {}
    for (unit, mode), group in taken.items():
        plain = taken[unit, PLAIN][0].measured.answers
        for sample in group if mode not in incomparable else ():
            for prompt, mine, other in zip(units[unit].prompts, sample.measured.answers, plain, strict=True):
                at = parting(without_end(mine.token_ids, eos), without_end(other.token_ids, eos))
                if at is not None:
                    differences.setdefault((prompt.id, mode), Difference(prompt.id, mode, at))
    categories = list(dict.fromkeys(unit.category for unit in units))
    rows = []
    for category in [*categories, ALL]:
        members = [index for index, unit in enumerate(units) if category in (unit.category, ALL)]
        for mode in modes:
            chosen = [median_sample(taken[index, mode]) for index in members]
            prompts = [prompt.id for index in members for prompt in units[index].prompts]
            compared = 0 if mode in incomparable else len(prompts)
            same = sum(1 for prompt in prompts if (prompt, mode) not in differences) if compared else 0
            read = sum(len(ids) for index in members for ids in units[index].token_ids)
            rows.append(make_row(category, mode, read, chosen, compared, same))
    return Summary(tuple(rows), tuple(differences.values()))


def make_row(category: str, mode: str, read: int, chosen: Sequence[Sample], compared: int, same: int) -> Row:
    answers: list[Answer] = [answer for sample in chosen for answer in sample.measured.answers]
    stats = [answer.stats for answer in answers if answer.stats is not None]
    return Row(
        category=category,
        mode=mode,
        prompts=len(answers),
        prompt_tokens=read,
        tokens=sum(len(answer.token_ids) for answer in answers),
        seconds=sum(sample.measured.wall_s for sample in chosen),
        prefill_s=sum(answer.first_token_s for answer in answers),
        decode_s=sum(answer.total_s - answer.first_token_s for answer in answers),
        stats=SpeculationStats.total(stats),
        declined=sum(max((d.declined for d in s.by_drafter.values()), default=0) for s in stats),
        compared=compared,
        same=same,
    )


def undrafted(row: Row) -> str:
    """Why a mode with a drafter drafted nothing."""
    if not row.declined:
        return "nothing drafted: its drafter never had a guess"
    return (
        f"nothing drafted: its guesses were not expected to pay enough in {row.declined} of "
        f"{row.stats.rounds} rounds; --min-gain says what is enough, --planner fixed guesses all the same"
    )


def tables(summaries: Sequence[Summary]) -> list[Table]:
    """All prompts in one table; then each task, in a table of modes or, of several cells, in one of speed-ups."""
    if not summaries:
        return []
    first, several = summaries[0], len(summaries) > 1
    whole = [
        ((f"{one.temperature:g}", str(one.concurrency)) if several else (), one, row)
        for one in summaries
        for row in one.rows
        if row.category == ALL
    ]
    how = "" if several else f", {first.concurrency} at a time"
    title = f"Plain decoding and drafts: {len(first.prompts)} prompts{how}"
    found = [table(whole, title, ("T", "at once") if several else ())]
    tasks = list(dict.fromkeys(row.category for row in first.rows if row.category != ALL))
    if several:
        modes = dict.fromkeys(row.mode for row in first.rows if row.mode != PLAIN)
        found += [gains_table(summaries, mode, [*tasks, ALL]) for mode in modes]
    elif len(tasks) > 1:
        found.append(
            table([((row.category,), first, row) for row in first.rows if row.category != ALL], "By task", ("task",))
        )
    return found


def gains_table(summaries: Sequence[Summary], mode: str, tasks: Sequence[str]) -> Table:
    """The speed-up of a drafter by task, temperature and number of concurrent requests."""
    title = f"{mode}: times plain, by task"
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    shown.add_column("task", no_wrap=True)
    for one in summaries:
        shown.add_column(f"T {one.temperature:g}\n{one.concurrency} at once", justify="right", no_wrap=True)
    for task in tasks:
        gains = [_gain(one, task, mode) for one in summaries]
        shown.add_row(task, *("" if gain is None else _styled(gain) for gain in gains))
    return shown


def _gain(summary: Summary, task: str, mode: str) -> float | None:
    """The speed-up; None if the run was interrupted before this task was measured in this mode."""
    rows = {(row.category, row.mode): row for row in summary.rows}
    row = rows.get((task, mode))
    return None if row is None else summary.speedup(row)


def _styled(gain: float) -> Text:
    return Text(f"{gain:.2f}x", style="green" if gain > _PAYS else "red" if gain < 1 / _PAYS else "")


def table(rows: Sequence[tuple[tuple[str, ...], Summary, Row]], title: str, keys: Sequence[str] = ()) -> Table:
    """A table of modes for terminals of 80 columns. Each row begins with the values of `keys`."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for key in keys:
        shown.add_column(key, no_wrap=True)
    shown.add_column("mode", overflow="fold", min_width=len("transformers"))
    for column in ("decoding\ntok/s", "times\nplain", "in all\ntok/s", "times\nplain", "tau", "same\ntokens"):
        shown.add_column(column, justify="right", no_wrap=True)
    last: tuple[str, ...] | None = None
    for about, summary, row in rows:
        if last is not None and about != last:
            shown.add_section()
        same = "-" if not row.compared else "yes" if row.same == row.compared else f"no: {row.same}/{row.compared}"
        shown.add_row(
            *(about if about != last else ("",) * len(about)),
            row.mode,
            f"{row.decode_tokens_per_s:.1f}",
            f"{summary.decode_speedup(row):.2f}x",
            f"{row.tokens_per_s:.1f}",
            f"{summary.speedup(row):.2f}x",
            f"{row.stats.tau:.2f}" if row.stats.rounds else "-",
            same if row.mode != PLAIN else "",
        )
        last = about
    return shown


def traffic_table(outcomes: Sequence[tuple[float, Outcome]], way: str) -> Table:
    """The latencies at each rate, for terminals of 80 columns; the JSON has more percentiles."""
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("rate/s", "drafter", "good/s", "good", "tok/s", "ttft p50", "p99", "tpot p50", "p99", "tau"):
        shown.add_column(name, justify="left" if name == "drafter" else "right", no_wrap=name != "drafter")
    for rate, out in outcomes:
        shown.add_row(
            f"{rate:g}",
            way,
            f"{out.goodput:.2f}",
            f"{out.good:.0%}",
            f"{out.tokens_per_s:.1f}",
            *(f"{seconds:.2f} s" for seconds in (out.ttft.p50, out.ttft.p99)),
            *(f"{1000 * seconds:.1f} ms" for seconds in (out.tpot.p50, out.tpot.p99)),
            f"{out.tau:.2f}",
        )
    return shown


def row_json(summary: Summary, row: Row) -> dict[str, Any]:
    stats = row.stats
    return {
        "prompts": row.prompts,
        "prompt_tokens": row.prompt_tokens,
        "tokens": row.tokens,
        **{key: round(getattr(row, key), 4) for key in ("seconds", "prefill_s", "decode_s")},
        **{key: round(getattr(row, key), 3) for key in ("tokens_per_s", "decode_tokens_per_s")},
        "speedup": round(summary.speedup(row), 4),
        "decode_speedup": round(summary.decode_speedup(row), 4),
        **{key: round(getattr(stats, key), 4) for key in ("tau", "alpha")},
        **{key: getattr(stats, key) for key in ("rounds", "drafted", "accepted")},
        "declined": row.declined,
        "time_s": {key: round(getattr(stats, f"{key}_s"), 4) for key in ("draft", "verify", "host")},
        "compared": row.compared,
        "same_tokens": row.same,
    }


def summary_json(summary: Summary) -> dict[str, Any]:
    """`categories` and `all` hold one object a mode; `differences` names the prompts whose tokens differ."""
    categories: dict[str, dict[str, Any]] = {}
    for row in summary.rows:
        categories.setdefault(row.category, {})[row.mode] = row_json(summary, row)
    whole = categories.pop(ALL)
    differences = [{"prompt": d.prompt, "mode": d.mode, "at_token": d.at} for d in summary.differences]
    about = {"temperature": summary.temperature, "concurrency": summary.concurrency}
    counts = {"prompts": len(summary.prompts), "skipped_prompts": summary.skipped}
    return {**about, **counts, "categories": categories, "all": whole, "differences": differences}


def samples_json(cells: Sequence[Cell], modes: int) -> list[dict[str, Any]]:
    """Every measurement that can be compared. modes: how many there were."""
    return [
        {
            "temperature": cell.temperature,
            "concurrency": cell.concurrency,
            "prompt": prompt.id,
            "mode": sample.mode,
            "repeat": sample.repeat,
            "tokens": len(answer.token_ids),
            "first_token_s": round(answer.first_token_s, 5),
            "total_s": round(answer.total_s, 5),
            "tau": round(answer.stats.tau, 3) if answer.stats else None,
            "alpha": round(answer.stats.alpha, 3) if answer.stats else None,
        }
        for cell in cells
        for sample in cell.comparable(modes)
        for prompt, answer in zip(cell.work.units[sample.unit].prompts, sample.measured.answers, strict=True)
    ]
