"""`slipstream bench`: the same prompts with and without speculation, measured on this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from slipstream.bench import baseline, memory, report, run
from slipstream.bench.load import STREAMS, VOCAB, beside_long_prompts, library
from slipstream.bench.prompts import load_prompts, select
from slipstream.cli.bars import counting_bar
from slipstream.cli.breaking import BreakingOff
from slipstream.cli.capacity import Capacity
from slipstream.cli.loading import loaded, use_threads
from slipstream.cli.machine import busy_warning, hardware, load_before, versions
from slipstream.cli.options import Common
from slipstream.cli.panels import OUTPUT, PROMPTS, option
from slipstream.cli.shared import with_common
from slipstream.cli.show import note
from slipstream.core.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

MEASURING = "Measuring"
TRAFFIC = "Traffic: requests that come at a rate, real or simulated"
DEFAULT_MAX_TOKENS = 128


@with_common
def bench(
    common: Common,
    prompts: Annotated[
        Path | None,
        option(
            metavar="FILE",
            panel=PROMPTS,
            help="JSON lines with 'prompt', or 'turns' and 'category' as in Spec-Bench. Default: our own prompts.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        option(
            metavar="N",
            panel=PROMPTS,
            help="Only N prompts, spread evenly over the categories, such as 14 for a quick look. Default: all.",
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        option(
            metavar="NAME",
            panel=PROMPTS,
            help="Only the prompts of this category, such as code_editing. May be repeated. Default: all.",
        ),
    ] = None,
    concurrency: Annotated[
        int,
        option(
            metavar="N",
            min=1,
            panel=MEASURING,
            help="Requests in flight, such as 8. Above 1, the prompts of a category run together.",
        ),
    ] = 1,
    repeats: Annotated[
        int,
        option(metavar="N", min=1, panel=MEASURING, help="Measure everything so often, such as 3; the median counts."),
    ] = 1,
    peers: Annotated[
        list[str] | None,
        option(
            metavar="NAME",
            panel=MEASURING,
            help="Also run another engine on the same prompts: transformers (its own generate). Default: none.",
        ),
    ] = None,
    long_prompts: Annotated[
        int | None,
        option(
            metavar="TOKENS",
            min=1,
            panel=MEASURING,
            help=f"Only this: {STREAMS} streams run while prompts of this length arrive, such as 6000. Shows the gaps "
            "between tokens and the speed that the streams keep.",
        ),
    ] = None,
    startup: Annotated[
        bool,
        option("--startup", panel=MEASURING, help="Also time a fresh process from its start to the first token."),
    ] = False,
    record: Annotated[
        Path | None,
        option(
            metavar="FILE",
            panel=TRAFFIC,
            help="Keep what passes and drafts cost and what became of every guess, for --simulate. With --planner "
            "fixed it has most of the guesses.",
        ),
    ] = None,
    simulate: Annotated[
        Path | None,
        option(
            metavar="FILE",
            panel=TRAFFIC,
            help="Load no model: let traffic run through engines that behave as recorded, far faster than real time.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        option(
            metavar="R[,R…]",
            panel=TRAFFIC,
            help="Requests a second, coming at random times, such as 0.5 or 1,2,4. Without --simulate: one rate, the "
            "prompts are sent to the real engine so. Default with --simulate: when they came in the recording.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        option(
            metavar="N", min=1, panel=TRAFFIC, help="So many requests. Default: 200 simulated; real: every prompt once."
        ),
    ] = None,
    replicas: Annotated[
        int, option(metavar="N", min=1, panel=TRAFFIC, help="Simulated engines that share the traffic.")
    ] = 1,
    traffic: Annotated[
        Path | None,
        option(
            metavar="FILE",
            panel=TRAFFIC,
            help="Simulate these requests: JSON lines with arrival (seconds), prompt_tokens and output_tokens.",
        ),
    ] = None,
    latency_target: Annotated[
        str,
        option(
            metavar="TARGETS",
            panel=TRAFFIC,
            help="Seconds to the first token and by token after it that a request must keep to be good, such as "
            "ttft=0.5,tpot=0.05. Default: any.",
        ),
    ] = "",
    speculation: Annotated[
        list[str] | None,
        option(
            metavar="HOW", panel=TRAFFIC, help="Simulate off, fixed or planned; may be repeated. Default: all three."
        ),
    ] = None,
    plot: Annotated[
        Path | None, option(metavar="FILE", panel=OUTPUT, help="Draw what was simulated as SVG: a curve a way.")
    ] = None,
    json_file: Annotated[
        Path | None,
        option(
            "--json",
            metavar="FILE",
            panel=OUTPUT,
            help="Everything as JSON too, with every single measurement. - writes it to stdout as the last line, "
            "without them.",
        ),
    ] = None,
) -> None:
    """Measure what speculation brings on this machine.

    Every drafter (repeat --drafter) and plain decoding answer the same prompts in turn. The first table has all
    prompts, the second one each task; --json has the rest. After Ctrl-C they are about the prompts that all had
    answered by then.
    """
    capacity = Capacity(
        simulate, rate, requests, replicas, traffic, latency_target, tuple(speculation or ()), plot, record, json_file
    )
    measuring = {
        "prompts": prompts is not None,
        "limit": limit is not None,
        "category": bool(category),
        "concurrency": concurrency > 1,
        "repeats": repeats > 1,
        "peers": bool(peers),
        "startup": startup,
        "long_prompts": long_prompts is not None,
    }
    capacity.check(common, measuring)
    if simulate is not None:
        from slipstream.cli.traffic import simulate_traffic

        simulate_traffic(common, capacity)
        return
    for peer in peers or ():
        if peer != baseline.NAME:
            raise ConfigError(f"--peers {peer}: unknown; must be {baseline.NAME}")
    drafters = () if common.no_speculation else common.drafters
    params = common.sampling(max_tokens=DEFAULT_MAX_TOKENS)
    chosen = select(load_prompts(prompts), category or (), limit)
    if rate is not None:
        from slipstream.cli.traffic import run_traffic

        run_traffic(common, capacity, chosen, params)
        return

    load = load_before()
    if long_prompts is not None:
        beside_prompts(common, drafters, long_prompts, capacity)
        return
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
            "temperature": params.temperature,
            "seed": params.seed,
            "concurrency": concurrency,
            "repeats": repeats,
            "dtype": common.dtype,
            "device": common.device,
            "draft_tokens": common.draft_tokens,
            "planner": common.planner_or("adaptive"),
            "verifier": common.verifier,
        },
    }
    console = Console()
    with loaded(common, drafters, max_num_seqs=concurrency, prefix_caching=False) as llm, ExitStack() as stack:
        work = run.plan_work(llm, chosen, params, concurrency)
        ours = run.engine_runners(llm, drafters, params.speculation)
        runners: list[run.Runner] = [*ours]
        eos: frozenset[int] = frozenset()
        if peers:
            same = baseline.same_as_ours(
                llm,
                dtype=common.dtype,
                device=common.device,
                batch_size=concurrency,
                trust_remote_code=common.trust_remote_code,
            )
            other = stack.enter_context(baseline.TransformersPeer(same))
            runners, eos = [*runners, other], other.eos_token_ids
        modes = [runner.name for runner in runners]
        samples: list[run.Sample] = []
        breaking = BreakingOff(lambda: run.in_all_modes(samples, len(modes)))
        with breaking:
            if record is None:
                measure_into(samples, work.units, runners, repeats)
            else:
                from slipstream.cli.traffic import Tape

                tape = Tape(llm, common.model, load["busy"])
                measure_into(samples, work.units, runners, repeats, tape.start)
        if record is not None:
            tape.stop().save(record)
            note(f"wrote {record}")
        prefill = None
        if not breaking.happened:
            with breaking:
                reading = [runner for runner in runners if runner.name in (run.PLAIN, baseline.NAME)]
                prefill = run.measure_prefill(run.long_prompt(llm), reading)
                if startup:
                    result["startup_s"] = {"slipstream": run.start_to_first_token(startup_options(common, drafters))}
                    if peers:
                        hello = llm.chat_prompt([{"role": "user", "content": "Say hello."}])
                        result["startup_s"][baseline.NAME] = baseline.start_to_first_token(same, hello)
        used = memory_report(llm, imports)
        result["remarks"] = list(llm.remarks)
    made, samples = len(samples), run.in_all_modes(samples, len(modes))
    units = work.units[: len({sample.unit for sample in samples})]
    rejecting = [runner.name for runner in ours if runner.speculation.verifier == "rejection"]
    incomparable = (baseline.NAME, *rejecting) if not params.greedy else ()
    summary = report.summarize(units, samples, modes, eos=eos, incomparable=incomparable)
    result |= {
        "prompts": sum(len(unit.prompts) for unit in units),
        "skipped_prompts": work.skipped,
        "interrupted": breaking.happened,
        "modes": modes,
        **report.summary_json(summary),
        "prefill": None if prefill is None else prefill.to_json(),
        "memory": used.to_json(),
    }
    for table in report.tables(summary, concurrency):
        console.print(table)
    for line in closing_lines(summary, prefill, used, result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    capacity.write_json(result, samples=report.samples_json(units, samples))
    if breaking.happened:
        asked = sum(len(unit.prompts) for unit in work.units)
        whole_run = len(work.units) * len(modes) * repeats
        told = f"{made} of {whole_run} measurements were made, {result['prompts']} of {asked} prompts in all modes"
        note(told, style="yellow")
        raise typer.Exit(130)


def beside_prompts(common: Common, drafters: tuple[str, ...], length: int, capacity: Capacity) -> None:
    """Streams while long prompts are read: one stream, then several."""
    found = []
    with loaded(common, drafters, max_num_seqs=STREAMS + 1, prefix_caching=False) as llm:
        vocab_size = min(VOCAB, llm.engine.target.vocab_size)
        for streams in (1, STREAMS):
            playing = beside_long_prompts(library(llm), length, streams=streams, prompts=2, vocab_size=vocab_size)
            row = asyncio.run(playing)
            found.append(row)
            print(
                f"{streams} beside prompts of {length} tokens: {row['kept']:.0%} of the speed alone; gap between "
                f"tokens p99 {row['gap_p99_ms']:.0f} ms, longest {row['gap_max_ms']:.0f} ms; first token of a prompt "
                f"after {row['first_ms']:.0f} ms, {row['first_times_alone']:.2f} times its time alone",
                flush=True,
            )
    result = {"command": ["slipstream", *sys.argv[1:]], "model": common.model, "hardware": hardware(), "rows": found}
    capacity.write_json(result)


def measure_into(
    samples: list[run.Sample],
    units: tuple[run.Unit, ...],
    runners: list[run.Runner],
    repeats: int,
    when_warm: Callable[[], None] = lambda: None,
) -> None:
    """Warm up and measure, with a progress bar on stderr if that is a terminal. samples: what is measured, so far."""
    with counting_bar() as progress:
        task = progress.add_task("warming up", total=len(units) * len(runners) * repeats)
        run.warm_up(units[0], runners)
        when_warm()
        done = -1

        def step(category: str, mode: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=f"{category} · {mode}")

        for sample in run.measure(units, runners, repeats, step):
            samples.append(sample)


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
    summary: report.Summary, prefill: run.PrefillReport | None, used: memory.MemoryReport, result: dict[str, Any]
) -> list[str]:
    lines = [*result.get("remarks", ())]
    if any(row.drafted for row in summary.rows):
        lines.append("in all: with the reading of prompts; tau: tokens per pass, the model's own included")
    for row in summary.rows:
        if row.category == report.ALL and row.rounds:
            whole = row.draft_s + row.verify_s + row.host_s or 1.0
            shares = [("draft", row.draft_s), ("verify", row.verify_s), ("host", row.host_s)]
            if row.mode == run.PLAIN:  # nobody drafts: what was timed there is the host's
                shares = [("verify", row.verify_s), ("host", row.draft_s + row.host_s)]
            lines.append(f"time, {row.mode}: " + ", ".join(f"{name} {s / whole:.0%}" for name, s in shares))
            if row.mode != run.PLAIN and not row.drafted:
                lines.append(f"{row.mode}: {report.undrafted(row)}")
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


def startup_options(common: Common, drafters: tuple[str, ...]) -> list[str]:
    """The options that load the same engine in a fresh process."""
    options = ["--model", common.model, "--dtype", common.dtype, "--device", common.device]
    for drafter in drafters or ("none",):
        options += ["--drafter", drafter]
    if common.memory is not None:
        options += ["--memory", common.memory]
    if common.max_model_len is not None:
        options += ["--max-model-len", str(common.max_model_len)]
    if common.planner is not None:
        options += ["--planner", common.planner]
    if common.threads is not None:
        options += ["--threads", str(common.threads)]
    options += ["--no-enable-prefix-caching"] * (common.enable_prefix_caching is False)
    return options + ["--trust-remote-code"] * common.trust_remote_code
