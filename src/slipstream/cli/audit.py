"""`slipstream audit`: shows on this machine that speculation changes the speed and nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from slipstream.audit import report
from slipstream.audit.report import Audit, Check, Outcome
from slipstream.bench.prompts import BenchPrompt, load_prompts, select
from slipstream.cli.loading import loaded
from slipstream.cli.measuring import hardware, versions
from slipstream.cli.options import Common, check_written, with_options
from slipstream.core.errors import CapacityError, ConfigError
from slipstream.core.params import SamplingParams
from slipstream.core.settings import setting
from slipstream.drafters import merged_name, parse_merged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.audit.run import AuditConfig
    from slipstream.audit.run import Progress as Listener
    from slipstream.audit.stage import AuditPrompt, Stage
    from slipstream.engine.llm import LLM

DEFAULT_MAX_TOKENS = 64
DEFAULT_LIMIT = 14  # two of each category of our own


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The options of `slipstream audit` alone.

    prompts: Your own prompts: JSON lines with 'prompt', or 'turns' as in Spec-Bench. Default: some of ours.
    limit: Only N prompts, spread evenly over the categories. Default: 14 of ours, all of a FILE.
    concurrency: Requests in a batch. Every check is made alone and in a batch; with 1 only alone.
    samples: Answers to draw with each drafter for the test of rejection sampling, the verifier that keeps the
        distribution instead of the tokens, such as 4096 for a sharper test; 0 for none.
    strict: Let near-ties, which rounding explains, fail the audit too.
    no_transformers: Do not load the model a second time to compare logits with transformers' own.
    out: Write audit.md and audit.json there; made if it is not there.
    json_file: Write the report as JSON to this file.
    markdown_file: Write the report as Markdown to this file.
    """

    prompts: Path | None = setting(Path, None, metavar="FILE", panel="prompts")
    limit: int | None = setting(int, None, metavar="N", panel="prompts")
    concurrency: int = setting(int, 8, low=1, metavar="N", panel="checking")
    samples: int = setting(int, 256, low=0, metavar="N", panel="checking")
    strict: bool = setting(bool, False, flag="--strict", panel="checking")
    no_transformers: bool = setting(bool, False, flag="--no-transformers", panel="checking")
    out: Path | None = setting(Path, None, metavar="FOLDER", panel="output")
    json_file: Path | None = setting(Path, None, metavar="FILE", flag="--json", panel="output")
    markdown_file: Path | None = setting(Path, None, metavar="FILE", flag="--markdown", panel="output")


@with_options
def audit(
    common: Common,
    own: AuditOptions,
) -> None:
    """Show that speculation is lossless with your model, your drafters, on your machine.

    Decodes prompts plainly, one by one, then with every --drafter (may be repeated), alone and in a batch: greedy, and
    sampled for the same seeds (at temperature 1, without and with top-p; or as --temperature, --top-p, --top-k and
    --min-p say; with --temperature 0 nothing is sampled). Every token must be the same. Where one differs, the margin
    between the two tokens tells a tie that rounding decides from a bug. Also compares the cache that speculation leaves
    behind with a fresh prompt, and with transformers, and tests whether rejection sampling draws from the model's
    distribution.

    Exit status: 0 every requested check ran and passed; 1 a check failed or could not run; 2 a bad option; 130 stopped
    by Ctrl-C. The verdict names what was not tested; the report is written in any case. The last line on stdout is the
    report as JSON.
    """
    if common.no_speculation:
        raise ConfigError("--no-speculation: an audit is about speculation; name drafters with --drafter")
    if common.verifier != "exact":
        raise ConfigError(f"--verifier {common.verifier}: an audit checks both verifiers by itself; leave it out")
    files = report_files(own.out, own.json_file, own.markdown_file)
    chosen = select(
        load_prompts(own.prompts), (), DEFAULT_LIMIT if own.limit is None and own.prompts is None else own.limit
    )
    seed = common.seed or 0
    asked = sampling(common, seed)
    max_tokens, sampled = asked.max_tokens, common.temperature is None or not asked.greedy
    planner = common.planner_or("fixed")

    from slipstream.audit import run
    from slipstream.audit.probe import Probe

    probe = Probe()
    with loaded(common, (*common.drafters, probe), max_num_seqs=own.concurrency, planner=planner) as llm:
        fitting = tokenized(llm, chosen, max_tokens)
        config = run.AuditConfig(
            drafters=tuple(merged_name(parse_merged(drafter)) for drafter in common.drafters),
            settings=run.settings(max_tokens, seed, None if asked.greedy else asked, sampled=sampled),
            at_once=own.concurrency,
            draft_tokens=common.draft_tokens,
            samples=own.samples,
            transformers=not own.no_transformers,
            trust_remote_code=common.trust_remote_code,
        )
        about = described(common, llm, config, len(fitting), len(chosen) - len(fitting), seed)
        with listening() as listener:
            result = run.audit(llm, probe, fitting, config, listener)
    result_json = report.to_json(result, about, strict=own.strict)
    write(files, result_json, report.to_markdown(result, about))
    show(result, files)
    print(json.dumps(result_json, ensure_ascii=False), flush=True)
    if not result.passed(own.strict):
        raise typer.Exit(130 if result.interrupted and not result.bugs else 1)


