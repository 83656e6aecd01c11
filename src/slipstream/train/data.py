"""The data of a run: prompts and the target's own answers, on disk. A stopped run continues where it was.

Prompts come from files, or a chat model writes them itself: it was trained on conversations, so after the header of a
user turn it writes what a user might say. Tokens lie in parts of up to 2,048 sequences, two bytes a token where the
vocabulary allows; each part is written whole.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.bench.prompts import load_prompts
from slipstream.core.errors import ConfigError
from slipstream.engine.build import eos_ids
from slipstream.engine.memory import available_bytes
from slipstream.models.load import load_config, load_tokenizer, pick_device, pick_dtype
from slipstream.models.parity import open_model
from slipstream.models.paths import Progress
from slipstream.train.bulk import ROUNDS, Bulk, BulkRequest, lane_bytes
from slipstream.train.config import TrainConfig
from slipstream.train.progress import Clock, sized, under_way
from slipstream.train.ranks import Ranks

_MARK = "\u2042user-text\u2042"
_ATTEMPTS = 6  # attempts to replace user turns that came out empty or twice
_SHORTEST = 4  # characters of a prompt
_SURPLUS = 1.25  # user turns requested per missing one: a second round costs more than a few too many

OPENINGS = tuple(
    words
    for opening in (
        "Summarize the following article:",
        "Translate the following German text to English:",
        "Answer the question at the end with the help of these passages.\n\nPassage 1:",
        "Solve this problem step by step:",
        "Write a Python function that",
        "Who",
        "Give a short summary of this text in three sentences:",
        "What is the",
        "Write a short story about",
        "Use the following documents to answer the question.\n\n[1]",
        "Extract the names and dates from this text:",
        "When was",
        "Translate this sentence into English:",
        "Rewrite the following paragraph",
        "How many",
        "Imagine that you are",
        "Explain the difference between",
    )
    for words in ("", opening)
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
    for _ in range(_ATTEMPTS):
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


_PART = 2048  # sequences in a part


@dataclass(frozen=True, slots=True)
class Corpus:
    """Prompts with their answers, ordered by number."""

    tokens: NDArray[np.uint32]  # [N]: all sequences, concatenated
    starts: NDArray[np.int64]  # [S + 1]
    prompt_lengths: NDArray[np.int64]  # [S]
    numbers: NDArray[np.int64]  # [S]: number of each answer

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> NDArray[np.int64]:  # [S]
        return np.diff(self.starts)

    @property
    def answer_tokens(self) -> int:
        return int((self.lengths - self.prompt_lengths).sum())

    def at(self, index: int) -> NDArray[np.uint32]:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def counts(self, vocab_size: int) -> Tensor:  # [V] int64
        """Occurrences of each token in the answers."""
        place = np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], self.lengths)
        is_answer = place >= np.repeat(self.prompt_lengths, self.lengths)
        return torch.from_numpy(np.bincount(self.tokens[is_answer], minlength=vocab_size).astype(np.int64))


class CorpusWriter:
    """Adds sequences to a folder. Each rank writes files of its own."""

    def __init__(self, folder: Path, vocab_size: int, rank: int = 0) -> None:
        self._folder, self._rank = folder, rank
        self._kind = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._held: list[tuple[int, int, NDArray[np.uint32]]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._parts = len(list(folder.glob(f"part-{rank:03}-*.npz")))

    def add(self, number: int, prompt: Sequence[int], answer: NDArray[np.int32]) -> None:
        whole = np.concatenate((np.asarray(prompt, dtype=np.uint32), answer.astype(np.uint32)))
        self._held.append((number, len(prompt), whole))
        if len(self._held) >= _PART:
            self.flush()

    def flush(self) -> None:
        """Write what was added to the disk."""
        if not self._held:
            return
        numbers, prompts, wholes = zip(*self._held, strict=True)
        name = f"part-{self._rank:03}-{self._parts:05}.npz"
        part = self._folder / f".{name}.part"
        with part.open("wb") as file:
            np.savez(
                file,
                tokens=np.concatenate(wholes).astype(self._kind),
                lengths=np.array([len(whole) for whole in wholes], dtype=np.int64),
                prompt_lengths=np.array(prompts, dtype=np.int64),
                numbers=np.array(numbers, dtype=np.int64),
            )
        part.replace(self._folder / name)
        self._held, self._parts = [], self._parts + 1


def load_corpus(folder: Path) -> Corpus:
    """Read all parts in the folder."""
    tokens: list[NDArray[np.uint32]] = [np.zeros(0, dtype=np.uint32)]
    columns: dict[str, list[NDArray[np.int64]]] = {"lengths": [], "prompt_lengths": [], "numbers": []}
    for file in sorted(folder.glob("part-*.npz")):
        try:
            with np.load(file, allow_pickle=False) as part:
                tokens.append(part["tokens"].astype(np.uint32))
                for name, column in columns.items():
                    column.append(part[name].astype(np.int64))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{file}: cannot read it ({error}); remove it to have its answers made again") from error
    lengths, prompt_lengths, numbers = (
        np.concatenate([np.zeros(0, dtype=np.int64), *column]) for column in columns.values()
    )
    flat, ends = np.concatenate(tokens), np.cumsum(lengths)
    if len(flat) != lengths.sum() or (prompt_lengths > lengths).any():
        raise ConfigError(f"{folder}: the lengths in its parts do not add up; remove them to have them made again")
    order = np.argsort(numbers, kind="stable")
    own = [flat[ends[i] - lengths[i] : ends[i]] for i in order]
    return Corpus(
        np.concatenate([np.zeros(0, dtype=np.uint32), *own]),
        np.concatenate(([0], np.cumsum(lengths[order]))),
        prompt_lengths[order],
        numbers[order],
    )


_MADE_OF = (
    "prompts", "self_prompts", "systems", "openings", "samples", "temperatures", "max_prompt_tokens", "max_tokens",
    "held_out",
)  # fmt: skip
"""The settings that decide what the data is."""
_SHARE = 0.8  # of the free memory, for lanes


@dataclass(frozen=True, slots=True)
class Data:
    """A run's training data and held-out prompts."""

    corpus: Corpus
    held_out: tuple[tuple[int, ...], ...]  # prompts
    record: Mapping[str, Any]  # the contents of data.json: how it was made


