"""From measurements to numbers: rates by category and mode, speed-ups, equality of tokens; as a table and as JSON.

A rate is tokens over seconds, summed over the prompts of a category. Of several repeats the median counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from slipstream.bench.run import PLAIN, Answer, Sample, Unit
from slipstream.core.outputs import parting

ALL = "all"


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
    rounds: int
    emitted: int
    drafted: int
    accepted: int
    declined: int  # rounds without guesses, because they were not expected to pay
    draft_s: float
    verify_s: float
    host_s: float
    compared: int  # prompts whose tokens can be compared with plain decoding's
    same: int  # of these, how many are identical

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first over the seconds after the first."""
        return (self.tokens - self.prompts) / self.decode_s if self.decode_s else 0.0

    @property
    def tau(self) -> float:
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def alpha(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """A prompt whose answer is not plain decoding's, and at which token they part."""

    prompt: str
    mode: str
    at: int


@dataclass(frozen=True, slots=True)
class Summary:
    """All rows: by category, then `all`, modes in the order in which they were given."""

    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]

    def row(self, category: str, mode: str) -> Row:
        return next(row for row in self.rows if row.category == category and row.mode == mode)

    def speedup(self, row: Row, against: str = PLAIN) -> float:
        """How many times as many tokens per second as that mode on the same prompts."""
        base = self.row(row.category, against).tokens_per_s
        return row.tokens_per_s / base if base else 0.0

    def decode_speedup(self, row: Row, against: str = PLAIN) -> float:
        base = self.row(row.category, against).decode_tokens_per_s
        return row.decode_tokens_per_s / base if base else 0.0


def without_end(tokens: Sequence[int], eos: Collection[int]) -> tuple[int, ...]:
    """Engines differ in whether they return the end-of-text token."""
    end = len(tokens)
    while end and tokens[end - 1] in eos:
        end -= 1
    return tuple(tokens[:end])


def median_sample(samples: Sequence[Sample]) -> Sample:
    """The one with the median time; the quicker of the two in the middle."""
    return sorted(samples, key=lambda sample: sample.measured.wall_s)[(len(samples) - 1) // 2]


def summarize(
    units: Sequence[Unit],
    samples: Sequence[Sample],
    modes: Sequence[str],
    *,
    eos: Collection[int] = (),
    incomparable: Collection[str] = (),
) -> Summary:
    """`incomparable` modes draw other random numbers, so their tokens say nothing."""
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
        rounds=sum(s.rounds for s in stats),
        emitted=sum(s.emitted for s in stats),
        drafted=sum(s.drafted for s in stats),
        accepted=sum(s.accepted for s in stats),
        declined=sum(max((d.declined for d in s.by_drafter.values()), default=0) for s in stats),
        draft_s=sum(s.draft_s for s in stats),
        verify_s=sum(s.verify_s for s in stats),
        host_s=sum(s.host_s for s in stats),
        compared=compared,
        same=same,
    )


def undrafted(row: Row) -> str:
    """Why a mode that could guess never did."""
    if not row.declined:
        return "nothing drafted: it never had a guess"
    return (
        f"nothing drafted: its guesses were not expected to pay enough in {row.declined} of "
        f"{row.rounds} rounds; --min-gain says what is enough, --planner fixed guesses all the same"
    )


def tables(summary: Summary, concurrency: int = 1) -> list[Table]:
    """All prompts in one table, and each task in another where there are several."""
    tasks = list(dict.fromkeys(row.category for row in summary.rows if row.category != ALL))
    whole = [row for row in summary.rows if row.category == ALL]
    how = f"{whole[0].prompts} prompts, {concurrency} at a time"
    found = [table(summary, [((), row) for row in whole], f"Plain decoding and drafts: {how}")]
    if len(tasks) > 1:
        rows = [((row.category,), row) for row in summary.rows if row.category != ALL]
        found.append(table(summary, rows, "By task", ("task",)))
    return found


def table(summary: Summary, rows: Sequence[tuple[tuple[str, ...], Row]], title: str, keys: Sequence[str] = ()) -> Table:
    """Narrow enough for 80 columns. keys: columns that say what a row is about, beside its mode; times are against
    plain decoding of the same prompts.
    """
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for key in keys:
        shown.add_column(key, no_wrap=True)
    shown.add_column("mode", overflow="fold", min_width=len("transformers"))
    for column in ("decoding\ntok/s", "times\nplain", "in all\ntok/s", "times\nplain", "tau", "same\ntokens"):
        shown.add_column(column, justify="right", no_wrap=True)
    last: tuple[str, ...] | None = None
    for about, row in rows:
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
            f"{row.tau:.2f}" if row.rounds else "-",
            same if row.mode != PLAIN else "",
        )
        last = about
    return shown


def row_json(summary: Summary, row: Row) -> dict[str, Any]:
    return {
        "prompts": row.prompts,
        "prompt_tokens": row.prompt_tokens,
        "tokens": row.tokens,
        "seconds": round(row.seconds, 4),
        "prefill_s": round(row.prefill_s, 4),
        "decode_s": round(row.decode_s, 4),
        "tokens_per_s": round(row.tokens_per_s, 3),
        "decode_tokens_per_s": round(row.decode_tokens_per_s, 3),
        "speedup": round(summary.speedup(row), 4),
        "decode_speedup": round(summary.decode_speedup(row), 4),
        "tau": round(row.tau, 4),
        "alpha": round(row.alpha, 4),
        "rounds": row.rounds,
        "drafted": row.drafted,
        "accepted": row.accepted,
        "declined": row.declined,
        "time_s": {"draft": round(row.draft_s, 4), "verify": round(row.verify_s, 4), "host": round(row.host_s, 4)},
        "compared": row.compared,
        "same_tokens": row.same,
    }


def summary_json(summary: Summary) -> dict[str, Any]:
    """`categories` and `all` hold one object a mode; `differences` names the prompts behind unequal counts."""
    categories: dict[str, dict[str, Any]] = {}
    for row in summary.rows:
        categories.setdefault(row.category, {})[row.mode] = row_json(summary, row)
    whole = categories.pop(ALL)
    differences = [{"prompt": d.prompt, "mode": d.mode, "at_token": d.at} for d in summary.differences]
    return {"categories": categories, "all": whole, "differences": differences}


def samples_json(units: Sequence[Unit], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Every single measurement, for those who want to compute something else."""
    return [
        {
            "prompt": prompt.id,
            "mode": sample.mode,
            "repeat": sample.repeat,
            "tokens": len(answer.token_ids),
            "first_token_s": round(answer.first_token_s, 5),
            "total_s": round(answer.total_s, 5),
            "tau": round(answer.stats.tau, 3) if answer.stats else None,
            "alpha": round(answer.stats.alpha, 3) if answer.stats else None,
        }
        for sample in samples
        for prompt, answer in zip(units[sample.unit].prompts, sample.measured.answers, strict=True)
    ]
