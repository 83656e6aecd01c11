"""An engine for tests of the command line, and what a command did. Not a test file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from slipstream.core.outputs import (
    CompletionOutput,
    DrafterStats,
    Logprob,
    RequestOutput,
    SpeculationStats,
    Timing,
)
from slipstream.core.params import SamplingParams

WORDS = ["Hello", " to", " you", "\n"]


@dataclass
class FakeLLM:
    """Answers every prompt with four words, and remembers what it was asked."""

    fail: BaseException | None = None
    interrupt_at: int | None = None
    error: str | None = None
    max_model_len: int = 4096
    remarks: tuple[str, ...] = ()
    made_with: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    chats: list[list[dict[str, str]]] = field(default_factory=list)
    aborted: int = 0
    closed: bool = False
    memory_plan: Any = field(
        default_factory=lambda: SimpleNamespace(weights_bytes=2**20, draft_weights_bytes=0, cache_bytes=2**20)
    )

    def answer(self, index: int, params: SamplingParams, words: int = 4) -> CompletionOutput:
        stats = SpeculationStats(rounds=words, emitted=words)
        if params.speculation.enabled:
            name = params.speculation.drafter or "ngram"
            stats = SpeculationStats(2, 4, 3, 2, 0.1, 0.2, 0.3, {name: DrafterStats(2, 3, 2)})
        logprobs: list[Mapping[int, Logprob]] | None = None
        if params.logprobs is not None:
            logprobs = [{i: Logprob(-0.5, 1, w), 99: Logprob(-2.0, 2, "?")} for i, w in enumerate(WORDS)]
        return CompletionOutput(
            index,
            "".join(WORDS[:words]),
            list(range(words)),
            logprobs,
            "stop" if words == 4 else None,
            error=self.error,
            timing=Timing(0.0, 0.5, 2.0),
            speculation=stats,
        )

    def generate(
        self, prompts: list[Any], sampling_params: Any = None, *, on_output: Any = None
    ) -> list[RequestOutput]:
        many = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        outputs = []
        for number, (prompt, params) in enumerate(zip(prompts, many, strict=True)):
            self.asked.append((prompt, params))
            answers = [self.answer(i, params) for i in range(params.n)]
            outputs.append(RequestOutput(str(number), None, [1, 2, 3], answers, True))
        return outputs

    def stream(self, prompt: Any, sampling_params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append((prompt, sampling_params))
        if self.fail is not None:
            raise self.fail
        words = 0
        try:
            for words in range(1, 5):
                if words == self.interrupt_at:
                    self.interrupt_at = None
                    raise KeyboardInterrupt
                answer = self.answer(0, sampling_params, words)
                if sampling_params.output_kind == "delta":
                    answer.text, answer.token_ids = WORDS[words - 1], [words - 1]
                yield RequestOutput("0", None, [1, 2, 3], [answer], words == 4)
        finally:
            self.aborted += words < 4

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        self.chats.append([dict(message) for message in messages])
        return [len(message["content"]) for message in messages for _ in range(10)]

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of stdout."""
        value: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return value


Run = Callable[..., Ran]
