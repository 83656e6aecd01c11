"""How many tokens a pass do drafters bring that draft from text alone? Over recorded answers, one after the other.

    python tools/replay.py [--conversations spec_bench.jsonl] [--edits humaneval.jsonl] [--limit N] [--max-tokens 200]
                           [--model default] [--nodes 16 32 63] [--answers FILE] [--json FILE]

Second turns: the target answers the first question of each conversation and then the second, whose answer counts.
Code editing: our own prompts of that kind, and of the file of edits "complete it, return the whole code" (--limit of
each). Answers are greedy; `--answers` keeps them, and takes them from there the next time. Over these each drafter
runs by itself, all nodes drafted: a round follows its tree along the answer. tau counts the target's own token. `ngram`
is taken with its best min_match of 1, 2 and 3; `suffix` with past outputs (the store is empty at first and fills as
answers end) and without. The last line printed is the JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from results import settings
from slipstream import LLM, SamplingParams
from slipstream.bench.prompts import load_prompts
from slipstream.core.draft import ROOT, Tree
from slipstream.core.verdict import Verdict, author
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.suffix import SuffixDrafter

EDIT = "Complete the following Python code. Return the whole code.\n\n```python\n{}```"
MATCHES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt and what the target answered, as tokens."""

    task: str
    prompt: list[int]
    answer: list[int]


def lines(file: Path | None) -> list[dict[str, Any]]:
    return [] if file is None else [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def spread(things: list[Any], limit: int | None) -> list[Any]:
    """So many of them, from all parts of the list: neighbours are alike."""
    count = len(things) if limit is None else min(limit, len(things))
    return [things[i * len(things) // count] for i in range(count)]


def recorded(options: argparse.Namespace) -> list[Recorded]:
    """The target's answers, to second turns and to code."""
    if options.answers is not None and options.answers.is_file():
        return [Recorded(**one) for one in lines(options.answers)]
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    with LLM(options.model, drafter="suffix", max_num_seqs=8) as llm:

        def fits(ids: Sequence[int]) -> bool:
            return bool(len(ids) + options.max_tokens <= llm.max_model_len)

        def answered(task: str, chats: Sequence[Sequence[dict[str, str]]]) -> list[Recorded]:
            fitting = [ids for ids in (llm.chat_prompt(list(chat)) for chat in chats) if fits(ids)]
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in fitting], params)
            return [Recorded(task, ids, o.outputs[0].token_ids) for ids, o in zip(fitting, outputs, strict=True)]

        turns = [one["turns"] for one in lines(options.conversations) if len(one.get("turns", ())) > 1]
        turns = spread(turns, options.limit)
        turns = [asked for asked in turns if fits(llm.chat_prompt([{"role": "user", "content": asked[0]}]))]
        first = answered("first turn", [[{"role": "user", "content": asked[0]}] for asked in turns])
        texts = [llm.tokenizer.decode(one.answer, skip_special_tokens=True) for one in first]
        second = [
            [
                {"role": "user", "content": asked[0]},
                {"role": "assistant", "content": text},
                {"role": "user", "content": asked[1]},
            ]
            for asked, text in zip(turns, texts, strict=True)
        ]
        edits = [prompt.text for prompt in load_prompts() if prompt.category == "code_editing"]
        edits += [EDIT.format(one["prompt"]) for one in spread(lines(options.edits), options.limit)]
        found = answered("second turns", second)
        found += answered("code editing", [[{"role": "user", "content": text}] for text in edits])
    if options.answers is not None:
        text = "".join(json.dumps(asdict(one)) + "\n" for one in found)
        options.answers.write_text(text, encoding="utf-8")
    return found


def walked(tree: Tree, rest: Sequence[int]) -> list[int]:
    """The nodes that stand, where the target goes on with `rest`."""
    children = {
        (parent, token): node for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True))
    }
    path: list[int] = []
    while len(path) < len(rest) and (node := children.get((path[-1] if path else ROOT, rest[len(path)]))) is not None:
        path.append(node)
    return path


def tau(drafter: HostDrafter, answers: Sequence[Recorded], nodes: int) -> float:
    """Tokens a round over these answers, one request after the other."""
    rounds = emitted = 0
    for number, one in enumerate(answers):
        tokens = [*one.prompt, *one.answer[:1]]  # the first comes from the prompt
        request = DraftRequest(str(number), tokens, len(one.prompt), SamplingParams(), slot=0)
        drafter.start(request)
        at = 1
        while at < len(one.answer):
            (tree,) = drafter.propose([request], [nodes])
            rest = one.answer[at:]
            path = walked(tree, rest[:-1])  # the last one is the target's own
            said = tuple(rest[: len(path) + 1])
            tokens.extend(said)
            verdict = Verdict(request.id, said, len(tree), len(path), tuple(path), authors=author(drafter.name))
            drafter.observe([verdict])
            at += len(said)
            rounds, emitted = rounds + 1, emitted + len(said)
        drafter.stop(request.id)
    return emitted / max(rounds, 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--conversations", type=Path)
    parser.add_argument("--edits", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 63])
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    everything = recorded(options)
    rows: list[dict[str, Any]] = []
    for task in dict.fromkeys(one.task for one in everything):
        answers = [one for one in everything if one.task == task]
        for nodes in options.nodes:

            def of(make: Callable[[], HostDrafter], own: Sequence[Recorded] = answers, most: int = nodes) -> float:
                return round(tau(make(), own, most), 3)

            ngram = {match: of(partial(NgramDrafter, min_match=match)) for match in MATCHES}
            best = max(ngram, key=ngram.__getitem__)
            alone, whole = of(partial(SuffixDrafter, store_tokens=0)), of(SuffixDrafter)
            rows.append(
                {
                    "task": task,
                    "answers": len(answers),
                    "tokens": sum(len(one.answer) for one in answers),
                    "nodes": nodes,
                    "ngram": ngram[best],
                    "ngram_min_match": best,
                    "suffix_no_past": alone,
                    "suffix": whole,
                    "ratio": round(whole / ngram[best], 3),
                }
            )
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    result = json.dumps({"settings": settings(options), "rows": rows})
    if options.json is not None:
        options.json.write_text(result + "\n", encoding="utf-8")
    print(result, flush=True)


if __name__ == "__main__":
    main()
