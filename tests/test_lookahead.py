"""The lookahead drafter: its pool, its window, what it learns from choices, and that it never changes a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactness import FEW, Case, differences, plain, run
from slipstream import LLM, SamplingParams, SpeculationParams
from slipstream.core.draft import MAX_NODES, ROOT, Tree
from slipstream.core.errors import ConfigError
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.lookahead import LookaheadDrafter, NgramPool, TreeBuilder, Window
from slipstream.plan.planner import AdaptivePlanner
from slipstream.plan.types import StepSeen

Ids = tuple[int, ...]
few = st.integers(0, 3)


def ask(drafter: LookaheadDrafter, tokens: Sequence[int], budget: int = MAX_NODES) -> Tree:
    (tree,) = drafter.propose([DraftRequest("a", tokens, 1, SamplingParams(), slot=0)], [budget])
    tree.check(vocab_size=100_000, budget=budget)
    return tree


def paths_of(tree: Tree) -> list[Ids]:
    """The tokens from the root to each node."""
    paths: list[Ids] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), token))
    return paths


def follow(drafter: LookaheadDrafter, said: Callable[[Ids], int], prompt: Sequence[int], rounds: int) -> list[Verdict]:
    """Let it draft for a target that says `said` behind a text."""
    tokens = list(prompt)
    drafter.start(DraftRequest("a", tokens, len(prompt), SamplingParams(), slot=0))
    verdicts: list[Verdict] = []
    for _ in range(rounds):
        tree = ask(drafter, tokens)
        paths = paths_of(tree)
        choices = tuple(said((*tokens, *path)) for path in [(), *paths])
        path: list[int] = []
        emitted = [choices[0]]
        while (*emitted,) in paths:
            path.append(paths.index((*emitted,)))
            emitted.append(choices[1 + path[-1]])
        tokens += emitted
        verdicts.append(Verdict("a", tuple(emitted), len(tree), len(path), tuple(path), choices))
        drafter.observe(verdicts[-1:])
    return verdicts


class TestPool:
    @settings(max_examples=200)
    @given(st.lists(st.tuples(few, few, few), max_size=60), st.integers(1, 4), st.integers(1, 8))
    def test_it_keeps_the_latest(self, grams: list[Ids], per_token: int, size: int) -> None:
        pool = NgramPool(per_token, size)
        kept: list[Ids] = []  # a slow twin: in the order in which they were met
        touched: list[int] = []  # first tokens in the order in which they were met
        for gram in grams:
            pool.add(gram)
            first = gram[0]
            kept = [g for g in kept if g != gram] + [gram]
            touched = [t for t in touched if t != first] + [first]
            mine = [g for g in kept if g[0] == first]
            if len(mine) > per_token:
                kept.remove(mine[0])
            if len(kept) > size:
                stale = next(t for t in touched if any(g[0] == t for g in kept))
                kept.remove(next(g for g in kept if g[0] == stale))
            assert len(pool) == len(kept) <= size
            for token in range(4):
                assert list(pool.after(token)) == [g[1:] for g in reversed(kept) if g[0] == token]


class TestWindow:
    @settings(max_examples=200)
    @given(st.data(), st.integers(1, 5), st.integers(1, 4))
    def test_every_column_stands_where_it_should(self, data: st.DataObject, width: int, levels: int) -> None:
        """Level j of column i is reached by the first i heads behind the root and then its own column."""
        columns = data.draw(st.lists(st.lists(few, min_size=levels, max_size=levels), min_size=width, max_size=width))
        root = data.draw(few)
        window, growing = Window(), TreeBuilder(MAX_NODES)
        window.columns = [list(column) for column in columns]
        window.plant(growing, root)
        tree = growing.tree()
        tree.check(vocab_size=4, budget=MAX_NODES)
        assert len(tree) <= width * levels - 1
        paths = paths_of(tree)
        heads = [column[0] for column in columns][1:]
        want = [(*heads[:i], *columns[i][1 : 1 + j]) for i in range(width) for j in range(levels)]
        assert {path for path in want if path} == set(paths)

        # the target's choice behind a row says where the row stands: its number in base 4, as it were
        choices = [100 + row for row in range(1 + len(tree))]
        emitted = data.draw(st.integers(1, width + 2))
        grams = window.advance(choices, emitted)
        assert len(grams) == width
        for i, gram in enumerate(grams):
            own = [root if i == 0 else columns[i][0], *columns[i][1:]]
            end = (*heads[:i], *columns[i][1:])
            row = 0 if not end else 1 + paths.index(end)
            assert gram == [*own, 100 + row]
        # what stands i + j behind the new root stood `emitted` further behind the old one
        assert window.columns == [gram[1:] for gram in grams[emitted - 1 :]]

    def test_an_unusable_choice_ends_the_window(self) -> None:
        window, growing = Window(), TreeBuilder(9)
        window.columns = [[1, 2], [3, 4]]
        window.plant(growing, 9)
        nodes = {path: 1 + node for node, path in enumerate(paths_of(growing.tree()))}
        choices = [0] * 4
        choices[nodes[3, 4]] = -1
        assert window.advance(choices, 1) == [[9, 2, 0]]
        assert window.columns == []


class TestDrafter:
    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(few, min_size=1, max_size=8),
        st.lists(st.integers(0, MAX_NODES), min_size=1, max_size=12),
        st.integers(1, 8),
        st.integers(2, 6),
    )
    def test_trees_are_sound_at_any_budget(
        self, prompt: list[int], budgets: list[int], window: int, ngram: int
    ) -> None:
        drafter = LookaheadDrafter(window=window, ngram=ngram)
        tokens = list(prompt)
        for i, budget in enumerate(budgets):
            tree = ask(drafter, tokens, budget)  # checked there
            choices = tuple((7 * row + i) % 4 for row in range(1 + len(tree)))
            tokens += choices[:1]
            drafter.observe([Verdict("a", choices[:1], len(tree), 0, (), choices)])
            assert len(drafter._texts["a"].window.columns) <= window

    def test_it_learns_what_the_target_says_elsewhere(self) -> None:
        """The target counts up: nothing is ever said twice, but the window has counted further before the text does."""

        def count(text: Ids) -> int:
            return text[-1] + 1

        verdicts = follow(LookaheadDrafter(window=8, ngram=4, from_text=False), count, [60, 70, 46, 40], 20)
        assert sum(v.accepted for v in verdicts[:2]) == 0  # nothing to draft from yet
        assert sum(v.accepted for v in verdicts) >= 3

    def test_n_grams_of_the_text_are_candidates(self) -> None:
        text = [1, 2, 3, 4, 5, 6, 1, 2]
        assert (3, 4, 5) in paths_of(ask(LookaheadDrafter(), text))
        assert (3, 4, 5) not in paths_of(ask(LookaheadDrafter(from_text=False, window=1), text))

    def test_little_room_goes_to_fewer_columns(self) -> None:
        drafter = LookaheadDrafter(window=8, ngram=4)
        for budget, columns in ((63, 8), (16, 4), (7, 2), (3, 1), (1, 0), (0, 0)):
            ask(drafter, [1, 2, 3], budget)
            assert len(drafter._texts["a"].window.columns) == columns

    def test_an_unverified_tree_is_forgotten_also_without_room_for_a_window(self) -> None:
        drafter = LookaheadDrafter(window=8, ngram=4)
        text = [1, 2, 3, 1]
        ask(drafter, text, 16)  # the planner declines it
        assert len(ask(drafter, text, 1)) == 1  # what the text goes on with, and no window
        drafter.observe([Verdict("a", (2, 3), 1, 1, (0,), (2, 3))])

    def test_a_tree_that_was_cut_teaches_nothing(self) -> None:
        drafter = LookaheadDrafter(window=4, ngram=3)
        tree = ask(drafter, [1, 2, 3])
        before = [list(column) for column in drafter._texts["a"].window.columns]
        known = len(drafter._texts["a"].pool)
        nodes = len(tree) - 1  # pages were short
        drafter.observe([Verdict("a", (50,), nodes, 0, (), (50,) * (1 + nodes))])
        assert drafter._texts["a"].window.columns == before
        assert len(drafter._texts["a"].pool) == known
        drafter.observe([Verdict("a", (50,), len(tree), 0, (), (50,) * (1 + len(tree)))])
        assert all(column[-1] == 50 for column in drafter._texts["a"].window.columns)

    def test_what_ended_is_forgotten(self) -> None:
        drafter = LookaheadDrafter()
        ask(drafter, [1, 2, 3])
        drafter.stop("a")
        drafter.stop("b")
        assert not drafter._texts
        drafter.observe([Verdict("a", (1,), 1, 0, (), (1, 2))])

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"ngram": 1}, "ngram=1"),
            ({"window": 0}, "window=0"),
            ({"window": 17, "ngram": 5}, "window=17: must be 1 to 16"),
            ({"candidates": 0}, "candidates=0"),
            ({"pool_size": 0}, "pool_size=0"),
        ],
    )
    def test_bad_settings_are_refused(self, options: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            LookaheadDrafter(**options)


@pytest.mark.parametrize("rounds", ["eager", "queued"])
class TestExactness:
    @pytest.mark.parametrize(("slope", "drafts"), [(0.001, True), (0.15, False)])
    def test_the_planner_takes_its_trees_whole_where_rows_are_cheap(
        self, open_llm: Callable[..., LLM], rounds: str, slope: float, drafts: bool
    ) -> None:
        class Told(AdaptivePlanner):
            """Believes what it is told of costs, whatever this machine does."""

            def observe_step(self, step: StepSeen) -> None:
                seconds = 1 + slope * (step.rows - 1)
                super().observe_step(replace(step, pass_s=seconds, total_s=seconds))

        llm = open_llm(drafter="lookahead", rounds=rounds)
        llm.engine.drafting.planner = Told(slope)
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logit_bias=FEW)
        batch = [Case("greedy", (10, 20, 30), params)]
        (got,) = run(llm, batch, "lookahead")
        assert not differences(batch, plain(llm, batch), [got])
        assert (got.speculation.accepted > 0) == drafts
        assert (got.speculation.drafted > 0) == drafts


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_it_learns_from_requests_that_are_judged_by_rejection(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, rounds: str
) -> None:
    """What comes of a round is drawn by another rule; behind the window stands what the target chooses all the same."""
    widths: list[tuple[int, int]] = []
    advance = Window.advance

    def watched(window: Window, choices: Sequence[int], emitted: int) -> list[list[int]]:
        columns = len(window.columns)
        grams = advance(window, choices, emitted)
        widths.append((columns, len(grams)))
        return grams

    monkeypatch.setattr(Window, "advance", watched)
    llm = open_llm(drafter="lookahead", planner="fixed", rounds=rounds)
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=12, ignore_eos=True, speculation=SpeculationParams(verifier="rejection")
    )
    llm.generate([[5, 6, 7]], params)
    assert widths
    assert all(grams == columns for columns, grams in widths)