def gather(config: TrainConfig, target: Path, ranks: Ranks, say: Progress) -> Data:
    """Read the run's data; make what is missing."""
    folder = config.data_folder
    noted = folder / "data.json"
    record = json.loads(noted.read_text()) if noted.exists() else None
    if record is None and not (config.prompts or config.self_prompts):
        raise ConfigError(f"data={config.data!r}: has no data.json; name prompts to make data there")
    if record is not None and (config.prompts or config.self_prompts):
        _check_same(config, target, record)
    if record is None or not record["complete"]:
        wanted = record["made_of"] if record is not None else _made_of(config, target)
        if not (folder / "prompts.jsonl").exists():
            _check_enough(config, target, wanted)
        folder.mkdir(parents=True, exist_ok=True)
        if ranks.leads:
            _note(noted, {"made_of": wanted, "complete": False})
        ranks.wait()
        rates = _Maker(config, wanted, target, ranks, say).make()
        ranks.wait()
        corpus = load_corpus(folder)
        record = {
            "made_of": wanted,
            "complete": True,
            "answers": len(corpus),
            "answer_tokens": corpus.answer_tokens,
            "tokens": int(corpus.starts[-1]),
            **rates,
        }
        if ranks.leads:
            _note(noted, record)
    with under_way(say, f"reading the data in {folder}"):
        tokenizer: Any = load_tokenizer(target, config.trust_remote_code)
        _, held_out = _split(_usable(folder, tokenizer, record["made_of"]), record["made_of"])
        return Data(load_corpus(folder), tuple(held_out), record)


def _made_of(config: TrainConfig, target: Path) -> dict[str, Any]:
    found = {name: getattr(config, name) for name in _MADE_OF}
    if config.self_prompts and not config.openings:
        found["openings"] = OPENINGS
    return {**json.loads(json.dumps(found)), "seed": config.seed, "target": target.name}


def _check_same(config: TrainConfig, target: Path, record: Mapping[str, Any]) -> None:
    for name, value in _made_of(config, target).items():
        theirs = record["made_of"].get(name)
        if theirs != value:
            raise ConfigError(
                f"{name}={value!r}: the data in {config.data_folder} was made with {theirs!r}; give {theirs!r}, leave "
                "out the options of the prompts to use it as it is (--data), or choose another folder"
            )


def _check_enough(config: TrainConfig, target: Path, made_of: Mapping[str, Any]) -> None:
    """Before anything is written, refuse prompts that leave nothing to train on and files that cannot be read."""
    files = read_files(made_of["prompts"])
    tokenizer: Any = load_tokenizer(target, config.trust_remote_code)
    fitting = sum(len(as_tokens(tokenizer, prompt)) <= made_of["max_prompt_tokens"] for prompt in files)
    _check_held_out(made_of, fitting + made_of["self_prompts"])


def _check_held_out(made_of: Mapping[str, Any], prompts: int) -> None:
    held, longest = made_of["held_out"], made_of["max_prompt_tokens"]
    if prompts <= held:
        raise ConfigError(
            f"held_out={held}: only {prompts} prompts have at most {longest} tokens (max_prompt_tokens); "
            "name more prompts, or lower held_out"
        )


