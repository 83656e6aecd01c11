"""Prompts and decoding on the CPU, ours and transformers' in turn, alone and beside programs that keep the cores busy.

Every prompt is another one, and both get the same. The middle one of the repeats counts. The busy processes end with
the measurement, and by themselves after `--most-s` seconds.

Run from the repository: `python tools/beside.py --lengths 500,2300 --busy 0,2`; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

import results
from slipstream import LLM, SamplingParams
from slipstream.bench.baseline import TransformersPeer, same_as_ours
from slipstream.bench.run import EngineRunner, Runner
from slipstream.core.params import SpeculationParams

_BUSY = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"
_FIRST_TEXT = 64
"""Tokens of the prompt that decoding begins from."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--lengths", default="500,2300", help="tokens of the prompts")
    parser.add_argument("--busy", default="0,2", help="programs beside: each number is measured for itself")
    parser.add_argument("--max-tokens", type=int, default=48, help="of the answer by which decoding is timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-s", type=float, default=240, help="seconds after which a busy process ends by itself")
    parser.add_argument("--max-num-batched-tokens", type=int, default=None, help="of a pass; default: the engine's own")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    rows = {} if options.max_num_batched_tokens is None else {"max_num_batched_tokens": options.max_num_batched_tokens}
    with LLM(options.model, device="cpu", dtype="float32", drafter=None, **rows) as llm:
        config = same_as_ours(llm, dtype="float32", device="cpu", trust_remote_code=False)
        with TransformersPeer(config) as peer:
            runners: list[Runner] = [EngineRunner("slipstream", llm, SpeculationParams()), peer]
            words = llm.get_tokenizer().vocab_size
            times = []
            for busy in map(int, options.busy.split(",")):
                with beside(busy, options.most_s):
                    for length, tokens in [*((length, 1) for length in lengths), (_FIRST_TEXT, options.max_tokens)]:
                        times.append({"busy": busy, **compared(runners, words, length, tokens, options.repeats)})
                        print(json.dumps(times[-1]), flush=True)
    told = {"options": results.settings(options), "threads": torch.get_num_threads(), "times": times}
    print(json.dumps(told))


@contextmanager
def beside(count: int, most_s: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A context in which `count` processes compute without a pause."""
    running = [subprocess.Popen([sys.executable, "-c", _BUSY, str(most_s)]) for _ in range(count)]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def compared(runners: Sequence[Runner], words: int, length: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds to the first token, or a decoded token where there are several; and whether all had the same tokens."""
    params = [SamplingParams(temperature=0, max_tokens=tokens)]
    seconds: dict[str, list[float]] = {runner.name: [] for runner in runners}
    same = True
    for repeat in range(repeats + 1):
        ids = random.Random(1000 * length + repeat).choices(range(min(100, words // 2), words), k=length)
        answers = [runner.answer([ids], params).answers[0] for runner in runners]
        same &= len({answer.token_ids for answer in answers}) == 1
        for runner, answer in zip(runners, answers, strict=True):
            rest = len(answer.token_ids) - 1
            if repeat and tokens == 1:  # the first time warms up
                seconds[runner.name].append(answer.first_token_s)
            elif repeat and rest:
                seconds[runner.name].append((answer.total_s - answer.first_token_s) / rest)
    found = {name: round(median(values), 5) for name, values in seconds.items()}
    ratio = round(found["slipstream"] / found["transformers"], 3)
    return {"prompt": length, "max_tokens": tokens, "seconds": found, "of_transformers": ratio, "same_tokens": same}


if __name__ == "__main__":
    main()
