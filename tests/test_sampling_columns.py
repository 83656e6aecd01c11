"""What the host writes, a row at a time, and the device reads by columns."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.sampling.noise import stream_key, stream_keys
from slipstream.sampling.table import Columns

KINDS = {
    "odd": (0, torch.bool),
    "warm": (0.5, torch.float32),
    "most": (-math.inf, torch.float32),
    "share": (1, torch.float64),
    "key": (7, torch.int64),
}


@pytest.mark.parametrize("rows", [1, 3, 65, 300])
def test_columns_are_what_nobody_wrote_and_what_was_written(rows: int) -> None:
    columns = Columns(rows, KINDS, torch.device("cpu"))
    for name, (value, dtype) in KINDS.items():
        assert columns.by_name[name].tolist() == [value] * rows
        assert columns.by_name[name].dtype == dtype
    columns.write(rows - 1, {"odd": True, "share": 0.1, "key": -(1 << 63)})
    assert columns.by_name["odd"].tolist() == [False] * (rows - 1) + [True]
    assert columns.by_name["share"].tolist() == [1.0] * (rows - 1) + [0.1]  # all its digits
    assert columns.by_name["key"].tolist() == [7] * (rows - 1) + [-(1 << 63)]
    assert columns.by_name["warm"].tolist() == [0.5] * rows  # not spoken of


def test_columns_begin_where_tensors_would() -> None:
    columns = Columns(5, KINDS, torch.device("cpu")).by_name
    assert {column.data_ptr() % 64 for column in columns.values()} == {0}  # kernels are compiled for 16
    assert all(column.is_contiguous() for column in columns.values())


def test_columns_stay_where_they_are() -> None:
    """Captured work reads them by address."""
    columns = Columns(4, KINDS, torch.device("cpu"))
    before = {name: column.data_ptr() for name, column in columns.by_name.items()}
    columns.write(2, {"key": 1})
    assert {name: column.data_ptr() for name, column in columns.by_name.items()} == before


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 20))
def test_the_key_of_one_request_is_that_of_many(seed: int, sample: int) -> None:
    signed = seed - (1 << 64) if seed >> 63 else seed
    assert stream_key(seed, sample) == int(stream_keys(torch.tensor(signed), torch.tensor(sample)))
