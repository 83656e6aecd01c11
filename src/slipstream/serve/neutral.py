"""Fields of OpenAI's and vLLM's that nothing here acts on.

A field that does not change an answer is ignored. One that would change it is taken where it asks for nothing, because
clients send many at their usual values, and refused by name where it asks for more. `docs/serving.md` has the same
table for people. Fields that stand in no table are unknown (`schemas.unknown_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that may be null, or one of these values. values=None: any value, since it changes no answer."""

    values: tuple[Any, ...] | None
    remedy: str = ""

    def fits(self, value: Any) -> bool:
        if value is None or self.values is None:
            return True
        return any(type(value) is type(one) and value == one for one in self.values)


IGNORED = Neutral(None)
_MIN_GAIN = Neutral((), "an option of the server for all requests (--min-gain); leave it out")
_EVERYWHERE = {
    "min_gain": _MIN_GAIN,
    "store": IGNORED,
    "metadata": IGNORED,
    "service_tier": IGNORED,
    "priority": IGNORED,
    "request_id": IGNORED,
    "guided_decoding_backend": IGNORED,
    "prompt_cache_retention": IGNORED,
    "prompt_cache_options": IGNORED,
    "use_beam_search": Neutral((False,), "there are no beams; leave it out"),
    "length_penalty": Neutral((1.0, 1), "it belongs to beams, and there are none; leave it out"),
    "early_stopping": Neutral((False,), "it belongs to beams, and there are none; leave it out"),
    "prompt_logprobs": Neutral((), "those of a prompt are not kept; leave it out"),
    "spaces_between_special_tokens": Neutral((True,), "special tokens are written with spaces; leave it out"),
    "return_tokens_as_token_ids": Neutral((False,), "tokens are written as text; return_token_ids has their ids"),
    "logits_processors": Neutral(([],), "no code of a request is run; use logit_bias, allowed_token_ids or bad_words"),
    "prompt_embeds": Neutral((), "prompts are text or token ids; leave it out"),
    "guided_whitespace_pattern": Neutral((), "use structured_outputs with disable_any_whitespace"),
    "kv_transfer_params": Neutral((), "caches are not handed on between servers; leave it out"),
}
CHAT: Mapping[str, Neutral] = {
    **_EVERYWHERE,
    "verbosity": IGNORED,
    "include_reasoning": IGNORED,
    "echo": Neutral((False,), "an answer does not repeat the last message; leave it out"),
    "modalities": Neutral((["text"],), "answers are text; leave it out"),
    "audio": Neutral((), "answers are text; leave it out"),
    "web_search_options": Neutral((), "nothing is looked up; leave it out"),
    "functions": Neutral(([],), "it is the old name: send tools"),
    "function_call": Neutral(("none",), "it is the old name: send tool_choice"),
    "chat_template": Neutral((), "it is the model's own; start the server with another model folder"),
    "documents": Neutral(([],), "write them into a message; speculation.material drafts from them"),
    "mm_processor_kwargs": Neutral(({},), "messages are text; leave it out"),
}
COMPLETION: Mapping[str, Neutral] = {**_EVERYWHERE, "suffix": Neutral(("",), "nothing is written before a text")}
STREAM_OPTIONS: Mapping[str, Neutral] = {
    "include_obfuscation": Neutral((False,), "a server pads its streams or not (--stream-chunk-chars); leave it out"),
}
SPECULATION: Mapping[str, Neutral] = {"min_gain": _MIN_GAIN}
_CACHED = {"cache_control": IGNORED}
PART: Mapping[str, Neutral] = {**_CACHED, "annotations": IGNORED}
TOOL: Mapping[str, Neutral] = _CACHED
CALL: Mapping[str, Neutral] = {
    "index": IGNORED,
    "parsed_arguments": IGNORED,
    "provider_specific_fields": IGNORED,
    "extra_content": IGNORED,
}
MESSAGE: Mapping[str, Neutral] = {
    **CALL,
    **_CACHED,
    "id": IGNORED,
    "status": IGNORED,
    "parsed": IGNORED,
    "annotations": IGNORED,
    "thinking_blocks": IGNORED,
    "reasoning_details": IGNORED,
    "audio": Neutral((), "messages are text; leave it out"),
    "function_call": Neutral((), "it is the old name: send tool_calls"),
}
"""Keys that clients add to messages of answers and send back with the next turn."""
