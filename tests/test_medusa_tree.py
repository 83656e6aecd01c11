"""The shape of Medusa's tree: the best one for what the heads are known to do, and learnt from what they did."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from slipstream.core.draft import ROOT, Tree
from slipstream.core.errors import ConfigError
from slipstream.core.verdict import Verdict
from slipstream.drafters.medusa_tree import (
    RANKS,
    HeadAcceptance,
    StaticTree,
    Table,
    best_tree,
    chances_under,
    check_table,
    usual_table,
)


def paths(tree: StaticTree) -> list[tuple[int, ...]]:
    """Of each node the ranks from the root on."""
    found: list[tuple[int, ...]] = []
    for node, parent in enumerate(tree.parents):
        above = () if parent == ROOT else found[parent]
        assert tree.heads[node] == len(above)
        found.append((*above, tree.ranks[node]))
    return found


def random_table(seed: int, heads: int = 3, ranks: int = 4) -> Table:
    dice = random.Random(seed)
    return tuple(tuple(dice.random() for _ in range(ranks)) for _ in range(heads))


@pytest.mark.parametrize("seed", range(8))
def test_it_takes_the_likeliest_paths(seed: int) -> None:
    """Against all paths there are, of ranks in any order."""
    table = random_table(seed)
    every = [p for depth in (1, 2, 3) for p in itertools.product(range(4), repeat=depth)]
    chance = {p: math.prod(table[head][rank] for head, rank in enumerate(p)) for p in every}
    best = sorted(chance.values(), reverse=True)
    for nodes in (1, 5, 20, 63):
        tree = best_tree(table, nodes)
        assert len(set(paths(tree))) == nodes
        assert [chance[p] for p in paths(tree)] == pytest.approx(best[:nodes])
        assert tree.chances == pytest.approx(best[:nodes])
        Tree(tuple(range(nodes)), tree.parents).check(nodes, nodes)  # parents stand before their children


def test_its_first_nodes_are_the_best_smaller_tree() -> None:
    whole = best_tree(random_table(3))
    small = best_tree(random_table(3), 9)
    assert (whole.heads[:9], whole.ranks[:9], whole.parents[:9]) == (small.heads, small.ranks, small.parents)


def test_one_head_has_as_many_nodes_as_ranks() -> None:
    tree = best_tree(usual_table(1))
    assert tree.ranks == tuple(range(RANKS))
    assert tree.parents == (ROOT,) * RANKS


def test_sure_heads_make_a_chain_and_unsure_ones_a_bush() -> None:
    sure = best_tree(((0.9, 0.05), (0.9, 0.05), (0.9, 0.05)), 3)
    assert paths(sure) == [(0,), (0, 0), (0, 0, 0)]
    unsure = best_tree(((0.3, 0.25, 0.2), (0.3, 0.25, 0.2)), 3)
    assert paths(unsure) == [(0,), (1,), (2,)]


def test_chances_under_another_table() -> None:
    tree, other = best_tree(random_table(1), 20), random_table(2)
    wanted = [math.prod(other[head][rank] for head, rank in enumerate(p)) for p in paths(tree)]
    assert chances_under(tree, other) == pytest.approx(wanted)


def verdict(tree: StaticTree, path: tuple[int, ...], drafted: int) -> Verdict:
    return Verdict("a", (0,) * (len(path) + 1), drafted, len(path), path)


def test_it_learns_what_was_offered_under_a_right_path() -> None:
    prior: Table = ((0.5, 0.5), (0.5, 0.5))
    tree = best_tree(prior, 6)
    assert paths(tree) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    learnt = HeadAcceptance(prior)
    for _ in range(10_000):
        learnt.observe(tree, verdict(tree, (1, 4), 6))  # rank 1, then rank 0
    (a, b), (c, d) = learnt.table
    assert a == pytest.approx(0, abs=0.02)
    assert b == pytest.approx(1, abs=0.02)
    assert c == pytest.approx(1, abs=0.02)
    assert d == pytest.approx(0, abs=0.02)


def test_it_learns_nothing_of_what_was_not_offered() -> None:
    prior: Table = ((0.5, 0.4), (0.3, 0.2))
    tree = best_tree(prior, 6)
    learnt = HeadAcceptance(prior)
    for _ in range(1000):
        learnt.observe(tree, verdict(tree, (), 1))  # only the first node was offered, and wrong
    assert learnt.table[0][0] < 0.1
    assert (learnt.table[0][1], *learnt.table[1]) == pytest.approx((0.4, 0.3, 0.2))


def test_it_follows_texts_that_change() -> None:
    prior: Table = ((0.5,),)
    tree = best_tree(prior, 1)
    learnt = HeadAcceptance(prior)
    for _ in range(20_000):
        learnt.observe(tree, verdict(tree, (0,), 1))
    for _ in range(8_000):
        learnt.observe(tree, verdict(tree, (), 1))
    assert learnt.table[0][0] < 0.3  # over all that it saw: 0.71


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0.5]], "one row for each of the 2 heads"),
        ([[0.5], []], r"acceptance\[1\]=\[\]: must be 1 to 10 numbers from 0 to 1"),
        ([[0.5], [1.5]], r"acceptance\[1\]=\[1\.5\]"),
        ([[0.5], ["a"]], r"acceptance\[1\]=\['a'\]"),
        ([[0.5], [0.1] * 11], r"acceptance\[1\]"),
        ("nonsense", "one row for each"),
        (7, "one row for each"),
    ],
)
def test_tables_that_cannot_be(table: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_table(table, 2, "acceptance")  # type: ignore[arg-type]
