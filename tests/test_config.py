"""Every bound of an engine's configuration, and sizes as people write them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slipstream.core.errors import ConfigError
from slipstream.engine.config import EngineConfig, parse_bytes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory": 1},
        {"memory": 0.9},
        {"max_model_len": 2},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_draft_rows": 1},
        {"max_num_seqs": 256, "max_num_batched_tokens": 256, "max_draft_rows": 256},
        {"page_size": 1},
        {"draft_tokens": 0},
        {"draft_tokens": 63},
        {"planner": "fixed"},
    ],
)
def test_what_is_right_passes(options: dict[str, Any]) -> None:
    EngineConfig(**options)


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("memory", 0, "above 0 bytes"),
        ("memory", -5, "above 0 bytes"),
        ("memory", 1.5, "a part such as 0.9"),
        ("memory", "2GiB", "whole bytes, or a part"),
        ("max_model_len", 1, "2 or more"),
        ("max_model_len", 64.0, "a whole number, 2 or more, or None"),
        ("max_num_seqs", 0, "1 or more"),
        ("max_num_seqs", None, "1 or more"),
        ("max_num_seqs", True, "1 or more"),
        ("max_model_len", True, "a whole number, 2 or more, or None"),
        ("max_num_seqs", 2.0, "1 or more"),
        ("max_num_batched_tokens", 0, "1 or more"),
        ("max_num_batched_tokens", 31, "at least max_num_seqs=32"),
        ("max_draft_rows", 0, "1 or more"),
        ("max_draft_rows", 31, "at least max_num_seqs=32"),
        ("page_size", 0, "1 or more"),
        ("draft_tokens", -1, "0 to 63"),
        ("draft_tokens", 64, "0 to 63"),
        ("draft_tokens", 2.5, "a whole number, 0 to 63, or None"),
        ("planner", "clever", "one of adaptive, fixed"),
    ],
)
def test_what_is_wrong_explains_itself(key: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{key}={value!r}: must be ")) as caught:
        EngineConfig(**{key: value})
    assert remedy in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("options", "device", "step", "single"),
    [
        ({}, "cpu", 512, 512),
        ({}, "cuda", 8192, 2048),
        ({"max_num_seqs": 256}, "cpu", 512, 512),
        ({"max_num_seqs": 257}, "cpu", 514, 514),
        ({"max_num_seqs": 256, "max_num_batched_tokens": 256}, "cpu", 256, 256),
        ({"max_num_batched_tokens": 1024}, "cuda", 1024, 1024),
        ({"max_num_batched_tokens": 16384}, "cuda", 16384, 2048),
    ],
)
def test_a_step_leaves_room_for_prompts(options: dict[str, Any], device: str, step: int, single: int) -> None:
    config = EngineConfig(**options)
    assert (config.step_tokens(device), config.pass_tokens(device)) == (step, single)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, None),
        (0, 0),
        (123, 123),
        ("123", 123),
        ("1e9", 10**9),
        ("64 B", 64),
        ("2k", 2000),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("512MB", 512 * 10**6),
        ("512mib", 512 * 2**20),
        (" 1.5 GiB ", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("1Gi", 2**30),
        ("1TB", 10**12),
        ("1TiB", 2**40),
    ],
)
def test_sizes_as_people_write_them(size: Any, expected: int | None) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize(
    "size", ["", "much", "GB", "-1GB", "1.2.3GB", ".", "2PB", "1e999", "2 G i B", "0x10", b"2GB", []]
)
def test_other_sizes_are_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"memory={size!r}: must be bytes or a size such as 512MB or 2GiB")):
        parse_bytes(size)
