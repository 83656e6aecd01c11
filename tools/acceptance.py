"""Tokens per pass (tau) of drafters over a file of prompts, by task, in the real engine.

    python tools/acceptance.py --prompts spec_bench.jsonl --json acceptance.json [--model default]
                               [--drafter eagle3 eagle3+suffix medusa draft] [--temperature 0 1] [--max-tokens 256]
                               [--draft-tokens 63] [--at-once 48] [--limit N] [--device auto]

A drafter is named as on the command line of slipstream; the shape of an EAGLE tree stands behind its name
(`eagle3:?depth=7&width=10`), `--draft-tokens` is the size of all trees and the length of all chains. Each has an engine
of its own, one after the other. The planner is fixed: every round drafts, and trees are not cut because others run. tau
counts the target's own token. The last line printed is the JSON: for each drafter and temperature tau, rounds, tokens,
drafted, accepted, and how often the first guess stood, the second and so on; the same by category.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from results import settings, told
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.bench.prompts import by_category, load_prompts, select
from slipstream.core.draft import MAX_NODES

DRAFTERS = ("eagle3", "medusa", "draft")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The counts of some prompts."""

    prompts: int
    rounds: int
    tokens: int
    drafted: int
    accepted: int
    by_position: tuple[int, ...]  # rounds in which the first guess stood, the second, …
    seconds: float

    @property
    def tau(self) -> float:
        return self.tokens / max(self.rounds, 1)

    def as_dict(self) -> dict[str, Any]:
        alpha = self.accepted / max(self.drafted, 1)
        return {"tau": round(self.tau, 4), "alpha": round(alpha, 4), **asdict(self), "seconds": round(self.seconds, 2)}


def added_up(parts: Sequence[Acceptance]) -> Acceptance:
    longest = max((len(part.by_position) for part in parts), default=0)
    stood = [sum(part.by_position[i] for part in parts if i < len(part.by_position)) for i in range(longest)]
    return Acceptance(
        prompts=sum(part.prompts for part in parts),
        rounds=sum(part.rounds for part in parts),
        tokens=sum(part.tokens for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        by_position=tuple(stood),
        seconds=sum(part.seconds for part in parts),
    )


def measured(llm: LLM, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int) -> Acceptance:
    """Run these prompts together, each with its number as seed."""
    before, began = llm.snapshot(), time.perf_counter()
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max(1, min(max_tokens, llm.max_model_len - len(ids))),
            # answers of another temperature must not be remembered: they are to the same prompts
            speculation=SpeculationParams(tenant=f"T={temperature:g}"),
        )
        for seed, ids in enumerate(prompts)
    ]
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)
    answers = [output.outputs[0] for output in outputs]
    if failed := [answer.error for answer in answers if answer.error]:
        raise SystemExit(f"a request failed: {failed[0]}")
    stats, after = [answer.speculation for answer in answers], llm.snapshot()
    already = (*before.accepted_by_position, *[0] * len(after.accepted_by_position))
    return Acceptance(
        prompts=len(prompts),
        rounds=sum(s.rounds for s in stats),
        tokens=sum(s.emitted for s in stats),
        drafted=sum(s.drafted for s in stats),
        accepted=sum(s.accepted for s in stats),
        by_position=_without_end([now - then for now, then in zip(after.accepted_by_position, already, strict=False)]),
        seconds=time.perf_counter() - began,
    )


def _without_end(counts: list[int]) -> tuple[int, ...]:
    """The counts without trailing zeros."""
    while counts and not counts[-1]:
        counts.pop()
    return tuple(counts)


def run(llm: LLM, groups: Mapping[str, Sequence[Sequence[int]]], temperature: float, max_tokens: int) -> dict[str, Any]:
    """Run all tasks at one temperature."""
    parts = {name: measured(llm, prompts, temperature, max_tokens) for name, prompts in groups.items()}
    whole = added_up(list(parts.values()))
    return {
        "temperature": temperature,
        **whole.as_dict(),
        "categories": {name: part.as_dict() for name, part in parts.items()},
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="default")
    made.add_argument("--drafter", nargs="+", default=list(DRAFTERS))
    made.add_argument("--prompts", type=Path, required=True)
    made.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    made.add_argument("--max-tokens", type=int, default=256)
    made.add_argument("--draft-tokens", type=int, help="of trees and chains; default: the drafter's own")
    made.add_argument("--at-once", type=int, default=48)
    made.add_argument("--limit", type=int, help="prompts, spread over the categories")
    made.add_argument("--device", default="auto")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--memory")
    made.add_argument("--json", type=Path)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    groups = by_category(select(load_prompts(options.prompts), (), options.limit))
    results: list[dict[str, Any]] = []
    written = ""
    for drafter in options.drafter:
        with LLM(
            options.model,
            drafter=drafter,
            draft_tokens=options.draft_tokens,
            device=options.device,
            dtype=options.dtype,
            memory=options.memory,
            max_num_seqs=options.at_once,
            max_draft_rows=options.at_once * (MAX_NODES + 1),
            planner="fixed",
            graphs=False,  # rounds of many sizes, few of each: recording them takes longer than it saves
        ) as llm:
            asked = {
                name: [llm.chat_prompt([{"role": "user", "content": prompt.text}]) for prompt in group]
                for name, group in groups.items()
            }
            for temperature in options.temperature:
                found = {"drafter": told(drafter), **run(llm, asked, temperature, options.max_tokens)}
                results.append(found)
                tasks = ", ".join(f"{name} {part['tau']:.2f}" for name, part in found["categories"].items())
                print(
                    f"{drafter} at T={temperature:g}: tau {found['tau']:.3f} ({tasks}), {found['tokens']:,} tokens in "
                    f"{found['seconds']:.1f} s",
                    flush=True,
                )
                written = _write(options, sum(map(len, groups.values())), results)
    print(written, flush=True)


def _write(options: argparse.Namespace, prompts: int, results: Sequence[Mapping[str, Any]]) -> str:
    """Write all results so far as JSON, also into the file."""
    result = json.dumps({"settings": settings(options), "prompts": prompts, "results": results})
    if options.json is not None:
        options.json.write_text(result + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
