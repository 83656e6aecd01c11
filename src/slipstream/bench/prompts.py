"""The prompts of a benchmark: those of Slipstream by default, or a file in Spec-Bench's or the plain format.

The gain of speculation depends on the task, so each prompt has a category, and a limit is spread over the categories.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError, read_named


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt of a benchmark."""

    id: str
    category: str
    text: str


def load_prompts(path: Path | None = None) -> list[BenchPrompt]:
    """Read a JSON lines file; None reads the prompts that come with Slipstream."""
    ours = files("slipstream.bench") / "prompts.jsonl"
    lines = (ours.read_text(encoding="utf-8") if path is None else read_named(path, "--prompts")).splitlines()
    prompts = [parse(line, f"{path or 'prompts.jsonl'}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {path}: holds no prompts; one JSON object a line, with 'prompt' or 'turns'")
    return prompts


def parse(line: str, where: str) -> BenchPrompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error}); one JSON object a line is expected") from error
    text = first_turn(entry) if isinstance(entry, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: needs 'prompt' (text) or 'turns' (a list of texts)")
    name = entry.get("id", entry.get("question_id", where.rpartition(":")[2]))
    return BenchPrompt(str(name), str(entry.get("category", "all prompts")), text)


def first_turn(entry: dict[str, Any]) -> Any:
    """The prompt, or the first turn of a conversation, which depends on no earlier answer."""
    turns = entry.get("turns")
    return turns[0] if isinstance(turns, list) and turns else entry.get("prompt")


def by_category(prompts: Iterable[BenchPrompt]) -> dict[str, list[BenchPrompt]]:
    """In order of first appearance."""
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return groups


def select(
    prompts: Sequence[BenchPrompt], categories: Sequence[str] = (), limit: int | None = None
) -> list[BenchPrompt]:
    """The prompts of these categories, at most `limit`, spread evenly over the categories."""
    groups = by_category(prompts)
    unknown = [category for category in categories if category not in groups]
    if unknown:
        raise ConfigError(f"--category {unknown[0]}: not in these prompts; they have {', '.join(groups)}")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: must be 1 or more")
    wanted = [group for category, group in groups.items() if not categories or category in categories]
    dealt = [prompt for deal in zip_longest(*wanted) for prompt in deal if prompt is not None]
    kept = {prompt.id: None for prompt in dealt} if limit is None else {prompt.id: None for prompt in dealt[:limit]}
    return [prompt for group in wanted for prompt in group if prompt.id in kept]
