"""Sampling: processed probabilities, keyed noise, and the one rule that turns them into a token."""

from __future__ import annotations

from slipstream.sampling.choose import RawLogprobs, choose, processed, raw_logprobs
from slipstream.sampling.noise import gumbel, row_keys, uniform
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.table import Features, SamplingTable

__all__ = [
    "Features",
    "RawLogprobs",
    "SampleRows",
    "SamplingTable",
    "choose",
    "gumbel",
    "processed",
    "raw_logprobs",
    "row_keys",
    "uniform",
]
