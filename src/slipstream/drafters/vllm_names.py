"""vLLM's `speculative_config`, where it means something that we have: in the library, and on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import ConfigError

_KNOWN = ("method", "model", "num_speculative_tokens")
_ALONE = {
    "ngram": "ngram",
    "suffix": "suffix",
    "mtp": "mtp",
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "mimo_mtp": "mtp",
}
_WITH_MODEL = {"draft_model": "model", "eagle": "eagle", "eagle3": "eagle3", "medusa": "medusa"}


@dataclass(frozen=True, slots=True)
class Named:
    """A drafter as we name it."""

    drafter: str
    draft_tokens: int | None


def from_vllm(config: object) -> Named:
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config={config!r}: must be a mapping with {sorted(_KNOWN)}")
    given: Mapping[str, Any] = config
    if unknown := sorted(set(given) - set(_KNOWN)):
        raise ConfigError(f"speculative_config: unknown keys {unknown}; known are {sorted(_KNOWN)}")
    method, model = given.get("method", "draft_model" if "model" in given else None), given.get("model")
    tokens = given.get("num_speculative_tokens")
    if not isinstance(method, str | None):
        raise ConfigError(f"speculative_config: method={method!r} must be a text, such as ngram")
    if method in _ALONE:
        return Named(_ALONE[method], tokens)
    if method in _WITH_MODEL and model:
        return Named(f"{_WITH_MODEL[method]}:{model}", tokens)
    raise ConfigError(
        f"speculative_config: method={method!r}, model={model!r}; known are {', '.join(_ALONE)}, and with a model "
        f"{', '.join(_WITH_MODEL)}"
    )
