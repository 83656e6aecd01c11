"""The requests of a benchmark, the same for every engine: prompts of a Spec-Bench file, and runs of batches of them.

Only `opened` knows an engine; nothing is imported at the top that a peer's process would have to bring along.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from slipstream.core.errors import ConfigError

if TYPE_CHECKING:
    from slipstream import LLM

MULTI_TURN = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
PEER_DEPTH = 5
"""Length of a draft model's draft, in every engine."""
LONGEST_PROMPT = 3500
CONTEXT = 8192
QUICK_TOKENS = 8
SIZES = (1, 2, 4, 8, 16, 32)
FEWEST = 2
"""Fewest batches of a size; every prompt is asked at least once."""
PATIENCE = 4
"""Most runs that are repeated because CUDA graphs were recorded in them."""

Ask = Callable[[Sequence[int]], list[list[int]]]
"""From the numbers of prompts asked at once to their answers."""
Result = TypeVar("Result")


def spread(path: Path) -> list[str]:
    """The same 14 first turns for every engine."""
    groups: dict[str, list[str]] = {}
    for row in questions(path):
        group = "multi_turn" if row["category"] in MULTI_TURN else row["category"]
        groups.setdefault(group, []).append(row["turns"][0])
    picked = {name: rows[::20][:4] if name == "multi_turn" else rows[3::27][:2] for name, rows in groups.items()}
    return [prompt for rows in picked.values() for prompt in rows]


def questions(path: Path) -> Iterator[dict[str, Any]]:
    """The questions of a Spec-Bench file. Raises `ConfigError` where it is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read as text ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"--prompts {path}:{number}: not JSON ({error}); one object a line is expected"
            ) from error
        if not (isinstance(row, dict) and "category" in row and row.get("turns")):
            raise ConfigError(
                f"--prompts {path}:{number}: needs 'category' and 'turns', as Spec-Bench's questions have"
            )
        yield row


def encode(tokenizer: Any, prompt: str, longest: int = LONGEST_PROMPT) -> list[int]:
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(ids)[:longest]


def first_turns(path: Path, limit: int | None = None) -> list[str]:
    """The first turn of every question, or of `limit` questions, spread over the file."""
    turns: list[str] = [question["turns"][0] for question in questions(path)]
    if limit is None or limit >= len(turns):
        return turns
    return [turns[i * len(turns) // limit] for i in range(limit)]


def prompts_for(tokenizer: Any, path: Path, context: int, max_tokens: int) -> list[list[int]]:
    return [encode(tokenizer, text, min(LONGEST_PROMPT, context - max_tokens - 1)) for text in spread(path)]


def batches(prompts: int, at_once: int) -> list[list[int]]:
    """Numbers of prompts, batch by batch, starting again at the end."""
    count = max(-(-prompts // at_once), FEWEST)
    return [[number % prompts for number in range(i * at_once, (i + 1) * at_once)] for i in range(count)]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all batches."""

    answers: tuple[tuple[int, tuple[int, ...]], ...]  # number of the prompt, tokens
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(answer) for _, answer in self.answers)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def one_run(ask: Ask, prompts: int, at_once: int, seconds: Callable[[], float] = time.perf_counter) -> Run:
    """Run batch after batch, prompts included."""
    parts = batches(prompts, at_once)
    begin = seconds()
    answered = [ask(part) for part in parts]
    taken = seconds() - begin
    pairs = [pair for part, answers in zip(parts, answered, strict=True) for pair in zip(part, answers, strict=True)]
    return Run(tuple((number, tuple(answer)) for number, answer in pairs), taken)


@dataclass(frozen=True, slots=True)
class Timed(Generic[Result]):
    """The runs that count, the number of runs before them, and the graphs recorded in those that count."""

    runs: tuple[Result, ...]
    before: int
    recorded: int


def timed(
    work: Callable[[], Result],
    repeats: int,
    *,
    warm_up: Callable[[], object] | None = None,
    recorded: Callable[[], int] = lambda: 0,
    patience: int = PATIENCE,
) -> Timed[Result]:
    """Time `repeats` runs without recording, after a warm-up run.

    recorded: the number of graphs recorded so far. A run with recording is repeated, at most `patience` times in all.
    """
    (warm_up or work)()
    kept: list[Result] = []
    before, unwanted = 1, 0
    while len(kept) < repeats:
        so_far = recorded()
        result = work()
        new = recorded() - so_far
        if new and before < 1 + patience:
            before += 1
            continue
        unwanted += new
        kept.append(result)
    return Timed(tuple(kept), before, unwanted)


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of our engine. context: the longest prompt with its answer."""

    target: str
    drafters: tuple[str, ...]
    device: str
    dtype: str
    context: int
    planner: Literal["adaptive", "fixed"] = "adaptive"


@contextmanager
def opened(setup: Setup) -> Iterator[LLM]:
    """Our engine, closed at the end. The caller must not keep a reference."""
    from slipstream import LLM

    llm = LLM(
        setup.target,
        drafter=list(setup.drafters) or None,
        dtype=setup.dtype,
        device=setup.device,
        memory="24GiB",
        max_model_len=setup.context,
        planner=setup.planner,
        rounds="queued" if setup.device == "cpu" else None,  # a CPU is here to try what a GPU will do
        prefix_caching=False,  # the same prompts come again and again, and are to be computed each time
    )
    try:
        yield llm
    finally:
        llm.close()
