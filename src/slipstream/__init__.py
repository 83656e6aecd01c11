"""Slipstream: language models that answer faster without changing what they answer.

from slipstream import LLM, SamplingParams

llm = LLM("default")
print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "LLM": "slipstream.engine.llm",
    "SamplingParams": "slipstream.core.params",
    "SpeculationParams": "slipstream.core.params",
    "StructuredOutputsParams": "slipstream.core.structured",
    "RequestOutput": "slipstream.core.outputs",
    "CompletionOutput": "slipstream.core.outputs",
    "SlipstreamError": "slipstream.core.errors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "SlipstreamError",
    "SpeculationParams",
    "StructuredOutputsParams",
]

if TYPE_CHECKING:
    from slipstream.core.errors import SlipstreamError
    from slipstream.core.outputs import CompletionOutput, RequestOutput
    from slipstream.core.params import SamplingParams, SpeculationParams
    from slipstream.core.structured import StructuredOutputsParams
    from slipstream.engine.llm import LLM


def __getattr__(name: str) -> Any:
    """Import lazily: `slipstream --help` should not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """What there is to import, for those who look."""
    return sorted([*__all__, "__version__"])
