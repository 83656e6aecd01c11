"""Fields of OpenAI's and vLLM's that are taken where they ask for nothing, and refused by name where they ask for more.

Clients and libraries send many of them at their usual values. What a field asks for and nobody here does is never
ignored. `docs/serving.md` has the same table for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that may be null, or one of these values."""

    values: tuple[Any, ...]
    remedy: str

    def fits(self, value: Any) -> bool:
        return value is None or any(type(value) is type(one) and value == one for one in self.values)


_MIN_GAIN = Neutral((), "an option of the server for all requests (--min-gain); leave it out")
_EVERYWHERE = {
    "min_gain": _MIN_GAIN,
    "store": Neutral((False,), "nothing is stored here; leave it out"),
    "metadata": Neutral(({},), "it belongs to stored answers, and nothing is stored here; leave it out"),
    "service_tier": Neutral(("auto", "default"), "all requests are served alike; leave it out"),
    "priority": Neutral((0,), "all requests are served alike; leave it out"),
    "best_of": Neutral((1,), "answers are not ranked; ask for n, and choose"),
    "use_beam_search": Neutral((False,), "there are no beams; leave it out"),
    "length_penalty": Neutral((1.0, 1), "it belongs to beams, and there are none; leave it out"),
    "early_stopping": Neutral((False,), "it belongs to beams, and there are none; leave it out"),
    "prompt_logprobs": Neutral((), "those of a prompt are not kept; leave it out"),
    "truncate_prompt_tokens": Neutral((), "prompts are not cut; send a shorter one"),
    "allowed_token_ids": Neutral((), "use structured_outputs, or logit_bias"),
    "spaces_between_special_tokens": Neutral((True,), "special tokens are written with spaces; leave it out"),
    "return_tokens_as_token_ids": Neutral((False,), "tokens are written as text; speculation.origins has their ids"),
}
CHAT: Mapping[str, Neutral] = {
    **_EVERYWHERE,
    "reasoning_effort": Neutral(("none",), "models differ in how they are told; try chat_template_kwargs"),
    "verbosity": Neutral(("medium",), "say in a message how long the answer is to be"),
    "modalities": Neutral((["text"],), "answers are text; leave it out"),
    "audio": Neutral((), "answers are text; leave it out"),
    "web_search_options": Neutral((), "nothing is looked up; leave it out"),
    "functions": Neutral(([],), "it is the old name: send tools"),
    "function_call": Neutral(("none",), "it is the old name: send tool_choice"),
    "prompt_cache_retention": Neutral(("in_memory", "in-memory"), "prompts are kept as long as there is room"),
}
COMPLETION: Mapping[str, Neutral] = {**_EVERYWHERE, "suffix": Neutral(("",), "nothing is written before a text")}
STREAM_OPTIONS: Mapping[str, Neutral] = {
    "include_obfuscation": Neutral((False,), "a server pads its streams or not (--stream-chunk-chars); leave it out"),
    "continuous_usage_stats": Neutral((False,), "usage comes at the end; leave it out"),
}
SPECULATION: Mapping[str, Neutral] = {"min_gain": _MIN_GAIN}
ASSISTANT: Mapping[str, Neutral] = {
    "audio": Neutral((), "messages are text; leave it out"),
    "function_call": Neutral((), "it is the old name: send tool_calls"),
    "annotations": Neutral(([],), "nothing is looked up; leave it out"),
}
"""What answers of OpenAI's client have, so that they can be sent back as they are."""
