"""Merged trees on the host: all paths of all trees, each once, within the budget, and credit where it is due."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.draft import CUT, MAX_NODES, ROOT, Tree, merge_trees
from slipstream.core.verdict import Authors, Verdict
from tree_cases import paths, trees

few_trees = st.lists(trees(), min_size=1, max_size=4)


@settings(deadline=None, max_examples=200)
@given(few_trees)
def test_a_union_with_room_has_all_paths_and_no_others(given_trees: list[Tree]) -> None:
    merged = merge_trees(given_trees, 1000)
    merged.tree.check(vocab_size=10, budget=MAX_NODES)
    assert set(paths(merged.tree)) == {path for tree in given_trees for path in paths(tree)}
    assert len(set(paths(merged.tree))) == len(merged.tree)


@settings(deadline=None, max_examples=200)
@given(few_trees, st.integers(0, 30))
def test_a_cut_union_is_a_tree_within_the_budget(given_trees: list[Tree], budget: int) -> None:
    merged = merge_trees(given_trees, budget)
    merged.tree.check(vocab_size=10, budget=budget)
    whole = merge_trees(given_trees, 1000)
    assert len(merged.tree) == min(budget, len(whole.tree))
    first = given_trees[0]
    kept = min(budget, len(first))
    assert (merged.tree.tokens[:kept], merged.tree.parents[:kept]) == (first.tokens[:kept], first.parents[:kept])


@settings(deadline=None, max_examples=200)
@given(few_trees, st.integers(0, 40))
def test_owners_are_those_who_proposed_the_path(given_trees: list[Tree], budget: int) -> None:
    merged = merge_trees(given_trees, budget)
    found = paths(merged.tree)
    for node, word in enumerate(merged.owners):
        assert word == sum(1 << i for i, tree in enumerate(given_trees) if found[node] in paths(tree))
    for tree, places in zip(given_trees, merged.places, strict=True):
        assert len(places) == len(tree)
        for path, place in zip(paths(tree), places, strict=True):
            assert path not in found if place == CUT else found[place] == path


@settings(deadline=None, max_examples=200)
@given(few_trees, st.integers(1, 40), st.data())
def test_each_author_is_told_what_it_would_have_heard_alone(
    given_trees: list[Tree], budget: int, data: st.DataObject
) -> None:
    merged = merge_trees(given_trees, budget)
    accepted: list[int] = []  # a walk from the root, as far as it goes
    while True:
        below = [n for n, parent in enumerate(merged.tree.parents) if parent == (accepted[-1] if accepted else ROOT)]
        step = data.draw(st.sampled_from([None, *below]))
        if step is None:
            break
        accepted.append(step)
    path = [merged.tree.tokens[node] for node in accepted]
    names = tuple("abcd"[: len(given_trees)])
    choices = tuple(range(100, 101 + len(merged.tree)))
    authors = Authors(names, merged.places)
    verdict = Verdict("r", (*path, 9), len(merged.tree), len(path), tuple(accepted), choices, authors)
    for name, tree, places in zip(names, given_trees, merged.places, strict=True):
        share = verdict.share(name)
        own = [j for j, place in enumerate(places) if place != CUT]
        alone = 0
        while alone < len(path) and tuple(path[: alone + 1]) in [paths(tree)[j] for j in own]:
            alone += 1
        assert (share.drafted, share.accepted, share.tokens) == (len(own), alone, verdict.tokens)
        assert verdict.counts(name) == (len(own), alone)
        assert [paths(tree)[own[j]] for j in share.path] == [tuple(path[: i + 1]) for i in range(alone)]
        if merged.tree.tokens:
            assert share.choices == (100, *[101 + places[j] for j in own])
            assert share.authors.names == (name,)
    stranger = verdict.share("stranger")
    assert (stranger.drafted, stranger.accepted, stranger.tokens) == (0, 0, verdict.tokens)
    assert verdict.counts("stranger") == (0, 0)
