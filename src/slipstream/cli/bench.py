"""`slipstream bench`: the same prompts with and without drafts, by task, temperature and number of requests at once."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from slipstream.bench import baseline, memory, report, run, traffic
from slipstream.bench.load import STREAMS, VOCAB, beside_long_prompts, library
from slipstream.bench.prompts import BenchPrompt, load_prompts, select
from slipstream.bench.traffic import Outcome, Targets
from slipstream.cli.loading import loaded, use_threads
from slipstream.cli.measuring import StopOnInterrupt, busy_warning, counting_bar, hardware, load_before, versions
from slipstream.cli.options import OF_REQUESTS, Common, check_written, differing, whole_numbers, with_options
from slipstream.cli.show import note
from slipstream.core.errors import ConfigError
from slipstream.core.interpreter import rarely_searched
from slipstream.core.params import MAX_TEMPERATURE, SamplingParams
from slipstream.core.settings import setting
from slipstream.drafters import merged_name, parse_merged

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

DEFAULT_MAX_TOKENS = 128
_KEEPS_UP = 0.8
"""Share of the requested rate below which the machine is called full. It is less than 1 since the last answers take
their time on an idle machine, too."""
_ELSEWHERE = "measured in a run of its own; leave one of them out"
_MADE_UP = "its prompts are random tokens of that length; leave it out"
_ENDLESS = "its answers are greedy and have no end; leave it out"
_NOT_WITH: Mapping[str, Mapping[str, str]] = {
    "--long-prompts": {
        **dict.fromkeys(("rate", "requests", "latency_target", "peers", "startup", "repeats"), _ELSEWHERE),
        **dict.fromkeys(("prompts", "limit", "category"), _MADE_UP),
        **dict.fromkeys(OF_REQUESTS, _ENDLESS),
        "concurrency": f"1 and {STREAMS} streams are measured; leave it out",
    },
    "--rate": {
        **dict.fromkeys(("peers", "startup"), _ELSEWHERE),
        "concurrency": "--rate says when requests come, however many run; leave it out",
        "repeats": "requests come once; give --requests N for more of them",
    },
}
"""By mode, the options that it cannot honour, and what to do instead."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `slipstream bench` alone.

    prompts: JSON lines with 'prompt', or 'turns' and 'category' as in Spec-Bench. Default: our own prompts.
    limit: Only N prompts, spread evenly over the categories, such as 14 for a quick look. Default: all.
    category: Only the prompts of this category, such as code_editing. May be repeated. Default: all.
    temperature: 0 always takes the likeliest token; 1 is the model as trained. Several are measured in turn: 0,1.
    concurrency: Requests at once, all of one category. Several are measured in turn: 1,8,32.
    repeats: Measure everything N times, such as 3; the median counts.
    peers: Also run another engine on the same prompts: transformers (its own generate). Default: none.
    long_prompts: Only this: 8 streams run while prompts of this length arrive, such as 6000. Shows the gaps between
        tokens and the speed that the streams keep.
    startup: Also time a fresh process from its start to the first token.
    rate: Only this: send the prompts at random times, R requests a second, such as 0.5. Several are measured in turn:
        1,2,4.
    requests: Send N requests. Default: every prompt once.
    latency_target: Seconds to the first token, and for each token after it, within which a request counts as good, such
        as ttft=0.5,tpot=0.05. Default: any.
    json_file: Write everything as JSON too, with every single measurement. - writes it to stdout as the last line,
        without them.
    """

    prompts: Path | None = setting(Path, None, metavar="FILE", panel="prompts")
    limit: int | None = setting(int, None, metavar="N", panel="prompts")
    category: list[str] | None = setting(str, None, many=True, metavar="NAME", panel="prompts")
    temperature: str = setting(str, "0", metavar="T[,T…]", short="-t", panel="sampling")
    concurrency: str = setting(str, "1", metavar="N[,N…]", panel="measuring")
    repeats: int = setting(int, 1, low=1, metavar="N", panel="measuring")
    peers: list[str] | None = setting(str, None, many=True, metavar="NAME", panel="measuring")
    long_prompts: int | None = setting(int, None, low=1, metavar="TOKENS", panel="measuring")
    startup: bool = setting(bool, False, flag="--startup", panel="measuring")
    rate: str | None = setting(str, None, metavar="R[,R…]", panel="traffic")
    requests: int | None = setting(int, None, low=1, metavar="N", panel="traffic")
    latency_target: str = setting(str, "", metavar="TARGETS", panel="traffic")
    json_file: Path | None = setting(Path, None, metavar="FILE", flag="--json", panel="output")


@with_options
def bench(
    common: Common,
    own: BenchOptions,
) -> None:
    """Measure what speculation brings on this machine.

    Plain decoding and every drafter (repeat --drafter) answer the same prompts in turn. The first table has all
    prompts, the second one each task: where several temperatures or numbers of requests are given, it shows at which
    of them drafting pays. After Ctrl-C the tables have the prompts that every mode had answered.
    """
    temperatures, levels = _temperatures(own.temperature), whole_numbers("--concurrency", own.concurrency, "1,8,32")
    given = common.given | differing(own)
    drafters = () if common.no_speculation else common.drafters
    rates, targets = _rates(own.rate), Targets.parse(own.latency_target)
    check_written({"json": own.json_file})
    for mode, chosen in (("--long-prompts", own.long_prompts is not None), ("--rate", own.rate is not None)):
        if chosen:
            _refuse(mode, given, drafters, temperatures)
    for name in ("requests", "latency_target"):
        if name in given and own.rate is None:
            raise ConfigError(f"--{name.replace('_', '-')}: only for traffic; give --rate R, too")
    for peer in own.peers or ():
        if peer != baseline.NAME:
            raise ConfigError(f"--peers {peer}: unknown; must be {baseline.NAME}")
        for name in common.asked.keys() - set(baseline.SETTINGS):
            raise ConfigError(f"--{name.replace('_', '-')} with --peers: {peer} does not get it; leave one of them out")
    if common.seed is None and any(temperatures):
        common = common.asking(seed=secrets.randbits(32))
    by_temperature = {t: common.asking(temperature=t).sampling(max_tokens=DEFAULT_MAX_TOKENS) for t in temperatures}
    params = by_temperature[temperatures[0]]
    if own.long_prompts is not None:
        beside_prompts(common, drafters, own.long_prompts, own.json_file)
        return
    picked = select(load_prompts(own.prompts), own.category or (), own.limit)
    if own.rate is not None:
        at_rates(common, drafters, picked, params, rates, own.requests, targets, own.json_file)
        return

    load = load_before()
    use_threads(common.threads)
    imports = memory.rss_after_imports()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["slipstream", *sys.argv[1:]],
        "model": common.model,
        "versions": versions(),
        "hardware": {**hardware(), **load},
        "settings": {
            "max_tokens": params.max_tokens,
            "temperature": temperatures,
            "seed": params.seed,
            "concurrency": levels,
            "repeats": own.repeats,
            "dtype": common.dtype,
            "device": common.device,
            "draft_tokens": common.draft_tokens,
            "planner": common.planner_or("adaptive"),
            "verifier": common.verifier,
        },
    }
    with loaded(common, drafters, max_num_seqs=max(levels), prefix_caching=False) as llm, ExitStack() as stack:
        cells = [
            run.Cell(t, n, run.plan_work(llm, picked, own, n)) for t, own in by_temperature.items() for n in levels
        ]
        ours = run.engine_runners(llm, drafters, params.speculation)
        runners: list[run.Runner] = [*ours]
        eos: frozenset[int] = frozenset()
        if own.peers:
            same = baseline.same_as_ours(
                llm, dtype=common.dtype, device=common.device, trust_remote_code=common.trust_remote_code
            )
            other = stack.enter_context(baseline.TransformersPeer(same))
            runners, eos = [*runners, other], other.eos_token_ids
        modes = [runner.name for runner in runners]
        stopping = StopOnInterrupt(lambda: any(cell.comparable(len(modes)) for cell in cells))
        with stopping:
            measure_into(cells, runners, own.repeats)
        prefill = None
        if not stopping.happened:
            with stopping:
                reading = [runner for runner in runners if runner.name in (run.PLAIN, baseline.NAME)]
                prefill = run.measure_prefill(run.long_prompt(llm), reading)
                if own.startup:
                    result["startup_s"] = {"slipstream": run.start_to_first_token(startup_options(common, drafters))}
                    if own.peers:
                        hello = llm.chat_prompt([{"role": "user", "content": "Say hello."}])
                        result["startup_s"][baseline.NAME] = baseline.start_to_first_token(same, hello)
        used = memory_report(llm, imports)
        result["remarks"] = list(llm.remarks)
    rejecting = [runner.name for runner in ours if runner.speculation.verifier == "rejection"]
    summaries = [
        report.summarize_cell(cell, modes, eos=eos, sampled_apart=(baseline.NAME, *rejecting))
        for cell in cells
        if cell.comparable(len(modes))
    ]
    result |= {
        "prompts": len({prompt for summary in summaries for prompt in summary.prompts}),
        "skipped_prompts": max(cell.work.skipped for cell in cells),
        "interrupted": stopping.happened,
        "modes": modes,
        "cells": [report.summary_json(summary) for summary in summaries],
        "prefill": None if prefill is None else prefill.to_json(),
        "memory": used.to_json(),
    }
    console = Console()
    for table in report.tables(summaries):
        console.print(table)
    for line in closing_lines(summaries, prefill, used, result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    write_json(own.json_file, result, samples=report.samples_json(cells, len(modes)))
    if stopping.happened:
        made, whole = sum(len(cell.samples) for cell in cells), sum(len(cell.work.units) for cell in cells)
        compared = sum(
            row.prompts for one in summaries for row in one.rows if (row.category, row.mode) == (report.ALL, run.PLAIN)
        )
        asked = sum(len(unit.prompts) for cell in cells for unit in cell.work.units)
        note(
            f"{made} of {whole * len(modes) * own.repeats} measurements were made, {compared} of {asked} prompts in "
            "all modes",
            style="yellow",
        )
        raise typer.Exit(130)


def _temperatures(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part]
    except ValueError:
        found = []
    if not found or not all(0 <= one <= MAX_TEMPERATURE for one in found):
        raise ConfigError(f"--temperature {text}: must be 0 (greedy) to {MAX_TEMPERATURE:g}, or several such as 0,1")
    return list(dict.fromkeys(found))


def _rates(text: str | None) -> list[float]:
    try:
        rates = [float(part) for part in (text or "").split(",") if part]
    except ValueError:
        rates = [0.0]
    if any(not 0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"--rate {text}: must be requests a second above 0, such as 0.5 or 1,2,4")
    return rates


def _refuse(mode: str, given: Collection[str], drafters: Sequence[str], temperatures: Sequence[float]) -> None:
    for name, remedy in _NOT_WITH[mode].items():
        if name in given:
            raise ConfigError(f"--{name.replace('_', '-')} with {mode}: {remedy}")
    if len(drafters) > 1:
        raise ConfigError(f"--drafter {drafters[1]} with {mode}: one is measured in a run; name one, or A+B")
    if len(temperatures) > 1:
        raise ConfigError(f"--temperature {temperatures[1]:g} with {mode}: one is measured in a run; give one")


def beside_prompts(common: Common, drafters: Sequence[str], length: int, json_file: Path | None) -> None:
    """Streams while long prompts are read: one stream, then several."""
    load, found = load_before(), []
    with loaded(common, drafters, max_num_seqs=STREAMS + 1, prefix_caching=False) as llm:
        vocab_size = min(VOCAB, llm.engine.target.vocab_size)
        for streams in (1, STREAMS):
            playing = beside_long_prompts(library(llm), length, streams=streams, prompts=2, vocab_size=vocab_size)
            row = asyncio.run(playing)
            found.append(row)
            print(
                f"streams: {streams}, beside prompts of {length} tokens: {row['kept']:.0%} of the speed alone; "
                f"gap between tokens p99 {row['gap_p99_ms']:.0f} ms, longest {row['gap_max_ms']:.0f} ms; "
                f"first token of a prompt after {row['first_ms']:.0f} ms, "
                f"{row['first_times_alone']:.2f} times its time alone",
                flush=True,
            )
        remarks = list(llm.remarks)
    for line in (*remarks, *busy_warning(load)):
        print(line, flush=True)
    result = {"command": ["slipstream", *sys.argv[1:]], "model": common.model, "hardware": {**hardware(), **load}}
    write_json(json_file, {**result, "remarks": remarks, "rows": found})


def at_rates(
    common: Common,
    drafters: Sequence[str],
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    rates: Sequence[float],
    requests: int | None,
    targets: Targets,
    json_file: Path | None,
) -> None:
    """The prompts at random times, at each rate in turn, to an engine that is set up as a server's."""
    load, outcomes = load_before(), []
    with loaded(common, drafters, prefix_caching=False, warm_up=True) as llm, rarely_searched():
        work = run.plan_work(llm, prompts, params, 1)
        own = params.speculation
        if drafters:
            own = replace(own, drafter=merged_name(parse_merged(drafters[0])))
        ids = [unit.token_ids[0] for unit in work.units]
        each = [replace(unit.params[0], speculation=own) for unit in work.units]
        count = requests or len(ids)
        turns = [i % len(ids) for i in range(count)]
        llm.generate([{"prompt_token_ids": list(ids[0])}], replace(each[0], max_tokens=32))
        for rate in rates:
            times = traffic.poisson_times(rate, count, common.seed or 0)
            with counting(f"requests answered, {rate:g} a second", count) as on_served:
                served = traffic.send(llm, [ids[i] for i in turns], [each[i] for i in turns], times, on_served)
            outcomes.append((rate, Outcome.of(served, targets)))
        remarks = list(llm.remarks)
    console, way = Console(), drafters[0] if drafters else "off"
    console.print(report.traffic_table(outcomes, way))
    full = [_full(way, rate, outcome) for rate, outcome in outcomes if _is_full(rate, outcome)]
    for line in (*full, *remarks, *busy_warning(load)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    rows = [{"rate": rate, "speculation": way, **asdict(outcome)} for rate, outcome in outcomes]
    about = {"model": common.model, "seed": params.seed, **load, "remarks": remarks}
    write_json(json_file, {**about, "latency_target": asdict(targets), "rows": rows})


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of requests. It is redrawn only when requests end: a redrawing thread would disturb the timing."""
    with counting_bar(auto_refresh=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda more: bar.update(task, advance=more, refresh=True)


def _is_full(rate: float, outcome: Outcome) -> bool:
    """Whether requests came faster than they were served, so that latencies grow with the length of the run.

    Then fewer are served than come, and half of them wait for a quarter of the time in which all came, or more.
    """
    return outcome.requests_per_s < _KEEPS_UP * rate and outcome.ttft.p50 > outcome.requests / rate / 4


def _full(way: str, rate: float, outcome: Outcome) -> str:
    served = f"only {outcome.requests_per_s:.2g} were served a second, and the others wait ever longer"
    return f"{way}, {rate:g} a second: {served}"


def measure_into(cells: Sequence[run.Cell], runners: Sequence[run.Runner], repeats: int) -> None:
    """Warm up and measure cell by cell, with a progress bar on stderr; adds to the samples of the cells."""
    with counting_bar() as progress:
        units = sum(len(cell.work.units) for cell in cells)
        task = progress.add_task("warming up", total=units * len(runners) * repeats)
        done = -1

        def step(category: str, mode: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=f"{category} · {mode}")

        for cell in cells:
            run.warm_up(cell.work.units[0], runners)
            for sample in run.measure(cell.work.units, runners, repeats, step):
                cell.samples.append(sample)


def memory_report(llm: LLM, imports: int) -> memory.MemoryReport:
    plan = llm.memory_plan
    return memory.MemoryReport(
        imports=imports,
        peak=memory.peak_rss(),
        weights=plan.weights_bytes,
        draft_weights=plan.draft_weights_bytes,
        cache=plan.cache_bytes,
        device_peak=memory.device_peak(),
    )


def closing_lines(
    summaries: Sequence[report.Summary],
    prefill: run.PrefillReport | None,
    used: memory.MemoryReport,
    result: Mapping[str, Any],
) -> list[str]:
    lines = [*result.get("remarks", ())]
    if any(row.stats.drafted for summary in summaries for row in summary.rows):
        lines.append("in all: with the reading of prompts; tau: tokens per pass, the model's own included")
    for summary in summaries:
        where = f"{summary.title}, " if len(summaries) > 1 else ""
        for row in summary.rows:
            if row.category != report.ALL or not row.stats.rounds:
                continue
            if len(summaries) == 1:
                lines.append(f"time, {row.mode}: {_shares(row)}")
            if row.mode != run.PLAIN and not row.stats.drafted:
                lines.append(f"{where}{row.mode}: {report.undrafted(row)}")
    if prefill is not None:
        rates = ", ".join(f"{name} {rate:.0f} tok/s" for name, rate in prefill.tokens_per_s.items())
        lines.append(f"reading a prompt of {prefill.prompt_tokens} tokens: {rates}")
    lines.append(
        f"memory: {used.used / 2**20:.0f} MiB used for {used.planned / 2**20:.0f} MiB of weights and cache: "
        f"{used.ratio:.2f}x (imports alone: {used.imports / 2**20:.0f} MiB)"
    )
    for name, seconds in result.get("startup_s", {}).items():
        lines.append(f"start to first token, {name}: {seconds:.1f} s")
    if result["skipped_prompts"]:
        lines.append(f"{result['skipped_prompts']} prompts were too long for the model and left out")
    return [*lines, *busy_warning(result["hardware"])]


def _shares(row: report.Row) -> str:
    stats = row.stats
    whole = stats.draft_s + stats.verify_s + stats.host_s or 1.0
    shares = [("draft", stats.draft_s), ("verify", stats.verify_s), ("host", stats.host_s)]
    if row.mode == run.PLAIN:  # plain decoding drafts nothing: the time before its passes is the host's
        shares = [("verify", stats.verify_s), ("host", stats.draft_s + stats.host_s)]
    return ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in shares)


def write_json(file: Path | None, result: Mapping[str, Any], **more: Any) -> None:
    """Write the result as --json says: to stdout as one line, or to a file with `more`."""
    if file == Path("-"):
        print(json.dumps(result, ensure_ascii=False), flush=True)
    elif file is not None:
        file.write_text(json.dumps({**result, **more}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def startup_options(common: Common, drafters: Sequence[str]) -> list[str]:
    """The options that load the same engine in a fresh process."""
    options = ["--model", common.model, "--dtype", common.dtype, "--device", common.device]
    for drafter in drafters or ("none",):
        options += ["--drafter", drafter]
    for name in ("memory", "max_model_len", "planner"):
        if name in common.engine:
            options += [f"--{name.replace('_', '-')}", str(common.engine[name])]
    if common.threads is not None:
        options += ["--threads", str(common.threads)]
    options += ["--no-enable-prefix-caching"] * (common.engine.get("prefix_caching") is False)
    return options + ["--trust-remote-code"] * common.trust_remote_code
