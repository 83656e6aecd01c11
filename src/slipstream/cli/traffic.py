"""Traffic of `slipstream bench`: requests that come at a rate, to the real engine or to recorded ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from rich.console import Console
from rich.table import Table

from slipstream.bench import live, traffic
from slipstream.bench.deciding import with_planning
from slipstream.bench.outcome import Outcome, Served, Speculation
from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.recorder import Recorder
from slipstream.bench.recording import Recording
from slipstream.bench.replica import Setting
from slipstream.bench.run import plan_work
from slipstream.bench.simulate import doubts, drafters_of, simulate, traces_of
from slipstream.cli.bars import counting_bar
from slipstream.cli.capacity import Capacity
from slipstream.cli.loading import loaded
from slipstream.cli.machine import busy_warning, load_before
from slipstream.cli.options import Common
from slipstream.cli.show import note
from slipstream.core.errors import ConfigError
from slipstream.core.params import SamplingParams
from slipstream.core.responsive import rarely_searched
from slipstream.drafters import merged_name, parse_merged
from slipstream.train.plot import Panel, draw

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.engine.llm import LLM

Found = TypeVar("Found")
SIMULATED_REQUESTS = 200
_KEEPS_UP = 0.8
"""Of the rate that is asked for: the last requests take a while to be answered, however idle the machine is."""


class Rounds(Protocol):
    """What a tape needs of an `LLM`."""

    engine: Engine

    def between_rounds(self, look: Callable[[Engine], Found]) -> Found: ...


class Tape:
    """A recorder on the engine's thread, from `start` to `stop`."""

    def __init__(self, llm: Rounds, model: str, busy: bool) -> None:
        """busy: see `recording.Made`."""
        self._llm, self._model, self._busy = llm, model, busy
        self._recorder = Recorder(llm.engine)
        self._alone_s: list[float] = []

    def start(self, *, all_guesses: bool = True) -> None:
        """all_guesses: also those of drafters that the planner lets rest."""
        self._llm.between_rounds(lambda engine: engine.listen(self._recorder, all_guesses=all_guesses))

    def rehearse(self, send: Callable[[Sequence[float], int], Sequence[Served]], *, crowds: bool) -> None:
        """See `traffic.rehearse`. What is asked is no traffic, though what it costs counts."""
        before = self._recorder.requests
        drafts = bool(self._llm.engine.drafting.on_device)
        self._alone_s.append(traffic.rehearse(send, drafts=drafts, crowds=crowds))
        self._llm.between_rounds(lambda _: self._recorder.forget_requests(since=before))

    def pause(self) -> None:
        """Until it is started again."""
        self._llm.between_rounds(lambda engine: engine.listen(None))

    def stop(self) -> Recording:
        """What was recorded: nobody listens any more."""
        self.pause()
        return self._recorder.recording(self._model, busy=self._busy, alone_s=self._alone_s)


@contextmanager
def counting(what: str, total: int, *, timed: bool = False) -> Iterator[Callable[[int], None]]:
    """Counts requests in a bar on stderr, if that is a terminal; call it with how many more there are.

    timed: what is counted is being timed, so that the bar moves only with it and has no thread of its own.
    """
    with counting_bar(auto_refresh=not timed) as bar:
        task = bar.add_task(what, total=total)
        yield lambda more: bar.update(task, advance=more, refresh=timed)


