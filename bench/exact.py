"""Are the tokens the same with speculation on or off, alone or in company? Over a whole file of prompts.

    python bench/exact.py --model DIR --prompts spec_bench.jsonl --json exact.json
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

from slipstream import LLM, SamplingParams, SpeculationParams

TEMPERATURES = (0.0, 1.0)
AT_ONCE = 32


def first_turns(path: Path, limit: int | None) -> list[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows][:limit]


def answers(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], at_once: int) -> list[list[int]]:
    found: list[list[int]] = []
    for start in range(0, len(prompts), at_once):
        part = slice(start, start + at_once)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts[part]], list(params[part]))
        for output in outputs:
            if output.outputs[0].error is not None:
                raise SystemExit(f"a request failed: {output.outputs[0].error}")
            found.append(list(output.outputs[0].token_ids))
    return found


def differences(found: Sequence[list[int]], reference: Sequence[list[int]]) -> list[dict[str, int]]:
    out = []
    for index, (ours, theirs) in enumerate(zip(found, reference, strict=True)):
        if ours != theirs:
            same = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            out.append({"prompt": index, "position": same})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--drafters", default="ngram", help="by comma, as on the command line of slipstream")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    drafters = [name for name in options.drafters.split(",") if name]
    llm = LLM(options.model, drafter=drafters or None, dtype=options.dtype, device=options.device, max_model_len=4096)
    texts = first_turns(options.prompts, options.limit)
    prompts = [llm.chat_prompt([{"role": "user", "content": text}])[: 4095 - options.max_tokens] for text in texts]
    result: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "prompts": len(prompts),
        "dtype": options.dtype,
        "device": str(llm.engine.target.device),
    }
    plain = SpeculationParams(enabled=False)
    for temperature in TEMPERATURES:
        base = SamplingParams(temperature=temperature, max_tokens=options.max_tokens, speculation=plain)
        params = [replace(base, seed=i) for i in range(len(prompts))]
        reference = answers(llm, prompts, params, 1)
        modes = {"plain": plain} | {d: SpeculationParams(drafter=d.split(":")[0]) for d in drafters}
        for mode, speculation in modes.items():
            own = [replace(p, speculation=speculation) for p in params]
            wrong = differences(answers(llm, prompts, own, AT_ONCE), reference)
            result[f"T={temperature:g} {mode.split(':')[0]} x{AT_ONCE}"] = {
                "same": len(prompts) - len(wrong),
                "wrong": wrong,
            }
            print(f"T={temperature:g} {mode}: {len(prompts) - len(wrong)} of {len(prompts)} the same", flush=True)
    llm.close()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
