"""What would every drafter guess, at every place of real answers? For `play.py`, which then plays real text.

    python tools/offers.py --prompts spec_bench.jsonl --to offers-0.json [--temperature 0] [--prompts-each 16]
                           [--max-tokens 128] [--longest 1024] [--model default] [--device cpu]

The target answers without drafts, once for each drafter, which is asked in every round all the same: what it guesses is
written down, and nothing of it is checked. So a round brings one token, and there is an offer at each place: a chain of
the draft model, a whole tree of the head, what `suffix` says and promises. Prompts are those of `cells.py`. In the file
are the temperature and, by task, the answers as recordings have them (`slipstream/bench/recording.py`). With the
default model 12,000 tokens take 20 minutes of a CPU's core, most of them for the head.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cells_ours import forget_answers
from cells_work import by_task, prompts_of
from results import chosen
from simulator.recorder import Guess, offer_of, overlap
from simulator.recording import Trace, packed
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.draft import MAX_NODES, Draft, Tree
from slipstream.drafters.base import DeviceDrafter, DraftRequest, HostDrafter
from slipstream.engine.odds import reach

DRAFTERS = ("suffix", "eagle3", "draft")

Said = dict[tuple[int, ...], dict[str, dict[int, Guess]]]
"""By prompt, drafter and place."""


def listen(llm: LLM, said: Said) -> None:
    """Have every drafter of an engine say what it guesses, into `said`, and give nothing."""
    for name, drafter in llm.engine.drafting.drafters.items():
        if isinstance(drafter, DeviceDrafter):
            _listen_device(name, drafter, said)
        elif isinstance(drafter, HostDrafter):
            _listen_host(name, drafter, said)


def _listen_device(name: str, drafter: Any, said: Said) -> None:
    most = reach(drafter)

    def heard(
        ask: Callable[..., Draft], requests: Sequence[DraftRequest], budget: Sequence[int], **options: int
    ) -> Draft:
        draft = ask(requests, [min(nodes, most) for nodes in budget], **options)
        for i, request in enumerate(requests):
            count = int(draft.counts[i])
            tree = Tree(tuple(draft.tokens[i, :count].tolist()), tuple(draft.parents[i, :count].tolist()))
            _note(said, name, request, tree, None)
        return Draft.pack([Tree()] * len(requests), draft.tokens.device)

    if drafter.makes_trees:
        trees = drafter.propose_trees
        drafter.propose_trees = lambda requests, budget, levels: heard(trees, requests, budget, levels=drafter.depth)
    else:
        chains = drafter.propose
        drafter.propose = lambda requests, budget: heard(chains, requests, budget)


def _listen_host(name: str, drafter: Any, said: Said) -> None:
    ask = drafter.propose

    def propose(requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        for request, tree in zip(requests, ask(requests, budget), strict=True):
            if tree.tokens:
                _note(said, name, request, tree, drafter.promise(request.id))
        return [Tree()] * len(requests)

    drafter.propose = propose


def _note(said: Said, name: str, request: DraftRequest, tree: Tree, promises: Sequence[float] | None) -> None:
    prompt, place = tuple(request.tokens[: request.prompt_length]), len(request.tokens) - request.prompt_length
    kept = None if promises is None else list(promises)
    said.setdefault(prompt, {}).setdefault(name, {})[place] = Guess(place, tree, kept)


class Answer(NamedTuple):
    """What was said to a prompt, and everybody's guesses."""

    tokens: tuple[int, ...]
    trace: Trace


def answered(llm: LLM, prompts: Sequence[list[int]], temperature: float, max_tokens: int, said: Said) -> list[Answer]:
    """The answers to these prompts, and everybody's guesses."""
    asks = SpeculationParams(tenant="offers")
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, speculation=asks)
        for seed in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        if answer.error:
            raise SystemExit(f"a request failed: {answer.error}")
        told = said.pop(tuple(prompt), {})
        offers = {
            name: tuple(offer_of(guess, answer.token_ids) for guess in guesses.values())
            for name, guesses in told.items()
        }
        whole = len(prompt), len(answer.token_ids), 0.0, 0.0, 0.0
        trace = Trace(*whole, tuple(offers), offers, temperature, overlap(prompt))
        found.append(Answer(tuple(answer.token_ids), trace))
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="default")
    made.add_argument("--drafter", nargs="+", default=list(DRAFTERS))
    made.add_argument("--prompts", type=Path, required=True, help="a Spec-Bench file (JSON lines)")
    made.add_argument("--tasks", help="by comma; default: all that the prompts have")
    made.add_argument("--temperature", type=float, default=0.0)
    made.add_argument("--prompts-each", type=int, default=16, help="of a task")
    made.add_argument(
        "--longest", type=int, default=1024, help="tokens of a prompt; of longer ones the middle is left out"
    )
    made.add_argument("--max-tokens", type=int, default=128)
    made.add_argument("--device", default="cpu")
    made.add_argument("--to", type=Path, required=True, help="a file (JSON, by gzip where it ends in .gz)")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    texts = by_task(options.prompts)
    tasks = chosen("--tasks", options.tasks, list(texts)) if options.tasks else tuple(texts)
    found: dict[str, list[Answer]] = {}
    for drafter in options.drafter:
        with LLM(
            options.model,
            drafter=drafter,
            device=options.device,
            dtype="float32",
            max_num_seqs=options.prompts_each,
            max_draft_rows=options.prompts_each * (MAX_NODES + 1),
            max_model_len=options.longest + options.max_tokens + 1,
            draft_tokens=MAX_NODES,
            planner="fixed",
        ) as llm:
            forget_answers(llm.engine)
            said: Said = {}
            listen(llm, said)
            for task in tasks:
                begun = time.perf_counter()
                prompts = prompts_of(llm.tokenizer, texts[task], 1, options.longest, options.prompts_each)
                answers = answered(llm, prompts, options.temperature, options.max_tokens, said)
                found[task] = merged(found[task], answers) if task in found else answers
                tokens = sum(len(answer.tokens) for answer in answers)
                print(f"{drafter}, {task}: {tokens:,} tokens in {time.perf_counter() - begun:.0f} s", flush=True)
                write(options.to, options.temperature, found)


def merged(before: Sequence[Answer], now: Sequence[Answer]) -> list[Answer]:
    """What several drafters say to the same answers."""
    found = []
    for number, ((tokens, one), (again, other)) in enumerate(zip(before, now, strict=True), 1):
        if tokens != again:
            same = next((i for i, pair in enumerate(zip(tokens, again, strict=False)) if pair[0] != pair[1]), None)
            where = f"at token {same + 1}" if same is not None else f"in length: {len(tokens)}, now {len(again)}"
            raise SystemExit(f"answer {number} is another than before, {where}; drafters' guesses would not fit it")
        offers = {**one.offers, **other.offers}
        found.append(Answer(tokens, replace(one, offers=offers, drafters=tuple(offers))))
    return found


def write(to: Path, temperature: float, found: Mapping[str, Sequence[Answer]]) -> None:
    tasks = {task: [packed(answer.trace) for answer in answers] for task, answers in found.items()}
    opened = gzip.open if to.suffix == ".gz" else open
    with opened(to, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"temperature": temperature, "tasks": tasks}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