def run_traffic(common: Common, capacity: Capacity, prompts: Sequence[BenchPrompt], params: SamplingParams) -> None:
    """The prompts, at this rate, to the real engine."""
    drafters = () if common.no_speculation else common.drafters
    load = load_before()
    with loaded(common, drafters, prefix_caching=False, warm_up=True) as llm, rarely_searched():  # as a server's engine
        work = plan_work(llm, prompts, params, 1)
        own = params.speculation
        if drafters:
            own = replace(own, drafter=merged_name(parse_merged(drafters[0])))
        ids = [unit.token_ids[0] for unit in work.units]
        each = [replace(unit.params[0], speculation=own) for unit in work.units]
        count = capacity.requests or len(ids)
        llm.generate([{"prompt_token_ids": list(ids[0])}], replace(each[0], max_tokens=32))
        tape = Tape(llm, common.model, load["busy"])
        send = _sender(llm, ids, replace(each[0], max_tokens=32))
        if capacity.record is not None:
            tape.start()
            tape.rehearse(send, crowds=True)
        times = traffic.poisson_times(capacity.rates[0], count, common.seed or 0)
        turns = [i % len(ids) for i in range(count)]
        with counting("requests answered", count, timed=True) as on_served, _kept_only_whole(capacity.record):
            served = live.send(llm, [ids[i] for i in turns], [each[i] for i in turns], times, on_served)
        if capacity.record is not None:
            tape.rehearse(send, crowds=False)
            recording = tape.stop()
            recording.save(capacity.record)  # whatever becomes of the rest
            if (whole := with_planning(recording)) is not recording:
                whole.save(capacity.record)
            note(f"wrote {capacity.record}")
    way = drafters[0] if drafters else "off"
    row = Row(capacity.rates[0], 1, way, Outcome.of(served, capacity.targets))
    tell([row], capacity, {"model": common.model, "simulated": False, **load})


@contextmanager
def _kept_only_whole(record: Path | None) -> Iterator[None]:
    """Say what becomes of a recording where somebody breaks the traffic off."""
    try:
        yield
    except KeyboardInterrupt:
        if record is not None:
            note(f"{record} is not written: a recording is of all requests (--requests N for fewer)")
        raise


