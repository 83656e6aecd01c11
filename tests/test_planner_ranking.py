"""Many nodes are ranked as few are: the same trees, by lists and by arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.draft import Tree
from slipstream.plan.ranking import FewNodes, ManyNodes


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[Tree], list[list[float]], list[float]]:
    trees, promises = [], []
    for _ in range(draw(st.integers(1, 6))):
        count = draw(st.integers(0, 8))
        chained = draw(st.booleans())
        parents = tuple(i - 1 if chained else draw(st.integers(-1, i - 1)) for i in range(count))
        trees.append(Tree(tuple(range(count)), parents))
        promises.append([draw(st.sampled_from([0.1, 0.25, 0.5, 0.5, 0.9, 1.0])) for _ in range(count)])
    factors = [draw(st.sampled_from([1.0, 0.5, 0.3])) for _ in trees]
    return trees, promises, factors


@given(forests(), st.data())
@settings(max_examples=200, deadline=None)
def test_lists_and_arrays_agree(forest: tuple[list[Tree], list[list[float]], list[float]], data: st.DataObject) -> None:
    trees = forest[0]
    nodes = sum(len(tree) for tree in trees)
    if not nodes:
        return
    few, many = FewNodes(*forest), ManyNodes(*forest)
    assert np.allclose(few.expected(3), many.expected(3))
    count = data.draw(st.integers(1, nodes))
    one, other = few.take(count), many.take(count)
    assert one.trees == other.trees
    assert one.promised == pytest.approx(other.promised)
    assert sum(len(tree) for tree in one.trees) == count
    for tree in one.trees:
        tree.check(100, 63)
