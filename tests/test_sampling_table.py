"""The table of parameters: its columns, and the features that requests use together."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.core.params import SamplingParams
from slipstream.sampling import Features, SamplingTable
from slipstream.sampling.table import Columns

V = 12
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


def test_features_are_what_the_slots_ask_for() -> None:
    table = SamplingTable(4, V)
    table.add(0, SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1), seed=0)
    table.add(1, SamplingParams(top_p=0.5), seed=0, end_ids=[1])
    table.add(2, SamplingParams(top_k=V, min_tokens=3, presence_penalty=1), seed=0, end_ids=[1])
    assert table.features([]) == Features()
    assert table.features([0]) == Features(greedy=True)  # filters do nothing at temperature 0
    assert table.features([0, 1]) == Features(greedy=True, sampled=True, top_p=True)
    assert table.features([2]) == Features(sampled=True, penalties=True, min_tokens=True)
    table.remove(2)
    table.add(2, SamplingParams(temperature=0), seed=0)
    assert table.features([2, 0]) == Features(greedy=True)
