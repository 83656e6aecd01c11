"""The number of prompt tokens that a pass should have (`max_num_batched_tokens`), by the first tokens and the cost.

For each size: prompts that come at once, with the times of their first tokens and of the last token of all, and one
long prompt alone. Sizes take turns, and the quickest run of each counts: what else a machine does only slows one down.

Run from the repository: `python tools/first_tokens.py --sizes 64,192,512`; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import results
from slipstream import LLM, SamplingParams

TEXT = "A lighthouse keeper counts the ships that pass before the fog comes in, and writes each of them down. "
LEADS = range(100, 10_000)
"""First tokens of prompts: another one is another prompt, of which nothing is found in the cache."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafter", default=None, help="default: none, plain decoding")
    parser.add_argument("--memory", default="512MiB", help="of each engine; there is one for each size")
    parser.add_argument("--sizes", default="64,128,192,256,512", help="tokens a pass")
    parser.add_argument("--at-once", type=int, default=12, help="prompts that come together")
    parser.add_argument("--tokens", type=int, default=60, help="of each of them")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--long", type=int, default=1000, help="tokens of the long prompt")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    leads = iter(LEADS)
    with ExitStack() as stack:
        llms = {
            size: stack.enter_context(
                LLM(
                    options.model,
                    drafter=options.drafter,
                    device=options.device,
                    memory=options.memory,
                    max_num_batched_tokens=size,
                )
            )
            for size in sizes
        }
        text = llms[sizes[0]].get_tokenizer().encode(TEXT * (max(options.long, options.tokens) // 8))
        runs: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
        for repeat in range(options.repeats + 1):
            for size, llm in llms.items():
                together = [[next(leads), *text[: options.tokens - 1]] for _ in range(options.at_once)]
                alone = [[next(leads), *text[: options.long - 1]]]
                run = {"size": size, **timed(llm, together, options.max_tokens)}
                run["long_s"] = timed(llm, alone, 1)["total_s"]
                print(json.dumps(run), flush=True)
                if repeat:  # the first warms up
                    runs[size].append(run)
    found = [quickest(runs[size]) for size in sizes]
    print(json.dumps({"options": results.settings(options), "sizes": found}))


def timed(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
    """Seconds to each first token, soonest first, and to the last token of all."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate([list(prompt) for prompt in prompts], params)
    total = time.perf_counter() - began
    firsts = sorted(output.outputs[0].timing.first_token_s for output in outputs)
    return {"first_s": [round(first, 3) for first in firsts], "total_s": round(total, 3)}


def quickest(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the runs of one size."""
    best = min(runs, key=lambda run: run["total_s"])
    mean = round(sum(best["first_s"]) / len(best["first_s"]), 3)
    return {**best, "long_s": min(run["long_s"] for run in runs), "mean_first_s": mean}


if __name__ == "__main__":
    main()
