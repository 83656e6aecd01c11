"""`/v1/completions`: prompts as they are, and their continuations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.core.outputs import Logprob
from slipstream.serve.wording import Manner, Piece, Wording, ending_of, quoted, reason_json


class CompletionWording(Wording):
    """echoes: what each choice begins with, where the prompt is to be repeated."""

    kind = chunk_kind = "text_completion"

    def __init__(self, manner: Manner, echoes: Sequence[str] = ()) -> None:
        super().__init__(manner)
        self._echoes = echoes
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}  # by choice: characters of the tokens that were told

    def choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": self._echo(piece.index) + piece.text,
            "logprobs": None if piece.logprobs is None else self._logprobs(piece),
            **reason_json(piece),
        }

    def events(self, piece: Piece) -> str:
        logprobs = "null" if piece.logprobs is None else json.dumps(self._logprobs(piece))
        text = self._echo(piece.index) + piece.text if self._echoes else piece.text
        ending = ending_of(piece) + self.extras(piece)
        return self.event(f'{{"index":{piece.index},"text":{quoted(text)},"logprobs":{logprobs},{ending}}}')

    def around_text(self, index: int) -> tuple[str, str] | None:
        if self._echoes or not self.manner.only_text:
            return None
        before = f'{self._head}"choices":[{{"index":{index},"text":'
        return before, f',"logprobs":null,"finish_reason":null}}]{self._tail}'

    def _echo(self, index: int) -> str:
        if not self._echoes or index in self._begun:
            return ""
        self._begun.add(index)
        return self._echoes[index]

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        """OpenAI's old form: parallel lists."""
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        at = self._offsets.get(piece.index, 0)
        for token, position in piece.told_tokens:
            mine = position[token]
            told["tokens"].append(mine.decoded_token)
            told["token_logprobs"].append(_finite(mine.logprob))
            told["top_logprobs"].append({p.decoded_token: _finite(p.logprob) for p in _best_first(position)})
            told["text_offset"].append(at)
            at += len(mine.decoded_token)
        self._offsets[piece.index] = at
        return told


def _best_first(position: Mapping[int, Logprob]) -> list[Logprob]:
    return sorted(position.values(), key=lambda entry: entry.rank)


def _finite(value: float) -> float:
    """JSON knows no infinity: what cannot come has OpenAI's number for that."""
    return max(value, -9999.0)
