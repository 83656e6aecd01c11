"""Whether tokens are the same with speculation on and off, alone and in a batch, over a whole file of prompts.

    python tools/exact.py --model DIR --prompts spec_bench.jsonl --json exact.json
                          [--drafters ngram,model:DIR] [--dtype bfloat16] [--device cuda] [--limit N] [--max-tokens 128]

Plain decoding, one request at a time, is the reference. Then every mode runs with 32 requests at once, plain decoding
too, at temperature 0 and 1. The last line printed is the JSON; where an answer differs it has the index of the prompt
and the position.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from results import command_line
from slipstream import LLM, SamplingParams
from slipstream.audit.stage import AuditPrompt, Mode, ask, with_seeds
from slipstream.bench.prompts import load_prompts
from slipstream.core.outputs import parting
from slipstream.drafters import merged_name, parse_merged
from slipstream.models.load import load_config
from slipstream.models.resolve import resolve

TEMPERATURES = (0.0, 1.0)
AT_ONCE = 32
CONTEXT = 4096


def answers(
    llm: LLM, prompts: Sequence[AuditPrompt], params: Sequence[SamplingParams], at_once: int
) -> list[list[int]]:
    found: list[list[int]] = []
    for asked in ask(llm, prompts, params, at_once):
        for one in asked:
            if one.answer.error is not None:
                raise SystemExit(f"a request failed: {one.answer.error}")
            found.append(list(one.answer.token_ids))
    return found


def differences(found: Sequence[list[int]], reference: Sequence[list[int]]) -> list[dict[str, int]]:
    places = [parting(ours, theirs) for ours, theirs in zip(found, reference, strict=True)]
    return [{"prompt": index, "position": at} for index, at in enumerate(places) if at is not None]


def compared(llm: LLM, drafters: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Every mode in company beside plain decoding alone, at each temperature."""
    prompts = []
    for prompt in load_prompts(options.prompts)[: options.limit]:
        ids = llm.chat_prompt([{"role": "user", "content": prompt.text}])
        prompts.append(AuditPrompt(prompt.id, tuple(ids[: llm.max_model_len - 1 - options.max_tokens])))
    result: dict[str, Any] = {
        "command": command_line(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "prompts": len(prompts),
        "dtype": options.dtype,
        "device": str(llm.engine.target.device),
    }
    modes = [Mode(), *(Mode(merged_name(parse_merged(drafter))) for drafter in drafters)]
    for temperature in TEMPERATURES:
        base = SamplingParams(temperature=temperature, max_tokens=options.max_tokens, seed=0)
        params = {mode.name: with_seeds(replace(base, speculation=mode.speculation), len(prompts)) for mode in modes}
        reference = answers(llm, prompts, params[Mode().name], 1)
        for mode in modes:
            wrong = differences(answers(llm, prompts, params[mode.name], AT_ONCE), reference)
            same = len(prompts) - len(wrong)
            result[f"T={temperature:g} {mode.name} x{AT_ONCE}"] = {"same": same, "wrong": wrong}
            print(f"T={temperature:g} {mode.name}: {same} of {len(prompts)} the same", flush=True)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--drafters", default="ngram", help="by comma, as on the command line of slipstream")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    drafters = [name for name in options.drafters.split(",") if name]
    with LLM(
        options.model,
        drafter=drafters or None,
        dtype=options.dtype,
        device=options.device,
        max_model_len=min(CONTEXT, load_config(resolve(options.model)).max_position_embeddings),
        prefix_caching=False,
    ) as llm:
        result = compared(llm, drafters, options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