def sampling(common: Common, seed: int) -> SamplingParams:
    """The user's setting. Limits such as top-p without a temperature mean temperature 1, since greedy ignores them."""
    limits = common.asked.keys() - {"temperature", "seed", "max_tokens"}
    if limits and common.temperature is None:
        common = common.asking(temperature=1.0)
    params = replace(common.sampling(max_tokens=DEFAULT_MAX_TOKENS), seed=seed)
    for name in limits - {"top_p", "top_k", "min_p"} if params.greedy else ():  # these have no effect on greedy
        raise ConfigError(
            f"--{name.replace('_', '-')} with --temperature 0: greedy is audited without it; leave one of them out"
        )
    return params


def report_files(out: Path | None, json_file: Path | None, markdown_file: Path | None) -> dict[str, list[Path]]:
    """The files to write, by kind. A folder that cannot be written is refused before the work."""
    files: dict[str, list[Path]] = {"json": [], "markdown": []}
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be made ({error}); name another folder") from error
        files["json"].append(out / "audit.json")
        files["markdown"].append(out / "audit.md")
    given = {"json": json_file, "markdown": markdown_file}
    check_written(given)
    for kind, file in given.items():
        if file is not None:
            files[kind].append(file)
    return files


def tokenized(llm: LLM, chosen: Sequence[BenchPrompt], max_tokens: int) -> list[AuditPrompt]:
    """The prompts that fit the model's context, as tokens."""
    from slipstream.audit.stage import AuditPrompt

    asked = [AuditPrompt(p.id, tuple(llm.chat_prompt([{"role": "user", "content": p.text}]))) for p in chosen]
    fitting = [prompt for prompt in asked if len(prompt.token_ids) + max_tokens <= llm.max_model_len]
    if not fitting:
        raise CapacityError(
            f"no prompt fits max_model_len={llm.max_model_len} with max_tokens={max_tokens}: shorten one of them"
        )
    return fitting


def described(common: Common, llm: LLM, config: AuditConfig, prompts: int, skipped: int, seed: int) -> dict[str, Any]:
    return {
        "model": common.model,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["slipstream", *sys.argv[1:]],
        "drafters": list(common.drafters),
        "remarks": list(llm.remarks),
        "versions": versions(),
        "hardware": hardware(),
        "settings": {
            "prompts": prompts,
            "skipped_prompts": skipped,
            "max_tokens": config.settings[0].params.max_tokens,
            "concurrency": config.at_once,
            "seed": seed,
            "dtype": str(llm.engine.target.dtype).removeprefix("torch."),
            "device": str(llm.engine.target.device),
            "draft_tokens": common.draft_tokens,
            "planner": common.planner_or("fixed"),
        },
    }


@contextmanager
def listening() -> Iterator[Listener]:
    """Progress on stderr: a bar on a terminal, elsewhere a line for each check."""
    from slipstream.audit.run import Progress as Listener

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:60}"), BarColumn(bar_width=20), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        class Shown(Listener):
            task = bar.add_task("", total=None)
            line = ""

            def start(self, stage: Stage, number: int, of: int) -> None:
                self.line = f"[{number}/{of}] {stage.title}"
                bar.update(self.task, description=self.line, completed=0, total=stage.size)

            def step(self, steps: int) -> None:
                bar.advance(self.task, steps)

            def done(self, check: Check | None) -> None:
                outcome = f": {check.outcome}" if check is not None else ""
                console.print(self.line + outcome, markup=False, highlight=False, soft_wrap=True, style="dim")

        yield Shown()


def write(files: Mapping[str, Sequence[Path]], result: Mapping[str, Any], markdown: str) -> None:
    for file in files["json"]:
        file.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for file in files["markdown"]:
        file.write_text(markdown, encoding="utf-8")


def show(result: Audit, files: Mapping[str, Sequence[Path]]) -> None:
    """Print the table, the largest differences and the verdict."""
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("check", overflow="fold")
    for column in ("result", "the same", "guessed", "accepted"):
        table.add_column(column, no_wrap=True, justify="left" if column == "result" else "right")
    for check in result.checks:
        same = f"{check.compared}" if check.kind == "distribution" else f"{check.same}/{check.compared}"
        table.add_row(
            check.title + (f" ({check.untested})" if check.outcome is Outcome.NOT_TESTED else ""),
            check.outcome.upper() if check.outcome is Outcome.BUG else check.outcome,
            same if check.compared else "",
            f"{check.drafted}" if check.drafter else "",
            f"{check.accepted}" if check.drafter else "",
        )
    console.print(table)
    for finding in sorted(result.bugs or result.near_ties, key=lambda one: -one.excess)[:3]:
        console.print(f"{finding.outcome}: {report.describe(finding)}", markup=False, highlight=False, soft_wrap=True)
    for line in (*result.notes, result.verdict):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for file in (*files["markdown"], *files["json"]):
        console.print(f"written: {file}", markup=False, highlight=False, soft_wrap=True)