def _sender(
    llm: LLM, ids: Sequence[Sequence[int]], params: SamplingParams
) -> Callable[[Sequence[float], int], list[Served]]:
    """For a rehearsal: answers to requests that come then, with drafts of so many nodes."""
    usual = params.speculation

    def send(times: Sequence[float], nodes: int) -> list[Served]:
        own = replace(params, speculation=replace(usual, enabled=bool(nodes), draft_tokens=nodes or usual.draft_tokens))
        return live.send(llm, [ids[i % len(ids)] for i in range(len(times))], [own] * len(times), times)

    return send


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: what a way of speculating came to at a rate. rate: None: as recorded."""

    rate: float | None
    replicas: int
    way: str
    outcome: Outcome


def simulate_traffic(common: Common, capacity: Capacity) -> None:
    """The same traffic through recorded engines, off, fixed and planned."""
    assert capacity.simulate is not None
    recording = Recording.load(capacity.simulate)
    if not recording.traces:
        raise ConfigError(f"--simulate {capacity.simulate}: no request was recorded to its end; record a longer run")
    known = drafters_of(recording)
    if common.drafter and not common.drafters:
        raise ConfigError("--drafter none with --simulate: simulate it by --speculation off")
    if len(common.drafters) > 1:
        raise ConfigError(f"--drafter {common.drafters[1]} with --simulate: one is simulated at a time; name one")
    named = merged_name(parse_merged(common.drafter[0])) if common.drafter else None
    if named is not None and named not in known:
        raise ConfigError(
            f"--drafter {named}: not in the recording, which has {', '.join(known) or 'none'}; record it (--record)"
        )
    drafter = named or (known[0] if known else None)
    ways = capacity.speculation or (("off", "fixed", "planned") if drafter else ("off",))
    if drafter is None and set(ways) != {"off"}:
        raise ConfigError(f"--speculation {ways[0]}: nobody drafted in the recording; record with a --drafter")
    traces, seed = traces_of(recording, drafter), common.seed or 0
    begun = time.perf_counter()
    rows = []
    for rate in capacity.rates or (None,):
        if capacity.traffic is not None:
            coming = traffic.read_traffic(capacity.traffic, traces, seed, rate)
        elif rate is None:
            coming = traffic.replay(traces)
        else:
            coming = traffic.poisson(rate, capacity.requests or SIMULATED_REQUESTS, traces, seed)
        for way in ways:
            setting = Setting(cast(Speculation, way), drafter, common.draft_tokens, common.min_gain or 1.0)
            own_times = "as recorded" if capacity.traffic is None else "as in the file"
            at = own_times if rate is None else f"{rate:g} a second"
            with counting(f"simulating {at}, {way}", len(coming)) as on_served:
                served = simulate(
                    recording, setting, coming, traces, replicas=capacity.replicas, seed=seed, on_served=on_served
                )
            rows.append(Row(rate, capacity.replicas, way, Outcome.of(served, capacity.targets)))
    doubted = doubts(recording, drafter, together=bool(capacity.rates) or capacity.traffic is not None)
    more = {
        "model": recording.model,
        "simulated": True,
        "drafter": drafter,
        "simulated_s": sum(row.outcome.seconds for row in rows),
        "took_s": round(time.perf_counter() - begun, 3),
        "doubts": doubted,
    }
    tell(rows, capacity, more)
    for doubt in doubted:
        note(f"not sure: {doubt}", style="yellow")


def tell(rows: Sequence[Row], capacity: Capacity, more: dict[str, Any]) -> None:
    """Table, plot, and JSON as the last line."""
    console = Console()
    console.print(table(rows, "recorded" if capacity.traffic is None else "as in file"))
    for line in [line for row in rows for line in full_lines(row)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if more["simulated"]:
        line = f"{more['simulated_s']:.0f} s of traffic simulated in {more['took_s']:.1f} s"
        console.print(line, markup=False, highlight=False)
    else:
        for line in busy_warning(more):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if capacity.plot is not None:
        capacity.plot.write_text(drawn(rows), encoding="utf-8")
        note(f"wrote {capacity.plot}")
    result = {**more, "latency_target": asdict(capacity.targets), "rows": [_json(row) for row in rows]}
    capacity.write_json(result)


def full_lines(row: Row) -> list[str]:
    """Where requests come faster than they are served: of latencies that grow as long as it goes on.

    Half of them wait for a quarter of the time in which all came, or more, and fewer are served than come.
    """
    if row.rate is None:
        return []
    served, all_came_s = row.outcome.requests_per_s, row.outcome.requests / row.rate
    if served >= _KEEPS_UP * row.rate or row.outcome.ttft.p50 <= all_came_s / 4:
        return []
    return [
        f"{row.way}, {row.rate:g} a second: only {served:.2g} were served a second, and the others wait ever longer"
    ]


def table(rows: Sequence[Row], times: str = "recorded") -> Table:
    """Narrow enough for 80 columns; the JSON has more percentiles. times: where no rate is asked for, whose."""
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    if rows[0].replicas > 1:
        shown.title, shown.title_justify = f"{rows[0].replicas} replicas", "left"
    for name in ("rate/s", "speculation", "good/s", "good", "tok/s", "ttft p50", "p99", "tpot p50", "p99", "tau"):
        shown.add_column(name, justify="left" if name == "speculation" else "right", no_wrap=name != "speculation")
    for row in rows:
        out = row.outcome
        shown.add_row(
            times if row.rate is None else f"{row.rate:g}",
            row.way,
            f"{out.goodput:.2f}",
            f"{out.good:.0%}",
            f"{out.tokens_per_s:.1f}",
            *(f"{seconds:.2f} s" for seconds in (out.ttft.p50, out.ttft.p99)),
            *(f"{1000 * seconds:.1f} ms" for seconds in (out.tpot.p50, out.tpot.p99)),
            f"{out.tau:.2f}",
        )
    return shown


def drawn(rows: Sequence[Row]) -> str:
    """Goodput and latencies by the rate, a curve for every way of speculating."""
    panels: tuple[tuple[str, Callable[[Outcome], float]], ...] = (
        ("good requests a second, by requests a second", lambda out: out.goodput),
        ("time to first token, median, s", lambda out: out.ttft.p50),
        ("time of a token, median, ms", lambda out: 1000 * out.tpot.p50),
    )
    ways = dict.fromkeys(row.way for row in rows)
    return draw(
        [
            Panel(
                title,
                {way: [(row.rate or 0.0, value(row.outcome)) for row in rows if row.way == way] for way in ways},
                {row.rate: f"{row.rate:g}" for row in rows if row.rate is not None},
                from_zero=True,
            )
            for title, value in panels
        ],
        f"simulated traffic, {rows[0].replicas} replica{'s' if rows[0].replicas > 1 else ''}",
    )


def _json(row: Row) -> dict[str, Any]:
    return {"rate": row.rate, "replicas": row.replicas, "speculation": row.way, **asdict(row.outcome)}