def _note(file: Path, record: Mapping[str, Any]) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(record, indent=2) + "\n")
    part.replace(file)


def _usable(folder: Path, tokenizer: Any, made_of: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The prompts as tokens, without those that are too long."""
    tokens = [tuple(as_tokens(tokenizer, prompt)) for prompt in read_prompts(folder / "prompts.jsonl")]
    return [ids for ids in tokens if 0 < len(ids) <= made_of["max_prompt_tokens"]]


def _split(
    prompts: list[tuple[int, ...]], made_of: Mapping[str, Any]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Prompts for training and held-out prompts, chosen by the seed."""
    count = made_of["held_out"]
    _check_held_out(made_of, len(prompts))
    order = np.random.default_rng(made_of["seed"]).permutation(len(prompts)).tolist()
    return [prompts[i] for i in order[count:]], [prompts[i] for i in order[:count]]


class _Maker:
    """Makes prompts and answers with the target, which it loads and releases."""

    def __init__(
        self, config: TrainConfig, made_of: Mapping[str, Any], target: Path, ranks: Ranks, say: Progress
    ) -> None:
        self._config, self._made_of, self._ranks, self._say = config, made_of, ranks, say
        self._folder, self._target = config.data_folder, target
        self._tokenizer: Any = load_tokenizer(target, config.trust_remote_code)

    def make(self) -> dict[str, float]:
        with under_way(self._say, f"loading the target to write answers, {sized(self._target)}"):
            bulk, ends = self._open()
        listed = self._folder / "prompts.jsonl"
        if self._ranks.leads and not listed.exists():
            prompts = read_files(self._made_of["prompts"])
            if wanted := self._made_of["self_prompts"]:
                prompts += self_prompts(
                    bulk,
                    self._tokenizer,
                    wanted,
                    systems=self._made_of["systems"],
                    openings=self._made_of["openings"],
                    seed=self._made_of["seed"],
                    max_tokens=self._made_of["max_prompt_tokens"],
                    end_ids=ends,
                    say=self._say,
                )
            write_prompts(listed, dict.fromkeys(prompts))
        self._ranks.wait()
        rates = self._answer(bulk)
        del bulk
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return rates

    def _open(self) -> tuple[Bulk, frozenset[int]]:
        config, made_of = self._config, self._made_of
        device = pick_device(self._ranks.device(config.device))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dtype = pick_dtype("auto", device, load_config(self._target, config.trust_remote_code))
        runner = open_model(self._target, dtype, device, trust_remote_code=config.trust_remote_code, progress=self._say)
        # the target writes a user turn after its template's header, an answer after the whole prompt
        longest = made_of["max_prompt_tokens"] + max(made_of["max_tokens"], made_of["max_prompt_tokens"])
        longest = min(longest, runner.max_positions - 2 * ROUNDS)
        if longest <= made_of["max_tokens"]:
            raise ConfigError(
                f"max_tokens={made_of['max_tokens']}: the target's {runner.max_positions} positions leave no "
                "room for a prompt; ask for shorter answers"
            )
        fits = int(available_bytes(device) * _SHARE // lane_bytes(runner, longest))
        lanes = max(1, min(config.lanes, fits))
        ends = eos_ids(runner, self._tokenizer)
        self._longest = longest
        return Bulk(runner, lanes=lanes, max_len=longest, end_ids=ends), ends

    def _answer(self, bulk: Bulk) -> dict[str, float]:
        made_of, ranks = self._made_of, self._ranks
        prompts, _ = _split(_usable(self._folder, self._tokenizer, made_of), made_of)
        prompts = [ids for ids in prompts if len(ids) + made_of["max_tokens"] <= self._longest]
        known = set(load_corpus(self._folder).numbers.tolist())
        wanted = answer_requests(
            prompts,
            seed=made_of["seed"],
            samples=made_of["samples"],
            temperatures=made_of["temperatures"],
            max_tokens=made_of["max_tokens"],
        )
        mine = {number: ask for number, ask in wanted if number % ranks.world == ranks.rank and number not in known}
        writer = CorpusWriter(self._folder, self._vocab(), ranks.rank)
        say: Progress = self._say if ranks.leads else lambda _: None
        clock = Clock("answers", len(mine), made_of["max_tokens"], say, lambda: bulk.unfinished_tokens)
        broken = 0
        try:
            with clock:
                for answer in bulk.write(mine.items()):
                    broken += answer.broken
                    if not answer.broken:
                        writer.add(answer.number, mine[answer.number].prompt, answer.tokens)
                    clock.tick(len(answer.tokens))
        finally:
            writer.flush()  # also after Ctrl-C
        return {"seconds": clock.seconds, "tokens_per_s": clock.rate, "broken": broken}

    def _vocab(self) -> int:
        return int(load_config(self._target, self._config.trust_remote_code).vocab_size)
