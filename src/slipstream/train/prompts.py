"""Prompts for the target: files, or user turns that a chat model writes itself.

A chat model was trained on conversations: after the header of a user turn it writes what a user might say. So training
a drafter needs no data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.bench.prompts import load_prompts
from slipstream.core.errors import ConfigError
from slipstream.models.paths import Progress
from slipstream.train.bulk import Bulk, BulkRequest
from slipstream.train.progress import Clock

_MARK = "\u2042user-text\u2042"
_ROUNDS = 6  # attempts to replace user turns that came out empty or twice
_SHORTEST = 4  # characters of a prompt
_SURPLUS = 1.25  # user turns requested per missing one: a second round costs more than a few too many

OPENINGS = (
    "",
    "Summarize the following article:",
    "",
    "Translate the following German text to English:",
    "",
    "Answer the question at the end with the help of these passages.\n\nPassage 1:",
    "",
    "Solve this problem step by step:",
    "",
    "Write a Python function that",
    "",
    "Who",
    "",
    "Give a short summary of this text in three sentences:",
    "",
    "What is the",
    "",
    "Write a short story about",
    "",
    "Use the following documents to answer the question.\n\n[1]",
    "",
    "Extract the names and dates from this text:",
    "",
    "When was",
    "",
    "Translate this sentence into English:",
    "",
    "Rewrite the following paragraph",
    "",
    "How many",
    "",
    "Imagine that you are",
    "",
    "Explain the difference between",
)
"""How user turns begin by default: half freely, half with what people often ask."""


def seed_of(run: int, purpose: str, number: int) -> int:
    """A 64-bit seed, different for each purpose and number."""
    return int.from_bytes(hashlib.blake2b(f"{run}/{purpose}/{number}".encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class TrainPrompt:
    """A user turn and its system message; "": the chat template's own."""

    text: str
    system: str = ""


def read_files(paths: Iterable[str]) -> list[TrainPrompt]:
    """The prompts of these files, in any format of `slipstream bench`, each text once."""
    return list(dict.fromkeys(TrainPrompt(prompt.text) for path in paths for prompt in load_prompts(Path(path))))


def write_prompts(path: Path, prompts: Iterable[TrainPrompt]) -> None:
    """Write all prompts of a run, atomically, in a format that `slipstream bench` reads."""
    lines = (json.dumps({"prompt": p.text, "system": p.system}, ensure_ascii=False) + "\n" for p in prompts)
    part = path.with_name(f".{path.name}.part")
    part.write_text("".join(lines), encoding="utf-8")
    part.replace(path)


def read_prompts(path: Path) -> list[TrainPrompt]:
    """Read what `write_prompts` wrote."""
    with path.open(encoding="utf-8") as lines:  # not splitlines, which also splits at other characters
        entries = [json.loads(line) for line in lines]
    return [TrainPrompt(entry["prompt"], entry["system"]) for entry in entries]


def as_tokens(tokenizer: Any, prompt: TrainPrompt) -> list[int]:
    """A prompt's tokens: by the chat template, or as plain text if there is none."""
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode(prompt.text))
    turns = _turns(prompt)
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False))


def self_prompts(
    bulk: Bulk,
    tokenizer: Any,
    count: int,
    *,
    systems: Sequence[str] = (),
    openings: Sequence[str] = (),
    seed: int,
    max_tokens: int,
    end_ids: Iterable[int],
    say: Progress,
) -> list[TrainPrompt]:
    """`count` different user turns, written by the target at temperature 1.

    systems, openings: system messages and first words, in turn.
    """
    combinations = [(system, opening) for opening in openings or ("",) for system in systems or ("",)]
    opened = [_user_turn(tokenizer, system, opening) for system, opening in combinations]
    stops = {*end_ids, *(end for turn in opened for end in turn.ends)}
    found: dict[TrainPrompt, None] = {}
    asked = 0
    for _ in range(_ROUNDS):
        missing = count - len(found)
        if missing <= 0:
            break
        numbers = range(asked, asked + int(missing * _SURPLUS) + 1)
        asked = numbers.stop
        requests = (
            (n, BulkRequest(opened[n % len(opened)].ids, seed_of(seed, "user turn", n), 1.0, max_tokens))
            for n in numbers
        )
        written = {}
        with Clock("prompts", len(numbers), max_tokens, say, lambda: bulk.unfinished_tokens) as clock:
            for answer in bulk.write(requests, stops):
                written[answer.number] = answer
                clock.tick(len(answer.tokens))
        for number in numbers:  # in order, which makes the selection independent of timing
            tokens = written[number].tokens.tolist()
            ended = bool(tokens) and tokens[-1] in stops and not written[number].broken
            begun = opened[number % len(opened)].opening
            text = tokenizer.decode([*begun, *tokens[:-1]], skip_special_tokens=True).strip() if ended else ""
            if len(text) >= _SHORTEST and "\ufffd" not in text:
                found[TrainPrompt(text, combinations[number % len(combinations)][0])] = None
        say(f"the target wrote {min(len(found), count):,} of {count:,} prompts")
    if len(found) < count // 2:
        raise ConfigError(
            f"self_prompts={count}: the target wrote only {len(found)} different user turns of up to {max_tokens} "
            "tokens; ask for fewer, or name prompt files (--prompts)"
        )
    return list(found)[:count]


def _turns(prompt: TrainPrompt) -> list[dict[str, str]]:
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": prompt.text}]


@dataclass(frozen=True, slots=True)
class _UserTurn:
    ids: list[int]  # the model's input
    opening: list[int]  # its last tokens, which belong to the user turn
    ends: list[int]  # tokens that end the turn


def _user_turn(tokenizer: Any, system: str, opening: str) -> _UserTurn:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError("self_prompts: the target has no chat template; name prompt files (--prompts FILE)")
    turns = _turns(TrainPrompt(_MARK, system))
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=False, tokenize=False)
    header, found, rest = text.partition(_MARK)
    if not found:
        raise ConfigError("self_prompts: the chat template alters user messages; name prompt files (--prompts FILE)")
    ends = tokenizer.encode(rest, add_special_tokens=False)
    begun = list(tokenizer.encode(opening, add_special_tokens=False)) if opening else []
    return _UserTurn([*tokenizer.encode(header, add_special_tokens=False), *begun], begun, list(ends[:1]))


def answer_requests(
    prompts: Sequence[tuple[int, ...]], *, seed: int, samples: int, temperatures: Sequence[float], max_tokens: int
) -> Iterator[tuple[int, BulkRequest]]:
    """All answers to make, numbered. Temperatures take turns."""
    for number in range(len(prompts) * samples):
        sample, prompt = divmod(number, len(prompts))
        temperature = temperatures[(prompt + sample) % len(temperatures)]
        yield number, BulkRequest(prompts[prompt], seed_of(seed, "answer", number), temperature, max_tokens)
