"""Tokens per second of whole answers, and of reading prompts: the same work for every engine.

An engine is a function here: prompts of token ids in, answers out. What is particular to ours comes last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from slipstream.core.errors import ConfigError

if TYPE_CHECKING:
    from slipstream import LLM

MULTI_TURN = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
PEER_DEPTH = 5
DEEPEST = 10
"""Tokens of a draft model's draft: as many as the peers', and the most where the planner may choose."""
BATCHES = (8, 32)
LONGEST_PROMPT = 3500
CONTEXT = 8192
LONG_PROMPT, SHORT_PROMPT = 8000, 1024
LONG_REPEATS, SHORT_REPEATS = 3, 7
IDLE_TOKENS = 64
QUICK_TOKENS = 8

Generate = Callable[[Sequence[list[int]]], list[list[int]]]
Seconds = Callable[[], float]


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


def stream_of(tokenizer: Any, path: Path, wanted: int) -> list[int]:
    """The turns of the file one after another as token ids, at least so many where the file has them."""
    ids: list[int] = []
    for row in questions(path):
        for turn in row["turns"]:
            ids += tokenizer.encode(turn, add_special_tokens=False)
        if len(ids) >= wanted:
            break
    return ids


def windows(stream: Sequence[int], start: int, length: int, count: int) -> list[list[int]]:
    """Prompts of so many tokens, one behind the other in the stream; from its beginning again where it ends."""
    size = len(stream)
    return [[stream[(start + i * length + j) % size] for j in range(length)] for i in range(count)]


def rates(
    generate: Generate,
    prompts: Sequence[list[int]],
    batches: Sequence[int] = BATCHES,
    *,
    quick: Generate | None = None,
    warm: Callable[[], None] = lambda: None,
    seconds: Seconds = time.perf_counter,
) -> dict[str, Any]:
    """Tokens per second one at a time and in batches, all of it done once before; `warm` hears when that is over.

    quick: the same engine with short answers, to warm up for single prompts. Without it the answers are whole: which
    shapes an engine meets may depend on what it guesses.
    """
    parts = {size: [batch_of(prompts, i * size, size) for i in range(2)] for size in batches}
    for part in parts.values():
        for batch in part:
            generate(batch)
    for prompt in prompts:
        (quick or generate)([prompt])
    warm()
    start = seconds()
    answers = [generate([prompt])[0] for prompt in prompts]
    taken = seconds() - start
    tokens = sum(map(len, answers))
    out: dict[str, Any] = {"tokens": tokens, "tok_s@1": tokens / taken, "answers": answers}
    for size, part in parts.items():
        start = seconds()
        tokens = sum(len(answer) for batch in part for answer in generate(batch))
        out[f"tok_s@{size}"] = tokens / (seconds() - start)
    return out


def batch_of(prompts: Sequence[list[int]], start: int, size: int) -> list[list[int]]:
    return [prompts[i % len(prompts)] for i in range(start, start + size)]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Reading prompts: the rate over a long one, and the time to the first token of a short one."""

    tokens: int
    tok_s: float
    first_tokens: int
    first_ms: float


def prefill_part(
    generate: Generate, stream: Sequence[int], context: int, seconds: Seconds = time.perf_counter
) -> Prefill:
    """generate: answers with one token. Every repetition has other token ids."""
    long, short = min(LONG_PROMPT, context - 1), min(SHORT_PROMPT, context - 1)

    def median_of(prompts: list[list[int]]) -> float:
        taken = []
        for prompt in prompts:
            start = seconds()
            generate([prompt])
            taken.append(seconds() - start)
        return median(taken[1:])  # the first warms up

    long_s = median_of(windows(stream, 0, long, 1 + LONG_REPEATS))
    short_s = median_of(windows(stream, (1 + LONG_REPEATS) * long, short, 1 + SHORT_REPEATS))
    return Prefill(long, long / long_s, short, short_s * 1e3)


PREFILL_TOKENS = (1 + LONG_REPEATS) * LONG_PROMPT + (1 + SHORT_REPEATS) * SHORT_PROMPT

