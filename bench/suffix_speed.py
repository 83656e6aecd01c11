"""What the suffix drafter's store costs: a lookup for many requests together, and the insert of a token.

    python bench/suffix_speed.py [--tokens 1000000] [--requests 32] [--nodes 16 32] [--rounds 300] [--prompts FILE]
                                 [--model default] [--seed 0] [--json FILE]

Past outputs and requests are put together from pieces of prompts (ours, or those of a file in the form of
`slipstream bench`), by the model's tokenizer: so they agree here and there, as texts on like matters do. Each round
every request has one new token. Times are medians, in milliseconds for a round and in microseconds for a token; run it
on a machine that has nothing else to do. The last line printed is the JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from kept import settings

from slipstream import SamplingParams
from slipstream.bench.memory import load_average
from slipstream.bench.prompts import load_prompts
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.models.load import load_tokenizer
from slipstream.models.resolve import resolve

ANSWER = 500  # tokens of a past output, and of a request's text at first
PIECE = (8, 120)  # tokens of a piece


def stitched(texts: Sequence[Sequence[int]], seed: int) -> Iterator[int]:
    """Pieces of these texts end to end, without end."""
    dice = random.Random(seed)
    while True:
        text, length = dice.choice(texts), dice.randint(*PIECE)
        begin = dice.randrange(max(1, len(text) - length))
        yield from text[begin : begin + length]


def filled(drafter: SuffixDrafter, tokens: int, text: Iterator[int]) -> dict[str, float]:
    """Fill the store, and once more a tenth of it, for which as much is forgotten: microseconds a token."""
    last, beyond = [], []
    while drafter.store.tokens + ANSWER <= tokens:
        last.append(inserted(drafter, list(islice(text, ANSWER))))
    for _ in range(max(1, tokens // ANSWER // 10)):
        beyond.append(inserted(drafter, list(islice(text, ANSWER))))
    return {
        "insert_us": round(median(last[-max(1, len(last) // 10) :]), 2),
        "insert_and_evict_us": round(median(beyond), 2),
        "worst_us": round(max(*last, *beyond), 1),
    }


def inserted(drafter: SuffixDrafter, answer: list[int]) -> float:
    began = time.perf_counter()
    drafter.store.insert("", answer)
    return (time.perf_counter() - began) * 1e6 / len(answer)


def looked_up(drafter: SuffixDrafter, requests: int, nodes: int, rounds: int, text: Iterator[int]) -> dict[str, float]:
    """Milliseconds of a round: one new token for each request, and a tree for all of them."""
    tokens = [list(islice(text, ANSWER)) for _ in range(requests)]
    views = [DraftRequest(f"{nodes}/{i}", own, ANSWER, SamplingParams(), slot=i) for i, own in enumerate(tokens)]
    for view in views:
        drafter.start(view)
    took, drafted = [], 0
    for number in range(rounds + 10):
        for own in tokens:
            own.append(next(text))
        began = time.perf_counter()
        trees = drafter.propose(views, [nodes] * requests)
        if number >= 10:  # the first ones warm up
            took.append((time.perf_counter() - began) * 1e3)
            drafted += sum(map(len, trees))
    for view in views:
        drafter.stop(view.id)
    return {
        "nodes": nodes,
        "median_ms": round(median(took), 4),
        "best_ms": round(min(took), 4),
        "p90_ms": round(quantiles(took, n=10)[-1], 4),
        "drafted": round(drafted / rounds / requests, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--model", default="default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.tokens < ANSWER:
        parser.error(f"--tokens {options.tokens}: must be {ANSWER} or more, which one past output has")
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: must be 2 or more, or there are no percentiles")
    tokenizer: Any = load_tokenizer(resolve(options.model, None), False)
    texts = [tokenizer.encode(prompt.text) for prompt in load_prompts(options.prompts)]
    text = stitched(texts, options.seed)
    drafter = SuffixDrafter(store_tokens=options.tokens)
    load = load_average()
    result: dict[str, Any] = {"store": filled(drafter, options.tokens, text), "lookups": []}
    for nodes in options.nodes:
        result["lookups"].append(looked_up(drafter, options.requests, nodes, options.rounds, text))
        print(result["lookups"][-1], flush=True)
    result = {"settings": settings(options), "load_before": load, "stored_tokens": drafter.store.tokens, **result}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
