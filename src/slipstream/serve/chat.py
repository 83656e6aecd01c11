"""`/v1/chat/completions`: answers to conversations, with tool calls where there are tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.core.outputs import Logprob
from slipstream.serve.tools import Call, Parsed, ToolParser
from slipstream.serve.wording import Manner, Piece, Wording, ending_of, quoted, reason_json


class ChatWording(Wording):
    """make_parser: reads tool calls out of one choice's text; None: text is text.

    top_logprobs: alternatives that are told of each token. bytes_of: what a token that reads so stands for.
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        manner: Manner,
        make_parser: Callable[[], ToolParser] | None = None,
        top_logprobs: int = 0,
        bytes_of: Callable[[int, str], bytes] = lambda _, text: text.encode(),
    ) -> None:
        super().__init__(manner)
        self._bytes_of = bytes_of
        self._make_parser = make_parser
        self._parsers: dict[int, ToolParser] = {}
        self._called: dict[int, int] = {}  # by choice: calls that were told
        self._top = top_logprobs

    def opening(self, choices: int) -> str:
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return "".join(self.event(f'{{"index":{index},{role}') for index in range(choices))

    def choice(self, piece: Piece) -> dict[str, Any]:
        parsed = self._parse(piece, last=True)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text, "refusal": None}
        if parsed.calls:
            message["content"] = parsed.text or None
            message["tool_calls"] = [_call(call) for call in parsed.calls]
        return {
            "index": piece.index,
            "message": message,
            "logprobs": None if piece.logprobs is None else self._logprobs(piece),
            **reason_json(piece, self._reason(piece)),
        }

    def events(self, piece: Piece) -> str:
        logprobs = "null" if piece.logprobs is None else json.dumps(self._logprobs(piece), ensure_ascii=False)
        if self._make_parser is None:
            delta = f'{{"content":{quoted(piece.text)}}}' if piece.text else "{}"
            return self._event(piece, delta, logprobs)
        first = self._called.get(piece.index, 0)
        parsed = self._parse(piece, last=piece.finish_reason is not None)
        told: dict[str, Any] = {"content": parsed.text} if parsed.text else {}
        if parsed.calls:
            told["tool_calls"] = [{"index": first + i, **_call(call)} for i, call in enumerate(parsed.calls)]
        if not (told or piece.finish_reason or piece.logprobs or piece.origins or self.manner.token_ids):
            return ""
        return self._event(piece, json.dumps(told, ensure_ascii=True), logprobs)

    def around_text(self, index: int) -> tuple[str, str] | None:
        if self._make_parser is not None or not self.manner.only_text:
            return None
        before = f'{self._head}"choices":[{{"index":{index},"delta":{{"content":'
        return before, f'}},"logprobs":null,"finish_reason":null}}]{self._tail}'

    def _event(self, piece: Piece, delta: str, logprobs: str) -> str:
        ending = ending_of(piece, self._reason(piece))
        more = self.extras(piece)
        return self.event(f'{{"index":{piece.index},"delta":{delta},"logprobs":{logprobs},{ending}{more}}}')

    def _parse(self, piece: Piece, *, last: bool) -> Parsed:
        if self._make_parser is None:
            return Parsed(piece.text)
        if piece.index not in self._parsers:
            self._parsers[piece.index] = self._make_parser()
        parsed = self._parsers[piece.index].feed(piece.text, last=last)
        self._called[piece.index] = self._called.get(piece.index, 0) + len(parsed.calls)
        return parsed

    def _reason(self, piece: Piece) -> str | None:
        return "tool_calls" if piece.finish_reason == "stop" and self._called.get(piece.index) else None

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        content = []
        for token, position in piece.told_tokens:
            best = sorted(position, key=lambda one: position[one].rank)[: self._top]
            told = [self._entry(one, position[one]) for one in best]
            content.append({**self._entry(token, position[token]), "top_logprobs": told})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, entry: Logprob) -> dict[str, Any]:
        text = entry.decoded_token
        written = list(self._bytes_of(token, text))
        return {"token": text, "logprob": max(entry.logprob, -9999.0), "bytes": written}


def _call(call: Call) -> Mapping[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