# --- ours -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """What our engine is opened with."""

    target: str
    drafters: tuple[str, ...]
    device: str
    dtype: str
    context: int  # the longest prompt with its answer
    planner: Literal["adaptive", "fixed"] = "adaptive"

    @property
    def modes(self) -> tuple[str, ...]:
        names = tuple(drafter.split(":")[0] for drafter in self.drafters)
        return ("plain", *names, *(("deep",) if "model" in names else ()))


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds until an engine was there, and until its first token after that."""

    open_s: float
    first_token_s: float


@contextmanager
def opened(setup: Setup, tell: Callable[[Start], None] = lambda _: None) -> Iterator[LLM]:
    """Our engine; closed, and held by nobody, afterwards. `tell` hears how long the start took."""
    from slipstream import LLM

    begin = time.perf_counter()
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
        there = time.perf_counter()
        answering(llm, "plain", 1)([[5, 6, 7, 8]])
        tell(Start(there - begin, time.perf_counter() - there))
        yield llm
    finally:
        llm.close()


def answering(llm: LLM, mode: str, max_tokens: int, told: list[Any] | None = None) -> Generate:
    """Our engine in one of its modes, greedy; `told` collects what each answer says about its speculation."""
    from slipstream import SamplingParams, SpeculationParams

    speculation = {
        "plain": SpeculationParams(enabled=False),
        "model": SpeculationParams(drafter="model", draft_tokens=PEER_DEPTH),
        "deep": SpeculationParams(drafter="model", draft_tokens=DEEPEST),  # as deep as pays
    }.get(mode) or SpeculationParams(drafter=mode)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, speculation=speculation)

    def generate(prompts: Sequence[list[int]]) -> list[list[int]]:
        outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)]
        assert not any(o.error for o in outputs), [o.error for o in outputs]
        if told is not None:
            told.extend(o.speculation for o in outputs)
        return [list(o.token_ids) for o in outputs]

    return generate


def prompts_for(tokenizer: Any, path: Path, context: int, max_tokens: int) -> list[list[int]]:
    return [encode(tokenizer, text, min(LONGEST_PROMPT, context - max_tokens - 1)) for text in spread(path)]


def _crowds(told: Sequence[Any], batches: Sequence[int]) -> dict[str, dict[str, float]]:
    """What answers in batches say of their rounds: how deep the drafts were, and where the time went."""
    found, end = {}, 0
    for size in batches:
        begin, end = end, end + 2 * size
        part = told[begin:end]
        rounds = sum(s.rounds for s in part)
        found[str(size)] = {
            "drafted_per_round": sum(s.drafted for s in part) / rounds,
            "accepted_per_round": sum(s.accepted for s in part) / rounds,
            **{f"{name}_s": sum(getattr(s, f"{name}_s") for s in part) for name in ("draft", "verify", "host")},
        }
    return found


def modes_part(
    llm: LLM,
    modes: Sequence[str],
    prompts: Sequence[list[int]],
    max_tokens: int,
    tell: Callable[[str, dict[str, Any]], None],
    batches: Sequence[int] = BATCHES,
) -> None:
    """Whole answers in each mode. `tell` hears of a mode as soon as it was measured; plain must come first."""
    from slipstream.models.graphs import Recorded, recorded

    reference: list[list[int]] = []
    for mode in modes:
        told: list[Any] = []
        plain = mode == "plain"
        quick = answering(llm, mode, QUICK_TOKENS) if plain else None
        before = replace(recorded)

        def warm(told: list[Any] = told, before: Recorded = before) -> None:
            told.clear()
            before.graphs, before.seconds = recorded.graphs, recorded.seconds

        found = rates(answering(llm, mode, max_tokens, told), prompts, batches, quick=quick, warm=warm)
        alone = told[: len(prompts)]
        rounds = sum(s.rounds for s in alone)
        answers = found.pop("answers")
        reference = answers if plain else reference
        found |= {
            "rounds": rounds,
            "drafted": sum(s.drafted for s in alone),
            "accepted": sum(s.accepted for s in alone),
            "ms_per_round": {
                part: sum(getattr(s, f"{part}_s") for s in alone) / rounds * 1e3 for part in ("draft", "verify", "host")
            },
            "answers_of": len(answers),
            "crowds": _crowds(told[len(prompts) :], batches),
            "recorded_while_timed": {
                "graphs": recorded.graphs - before.graphs,
                "seconds": recorded.seconds - before.seconds,
            },
        }
        if not plain:
            found["same_as_plain"] = sum(a == b for a, b in zip(answers, reference, strict=True))
        tell(mode, found)
