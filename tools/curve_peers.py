"""vLLM on the same requests, plain and with the same EAGLE-3 head: each mode in a process of its own.

vLLM's counters give its drafted and accepted tokens. Its tau is computed as ours: tokens over passes, where a prompt's
last pass counts and every draft is one more pass.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

from vllm_peer import JsonTask, apart, opened
from work import CONTEXT, Ask, Run, encode, first_turns, one_run, prompts_for, timed

MODES = ("plain", "eagle3", "eagle3_drawn", "ngram", "ngram_gpu", "draft")
LONGEST = CONTEXT // 2
WARM_TOKENS = 32
WITHIN = 0.05
"""Largest relative difference of acceptance there and here."""
MOST_AT_ONCE = 32
"""Requests of an acceptance run: with all 480 at once vLLM 0.26 ended in its attention (scheduler_metadata)."""
_PREFIX = "vllm:spec_decode_"


@dataclass(frozen=True, slots=True)
class Task(JsonTask):
    """The measurement of one process: the curve on the spread of prompts, or acceptance on all first turns."""

    what: Literal["curve", "acceptance"]
    mode: str
    model: str
    draft: str | None
    prompts: str
    max_tokens: int
    loads: tuple[tuple[float, int], ...] = ()  # temperature, requests at once
    repeats: int = 1
    limit: int | None = None

    @staticmethod
    def read(text: str) -> Task:
        given = json.loads(text)
        return Task(**{**given, "loads": tuple((load[0], load[1]) for load in given["loads"])})


def run_apart(task: Task, peer_path: str | None, timeout: float) -> dict[str, Any]:
    return apart("curve.py", task.arguments, peer_path, timeout)


def measure(task: Task, tell: Callable[[dict[str, Any]], None]) -> None:
    """Run vLLM in this process. `tell` receives all results so far after every load."""
    # its counters are of the statistics that it would log
    vllm = opened(task.model, task.mode, task.draft, LONGEST, disable_log_stats=False)
    llm, context = vllm.llm, vllm.context
    from vllm import SamplingParams

    found: dict[str, Any] = {"version": vllm.version, "open_s": round(vllm.open_s, 1)}

    def asking(prompts: Sequence[list[int]], temperature: float, max_tokens: int) -> Ask:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)

        def ask(numbers: Sequence[int]) -> list[list[int]]:
            asked = [{"prompt_token_ids": prompts[number]} for number in numbers]
            return [list(o.outputs[0].token_ids) for o in llm.generate(asked, params, use_tqdm=False)]

        return ask

    def counted(ask: Ask, prompts: int, at_once: int) -> PeerRun:
        before = Counts.of(llm)
        run = one_run(ask, prompts, at_once)
        return PeerRun(run, Counts.of(llm).since(before))

    tokenizer = llm.get_tokenizer()
    if task.what == "acceptance":
        turns = first_turns(Path(task.prompts), task.limit)
        prompts = [encode(tokenizer, text, context - task.max_tokens - 1) for text in turns]
        before, begin = Counts.of(llm), time.perf_counter()
        ask, tokens = asking(prompts, 0.0, task.max_tokens), 0
        for at in range(0, len(prompts), MOST_AT_ONCE):
            tokens += sum(map(len, ask(range(at, min(at + MOST_AT_ONCE, len(prompts))))))
        found["acceptance"] = acceptance(Counts.of(llm).since(before), tokens, len(prompts))
        found["acceptance"]["seconds"] = round(time.perf_counter() - begin, 2)
        tell(found)
        return
    prompts = prompts_for(tokenizer, Path(task.prompts), context, task.max_tokens)
    for temperature, at_once in task.loads:
        ask = asking(prompts, temperature, task.max_tokens)
        shortly = asking(prompts, temperature, min(WARM_TOKENS, task.max_tokens))
        first = [number % len(prompts) for number in range(at_once)]
        runs = timed(partial(counted, ask, len(prompts), at_once), task.repeats, warm_up=partial(shortly, first)).runs
        found.setdefault(f"T={temperature:g}", {})[str(at_once)] = point(runs)
        tell(found)


@dataclass(frozen=True, slots=True)
class Counts:
    """vLLM's counters of drafts; zeros where it does not draft."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    @staticmethod
    def of(llm: Any) -> Counts:
        """The counters so far."""
        named = {metric.name.removeprefix(_PREFIX): metric for metric in llm.get_metrics()}
        if "num_drafts" not in named:
            return Counts()
        return Counts(
            named["num_drafts"].value,
            named["num_draft_tokens"].value,
            named["num_accepted_tokens"].value,
            tuple(named["num_accepted_tokens_per_pos"].values),
        )

    def since(self, before: Counts) -> Counts:
        return Counts(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.by_position, before.by_position, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class PeerRun:
    """A run with vLLM's counters."""

    run: Run
    counts: Counts


def point(runs: Sequence[PeerRun]) -> dict[str, Any]:
    """One place of vLLM's curve. What it drafted is told of the first run."""
    rates = [part.run.rate for part in runs]
    first = runs[0]
    made = {"tok_s": median(rates), "runs": [round(rate, 1) for rate in rates], "tokens": first.run.tokens}
    if first.counts.drafts:
        made |= acceptance(first.counts, first.run.tokens, len(first.run.answers))
    return made


def acceptance(counts: Counts, tokens: int, prompts: int) -> dict[str, Any]:
    """tau as ours, and vLLM's own counts. Those include what an answer's end cut off, tau does not.

    vLLM does not count passes in which nothing was drafted, of which n-grams have many: each brought one token.
    """
    undrafted = max(0, tokens - prompts - counts.drafts - counts.accepted)
    return {
        "tau": tokens / (prompts + counts.drafts + undrafted),
        "alpha": counts.accepted / counts.drafted if counts.drafted else None,
        "prompts": prompts,
        "answered_tokens": tokens,
        **asdict(counts),
    }


def compared(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Does the head reach there what it has here? By tokens that stood for each pass: stricter than by tau."""
    here, there = ours["tau"] - 1, theirs["tau"] - 1
    ratio = there / here if here else None
    return {
        "tau_ratio": theirs["tau"] / ours["tau"],
        "accepted_ratio": ratio,
        "within_5_percent": ratio is not None and abs(ratio - 1) <= WITHIN,
    }
