"""The rule of sampling against plain references: filters, penalties, ranks and the table behind them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exactness import EXTRAS, TEMPERATURES
from interpreted import as_bits
from slipstream.core.errors import InvalidRequest
from slipstream.core.params import SamplingParams, SpeculationParams
from slipstream.sampling import Features, SampleRows, SamplingTable, choose, gumbel, processed, raw_logprobs, row_keys
from slipstream.sampling.rank import HOPELESS, rank
from slipstream.sampling.table import Columns

V = 12


@dataclass
class Case:
    """A batch of rows, a slot each."""

    logits: Tensor
    rows: SampleRows
    table: SamplingTable
    features: Features

    def alone(self, row: int) -> Case:
        here = slice(row, row + 1)
        path = None if self.rows.path is None else self.rows.path[here]
        rows = SampleRows(self.rows.slots[here], self.rows.positions[here], self.rows.generated[here], path)
        return Case(self.logits[here], rows, self.table, self.table.features(rows.slots.tolist()))

    def choose(self, candidates: int = 1024) -> list[int]:
        return choose(self.logits, self.rows, self.table, self.features, candidates=candidates).tolist()

    def processed(self, candidates: int = 1024) -> Tensor:
        return processed(self.logits, self.rows, self.table, self.features, candidates=candidates)


def batch(logits: Tensor, params: list[SamplingParams], *, generated: int = 0, seed: int = 1, **more: object) -> Case:
    table = SamplingTable(len(params), logits.shape[1])
    for slot, wanted in enumerate(params):
        table.add(slot, wanted, seed=seed + slot, **more)  # type: ignore[arg-type]
    slots = torch.arange(len(params))
    rows = SampleRows(slots, slots + 10, torch.full_like(slots, generated))
    return Case(logits, rows, table, table.features(slots.tolist()))


def reference(logits: Tensor, params: SamplingParams, clear: Callable[[bool], object] = bool) -> np.ndarray:
    """p [V] in float64, plainly. `clear` is told whether the answer hangs on more than the last digit."""
    x = logits.to(torch.float64).numpy().copy()
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    if params.allowed_token_ids is not None:
        x[[token for token in range(len(x)) if token not in params.allowed_token_ids]] = -np.inf
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    p: np.ndarray = np.zeros(len(x))
    if params.greedy:
        p[order[0]] = 1
        return p
    p = np.exp((x - x.max()) / np.float32(params.temperature))
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        before = 0.0
        for token in order:
            clear(abs(before - params.top_p) > 1e-5)
            reached, before = before >= params.top_p, before + p[token]
            if reached:
                p[token] = 0
    if params.min_p:
        clear(np.abs(p / p.max() - params.min_p).min() > 1e-5 or params.min_p == 1)
        p[p < params.min_p * p.max()] = 0
    p /= p.sum()
    return p


quarters = st.integers(-16, 16).map(lambda n: n / 4)  # coarse, so that ties are common


many_logits = st.lists(st.one_of(quarters, st.floats(-8, 8, width=32)), min_size=V, max_size=V)


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7, 1e-40]),
    top_k=st.sampled_from([0, 0, 1, 3, 8, V - 1, V, 1000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    allowed_token_ids=st.one_of(st.none(), st.lists(st.integers(0, V - 1), min_size=1, max_size=5)),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5, width=32), max_size=3),
)


any_rows = st.lists(st.tuples(many_logits, any_params), min_size=1, max_size=3)


def case_of(drawn: list[tuple[list[float], SamplingParams]], seed: int = 1) -> Case:
    return batch(torch.tensor([logits for logits, _ in drawn]), [params for _, params in drawn], seed=seed)


@settings(deadline=None, max_examples=80)
@given(many_logits, any_params)
def test_the_processed_distribution_is_the_plain_one(logits: list[float], params: SamplingParams) -> None:
    case = case_of([(logits, params)])
    p = case.processed().softmax(dim=1)[0].numpy()
    expected = reference(case.logits[0], params, assume)
    assert set(np.flatnonzero(p > 0)) <= set(np.flatnonzero(expected > 0))
    np.testing.assert_allclose(p, expected, atol=2e-5)


@settings(deadline=None, max_examples=80)
@given(any_rows, st.integers(0, 2**64 - 10))
def test_the_choice_is_the_largest_processed_score_with_noise(
    drawn: list[tuple[list[float], SamplingParams]], seed: int
) -> None:
    case = case_of(drawn, seed)
    noise = gumbel(case.table.noise_keys(case.rows), torch.arange(V, dtype=torch.int32))
    assert case.choose() == (case.processed() + noise).argmax(dim=1).tolist()


@settings(deadline=None, max_examples=80)
@given(any_rows, st.sampled_from([1, 2, 5, V - 1]))
def test_neither_company_nor_the_way_of_sorting_matters(
    drawn: list[tuple[list[float], SamplingParams]], candidates: int
) -> None:
    case = case_of(drawn)
    together = case.choose()
    assert together == [case.alone(row).choose()[0] for row in range(len(drawn))]
    assert together == case.choose(candidates)
    assert torch.equal(case.processed(), case.processed(candidates))


def test_company_does_not_matter_in_a_real_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = 49152
    logits = torch.randn(7, wide, generator=generator).mul_(4).to(torch.bfloat16)  # bf16: hundreds of ties a row
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=3, top_p=0.99),  # more than the candidates: needs the full sort
        SamplingParams(top_k=2000, top_p=0.95),
        SamplingParams(top_k=50),
        SamplingParams(min_p=0.02),
    ]
    case = batch(logits, params)
    together = case.choose()
    assert together == [case.alone(row).choose()[0] for row in range(7)]
    assert together == case.choose(candidates=64)
    kept = (case.processed() > -math.inf).sum(dim=1).tolist()
    assert kept[0] == 1 and kept[1] == wide and kept[3] > 1024 and kept[5] == 50  # noqa: PT018


def test_ties_go_to_the_lowest_id() -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=1e-30),
    ]
    case = batch(torch.zeros(4, 8), params)
    possible = [row.nonzero()[:, 0].tolist() for row in case.processed() > -math.inf]
    assert possible == [[0], [0, 1, 2], [0, 1, 2, 3], list(range(8))]
    assert case.choose()[0] == 0
    signed_zeros = batch(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), [SamplingParams(top_k=2)])
    assert (signed_zeros.processed(candidates=2)[0] > -math.inf).tolist() == [True, True, False, False]


def test_a_broken_row_gives_nothing_and_harms_no_other() -> None:
    generator = torch.Generator().manual_seed(3)
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.8), SamplingParams(top_k=4)] * 4
    logits = torch.randn(16, V, generator=generator)
    whole = batch(logits, params).choose()
    hurt = logits.clone()
    hurt[4:8, 3] = math.nan
    hurt[8:12, 3] = math.inf
    hurt[12:16] = -math.inf
    tokens = batch(hurt, params).choose()
    assert tokens == whole[:4] + [-1] * 12
    assert (batch(hurt, params).processed()[4:] == -math.inf).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_mask_does_not_hide_a_broken_logit(bad: float) -> None:
    logits = torch.zeros(2, V)
    logits[1, 5] = bad
    case = batch(logits, [SamplingParams(min_tokens=4, temperature=0)] * 2, end_ids=[5])
    assert case.choose() == [0, -1]
    allowed = torch.ones(2, V, dtype=torch.bool)
    allowed[:, 5] = False
    allowed = as_bits(allowed)
    plain = batch(logits, [SamplingParams()] * 2)
    assert choose(plain.logits, plain.rows, plain.table, plain.features, allowed=allowed)[1] == -1


def test_a_grammar_mask_leaves_only_what_it_allows() -> None:
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.9)]
    case = batch(torch.randn(4, V, generator=torch.Generator().manual_seed(1)), params)
    allowed = torch.zeros(4, V, dtype=torch.bool)
    allowed[:3, [2, 7]] = True
    tokens = choose(case.logits, case.rows, case.table, case.features, allowed=as_bits(allowed), candidates=3)
    assert set(tokens[:3].tolist()) <= {2, 7}
    assert tokens[3] == -1  # nothing was allowed


def test_logits_are_left_as_they_were() -> None:
    params = [SamplingParams(logit_bias={1: 3.0}, min_tokens=2, frequency_penalty=1.0, top_p=0.5)]
    case = batch(torch.randn(1, V), params, prompt=[1], output=[2], end_ids=[4])
    before = case.logits.clone()
    tokens = case.choose()
    case.processed()
    assert torch.equal(case.logits, before)
    assert choose(case.logits, case.rows, case.table, case.features, overwrite=True).tolist() == tokens
    assert not torch.equal(case.logits, before)


def test_half_precision_logits_count_as_fp32() -> None:
    params = [SamplingParams(temperature=0.5, top_p=0.9), SamplingParams(temperature=0)]
    logits = torch.randn(2, V).to(torch.bfloat16)
    assert batch(logits, params).choose() == batch(logits.float(), params).choose()


def test_ends_are_forbidden_until_min_tokens() -> None:
    logits = torch.zeros(1, V)
    logits[0, 5] = 9
    params = [SamplingParams(temperature=0, min_tokens=3)]
    tokens = [batch(logits, params, generated=g, end_ids=[5, 6, V + 100]).choose()[0] for g in range(5)]
    assert tokens == [0, 0, 0, 5, 5]


def test_a_bad_word_is_stopped_at_its_last_token_on_every_path() -> None:
    logits = torch.zeros(1, V)
    logits[0, 9] = 5
    table = SamplingTable(3, V)
    greedy = SamplingParams(temperature=0)
    table.add(0, greedy, seed=0, output=[7], bad_words=[[7, 8, 9], [4]])
    table.add(1, greedy, seed=0, output=[7, 8], prompt=[7, 8])
    table.add(2, greedy, seed=0, prompt=[7, 8], bad_words=[[7, 8, 9]])  # the prompt was not generated
    paths = torch.tensor([[-1, -1], [8, -1], [-1, 8], [7, 8], [8, 8], [-1, -1], [-1, -1]])
    slots = torch.tensor([0, 0, 0, 0, 0, 1, 2])
    rows = SampleRows(slots, slots, slots, paths)
    tokens = choose(logits.expand(7, V), rows, table, table.features([0, 1, 2]))
    assert tokens.tolist() == [9, 0, 0, 0, 9, 9, 9]
    table.commit(torch.tensor([0, 2]), torch.tensor([[8, 1], [3, 3]]), torch.tensor([1, 2]))
    assert choose(logits, SampleRows(*[torch.zeros(1, dtype=torch.int64)] * 3), table, table.features([0])) == 0
    first_forbidden = torch.zeros(1, V).index_fill_(1, torch.tensor([4]), 5.0)  # a word of one token, always forbidden
    assert choose(first_forbidden, SampleRows(*[slots[:1]] * 3), table, table.features([0])) == 0


def test_drafts_and_targets_choose_with_the_same_noise() -> None:
    """A draft with the target's own logits is always right: one row at a time, or all rows of a tree at once."""
    table = SamplingTable(2, V)
    table.add(1, SamplingParams(temperature=1.3), seed=2**64 - 1, sample=3)
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([30, 31, 31, 32, 32, 32])  # a tree: rows at one depth share their noise
    slots, features = torch.ones(6, dtype=torch.int64), table.features([1])
    together = choose(logits, SampleRows(slots, positions, positions), table, features)
    for row in range(6):
        rows = SampleRows(slots[:1], positions[row : row + 1], positions[:1])
        assert choose(logits[row : row + 1], rows, table, features) == together[row]
    same = choose(logits[:1].expand(6, V), SampleRows(slots, positions, positions), table, features)
    assert same[1] == same[2] and same[3] == same[4] == same[5]  # noqa: PT018


def drawn(logits: Tensor, table: SamplingTable, draws: int) -> Tensor:  # [draws]
    """Tokens at so many positions, a thousand at a time: that many rows of one request are no pass."""
    found = []
    for positions in torch.arange(draws).split(1000):
        rows = SampleRows(torch.zeros_like(positions), positions, positions)
        found.append(choose(logits.expand(len(positions), -1), rows, table, table.features([0])))
    return torch.cat(found)


def test_a_draft_is_accepted_as_often_as_the_formula_says() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.3, 0.3, 0.1, 0.3])
    draws = 40_000
    table = SamplingTable(1, 4)
    table.add(0, SamplingParams(), seed=5)
    target, draft = (drawn(chances.log(), table, draws) for chances in (p, q))
    alpha = sum(1 / torch.maximum(p / p[i], q / q[i]).sum() for i in range(4))
    assert (target == draft).double().mean() == pytest.approx(float(alpha), abs=4 * 0.5 / math.sqrt(draws))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(top_p=0.9, top_k=5, min_p=0.1),
    ],
    ids=["temperature", "top_k", "top_p", "all"],
)
def test_tokens_come_as_often_as_the_distribution_says(params: SamplingParams) -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.9, 0.0, -0.5, -1.0, 1.2])
    draws = 20_000
    table = SamplingTable(1, 8)
    table.add(0, params, seed=8)
    observed = drawn(logits, table, draws).bincount(minlength=8).numpy()
    expected = reference(logits, params) * draws
    possible = expected > 0
    assert observed[~possible].sum() == 0
    freedom = possible.sum() - 1
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_drafters_have_noise_of_their_own_for_rejection_sampling_alone() -> None:
    """With the exact verifier draft and target must draw with the same noise."""
    table = SamplingTable(2, 16)
    for slot, verifier in enumerate(("exact", "rejection")):
        table.add(slot, SamplingParams(speculation=SpeculationParams(verifier=verifier)), seed=7)  # type: ignore[arg-type]
    features = table.features([0, 1])
    one, other = (table.apart(name, features).streams.tolist() for name in ("one", "other"))
    assert table.streams[0] == table.streams[1] == one[0] == other[0]
    assert len({int(table.streams[1]), one[1], other[1]}) == 3


def test_a_slot_keeps_nothing_of_its_last_request() -> None:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(4))
    loaded = SamplingParams(
        top_p=0.3, top_k=4, min_p=0.3, logit_bias={1: 9, 2: 9}, min_tokens=5, repetition_penalty=5, presence_penalty=2
    )
    fresh = batch(logits, [SamplingParams(presence_penalty=-1)])
    used = SamplingTable(1, V)
    used.add(0, loaded, seed=3, prompt=[1, 2, 3], output=[4, 4], end_ids=[3], bad_words=[[1], [2, 3]])
    used.remove(0)
    used.add(0, SamplingParams(presence_penalty=-1), seed=1)
    everything = Features(*[True] * 9)
    assert torch.equal(processed(logits, fresh.rows, used, everything), fresh.processed())


def test_no_rows_choose_no_tokens() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    table = SamplingTable(1, V)
    table.add(0, SamplingParams(top_p=0.5, frequency_penalty=1, logit_bias={0: 1}), seed=0, bad_words=[[1, 2]])
    rows = SampleRows(empty, empty, empty, torch.zeros(0, 3, dtype=torch.int64))
    assert choose(torch.zeros(0, V), rows, table, table.features([0])).shape == (0,)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    table = SamplingTable(1, V)
    with pytest.raises(InvalidRequest, match=f"logit_bias: token {V} must be 0 to {V - 1}"):
        table.add(0, SamplingParams(logit_bias={V: 1.0}), seed=0)
    with pytest.raises(InvalidRequest, match="allowed_token_ids: token -1"):
        table.add(0, SamplingParams(allowed_token_ids=[-1]), seed=0)
    with pytest.raises(InvalidRequest, match="bad_words: token -1"):
        table.add(0, SamplingParams(), seed=0, bad_words=[[1, -1]])
    with pytest.raises(InvalidRequest, match="at least one token"):
        table.add(0, SamplingParams(), seed=0, bad_words=[[]])


class TestRawLogprobs:
    """Log probabilities of the raw model: values, ranks, and the order of the alternatives."""

    @settings(deadline=None, max_examples=100)
    @given(
        st.lists(st.lists(quarters, min_size=V, max_size=V), min_size=1, max_size=4),
        st.integers(0, V + 2),
        st.integers(0, V - 1),
    )
    def test_against_a_plain_reference(self, drawn: list[list[float]], top: int, chosen: int) -> None:
        found = raw_logprobs(torch.tensor(drawn), torch.full((len(drawn),), chosen), top)
        for row, logits in enumerate(drawn):
            log_p = np.array(logits) - np.log(np.exp(np.array(logits)).sum())
            order = sorted(range(V), key=lambda token: (-logits[token], token))[:top]
            assert found.chosen[row].item() == pytest.approx(log_p[chosen], abs=1e-5)
            assert found.ranks[row] == 1 + sum(x > logits[chosen] for x in logits)
            assert found.top_ids[row].tolist() == order
            assert found.top[row].tolist() == pytest.approx(log_p[order].tolist(), abs=1e-5)

    def test_half_precision_and_impossible_tokens(self) -> None:
        logits = torch.tensor([[1.0, -math.inf, 3.0, 3.0]], dtype=torch.bfloat16)
        found = raw_logprobs(logits, torch.tensor([1]), 4)
        assert found.chosen.dtype == torch.float32
        assert found.chosen.tolist() == [-math.inf]
        assert found.ranks.tolist() == [4]
        assert found.top_ids.tolist() == [[2, 3, 0, 1]]

    def test_where_nothing_was_chosen(self) -> None:
        found = raw_logprobs(torch.zeros(2, 3), torch.tensor([-1, 2]), 0)
        assert found.chosen.tolist() == pytest.approx([-math.inf, -math.log(3)])
        assert found.ranks.tolist() == [0, 1]
        assert found.top_ids.shape == found.top.shape == (2, 0)


tokens = st.integers(0, V - 1)


token_lists = st.lists(tokens, max_size=8)


penalized = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    presence_penalty=st.sampled_from([0.0, 1.1, -2.0]),
)


trees = st.lists(st.tuples(tokens, st.integers(0, 9)), max_size=6)


def plainly(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The penalized logits of one row, by the book."""
    result = []
    for token, x in enumerate(logits):
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token)
        x -= params.presence_penalty * (token in output)
        result.append(x)
    return result


def tree_paths(tree: list[tuple[int, int]]) -> list[list[int]]:
    """The path to the root and to every node; a node's second number picks its parent among those before it."""
    paths: list[list[int]] = [[]]
    for token, parent in tree:
        paths.append([*paths[parent % len(paths)], token])
    return paths


def tree_rows(paths: list[list[int]], slot: int) -> SampleRows:
    depth = max(len(path) for path in paths)
    slots = torch.full((len(paths),), slot)
    lengths = torch.tensor([len(path) for path in paths])
    padded = torch.tensor([path + [-1] * (depth - len(path)) for path in paths], dtype=torch.int64)
    return SampleRows(slots, lengths + 50, lengths, padded.view(len(paths), depth))


def random_logits(rows: int) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(rows)) * 2


@settings(deadline=None, max_examples=100)
@given(penalized, token_lists, token_lists, trees)
def test_every_row_of_a_tree_counts_its_own_path(
    params: SamplingParams, prompt: list[int], output: list[int], tree: list[tuple[int, int]]
) -> None:
    paths = tree_paths(tree)
    table = SamplingTable(3, V)
    table.add(0, SamplingParams(temperature=0), seed=0)
    table.add(2, params, seed=6, prompt=prompt, output=output)
    rows, logits = tree_rows(paths, 2), random_logits(len(paths))
    naive = torch.tensor(
        [plainly(logits[row].tolist(), params, prompt, output + path) for row, path in enumerate(paths)]
    )
    p = processed(logits, rows, table, table.features([2])).softmax(dim=1)
    torch.testing.assert_close(p, naive.softmax(dim=1), atol=1e-6, rtol=1e-4)


@settings(deadline=None, max_examples=60)
@given(penalized, token_lists, token_lists, trees)
def test_a_row_on_a_path_chooses_as_plain_decoding_would(
    params: SamplingParams, prompt: list[int], output: list[int], tree: list[tuple[int, int]]
) -> None:
    """The token after a path is the token after committing that path, bit for bit; bad words included."""
    words = [[1, 2], [3, 4, 5], [6]]
    paths = tree_paths(tree)
    table = SamplingTable(1, V)
    table.add(0, params, seed=6, prompt=prompt, output=output, bad_words=words)
    rows, logits = tree_rows(paths, 0), random_logits(len(paths))
    speculated = choose(logits, rows, table, table.features([0])).tolist()
    for row, path in enumerate(paths):
        plain = SamplingTable(1, V)
        plain.add(0, params, seed=6, prompt=prompt, output=output + path, bad_words=words)
        alone = SampleRows(rows.slots[:1], rows.positions[row : row + 1], rows.generated[row : row + 1])
        assert choose(logits[row : row + 1], alone, plain, plain.features([0])).tolist() == speculated[row : row + 1]


@settings(deadline=None, max_examples=60)
@given(penalized, token_lists, st.lists(st.lists(tokens, max_size=4), max_size=4))
def test_committing_round_by_round_is_adding_with_the_whole_output(
    params: SamplingParams, prompt: list[int], rounds: list[list[int]]
) -> None:
    params = SamplingParams(repetition_penalty=1.5) if not params.penalized else params
    words = [[1, 2, 3], [4, 5]]
    grown, whole = SamplingTable(2, V), SamplingTable(2, V)
    grown.add(1, params, seed=1, prompt=prompt, bad_words=words)
    grown.add(0, params, seed=1, bad_words=words)
    for emitted in rounds:
        padded = torch.tensor([emitted + [7] * (4 - len(emitted)), [2, -1, 7, 7]])
        grown.commit(torch.tensor([1, 0]), padded, torch.tensor([len(emitted), 2]))
    output = [token for emitted in rounds for token in emitted]
    whole.add(1, params, seed=1, prompt=prompt, output=output, bad_words=words)
    whole.add(0, params, seed=1, output=[2] * len(rounds), bad_words=words)  # -1 is no token
    for name in ("counts", "prompt_seen", "tails"):
        assert torch.equal(getattr(grown, name), getattr(whole, name)), name


def test_nothing_is_counted_before_someone_is_penalized() -> None:
    table = SamplingTable(2, V)
    table.add(0, SamplingParams(), seed=0)
    table.commit(torch.tensor([0]), torch.tensor([[3]]), torch.tensor([1]))
    assert table.counts.numel() == 0
    table.add(1, SamplingParams(presence_penalty=0.5), seed=0, output=[2])
    table.commit(torch.tensor([0, 1]), torch.tensor([[3], [4]]), torch.tensor([1, 1]))
    assert table.counts[1].nonzero()[:, 0].tolist() == [2, 4]


def test_rows_without_penalties_stay_as_they_are() -> None:
    table = SamplingTable(2, V)
    table.add(0, SamplingParams(), seed=0)
    table.add(1, SamplingParams(frequency_penalty=2.0, repetition_penalty=3.0), seed=0, prompt=[1], output=[2, 2])
    table.commit(torch.tensor([0, 1]), torch.tensor([[3], [3]]), torch.tensor([1, 1]))
    logits = random_logits(2)
    slots = torch.tensor([0, 1])
    rows = SampleRows(slots, slots, slots, torch.tensor([[5], [5]]))
    together = processed(logits, rows, table, table.features([0, 1]))
    plain = processed(logits, rows, table, Features(sampled=True))
    assert torch.equal(together[0], plain[0])
    assert not torch.equal(together[1], plain[1])


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


VOCAB, DRAFT = 97, 40


CPU = torch.device("cpu")


LETTERS = {name: {k: v for k, v in extra.items() if k != "bad_words"} for name, extra in EXTRAS.items()}


def ranked_table(*params: SamplingParams) -> SamplingTable:
    table = SamplingTable(len(params), VOCAB, CPU)
    for slot, one in enumerate(params):
        assert one.seed is not None
        table.add(slot, one, seed=one.seed, prompt=[3, 5, 10], output=[10, 20], end_ids=[2, 10, 40])
    return table


def ranked_rows(count: int, slots: list[int] | None = None) -> SampleRows:
    at = torch.tensor(slots or list(range(count)))
    return SampleRows(slots=at, positions=torch.arange(5, 5 + count), generated=torch.full((count,), 2))


def ranked(extra: dict[str, Any], temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, **extra)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("extra", LETTERS)
def test_the_best_is_what_the_rule_chooses(extra: str, drafts: bool) -> None:
    params = [ranked(LETTERS[extra], t, seed) for t in TEMPERATURES for seed in range(5)]
    table = ranked_table(*params)
    features = table.features(list(range(len(params))))
    torch.manual_seed(3)
    vocab = torch.randperm(VOCAB)[:DRAFT].sort().values if drafts else None
    logits = 3 * torch.randn(len(params), DRAFT if drafts else VOCAB)
    whole = logits
    if vocab is not None:
        whole = torch.full((len(params), VOCAB), -torch.inf).index_copy_(1, vocab, logits)
    rows = ranked_rows(len(params))
    found = rank(logits, rows, table, features, 4, vocab)
    assert found.tokens[:, 0].tolist() == choose(whole, rows, table, features).tolist()
    assert all(len(set(line)) == 4 for line in found.tokens.tolist())
    assert (found.scores <= 0).all()
    assert (found.scores.diff(dim=1) <= 0).all()


def test_shares_are_of_the_noisy_scores() -> None:
    table = ranked_table(ranked({}, 0.7, 9), ranked({}, 0.0, 9))
    logits = torch.randn(2, VOCAB)
    found = rank(logits, ranked_rows(2), table, table.features([0, 1]), VOCAB)
    noise = gumbel(row_keys(torch.tensor([9]), torch.tensor([0]), torch.tensor([5])), torch.arange(VOCAB))[0]
    wanted = torch.stack(((logits[0] / 0.7 + noise).log_softmax(0), logits[1].log_softmax(0)))
    torch.testing.assert_close(found.scores, wanted.gather(1, found.tokens))
    torch.testing.assert_close(found.scores.exp().sum(1), torch.ones(2))


def test_what_cannot_come_has_no_hope() -> None:
    table = ranked_table(ranked({"top_k": 2}, 1.0, 1), ranked({}, 0.0, 1))
    logits = torch.randn(2, VOCAB)
    logits[1] = torch.nan
    found = rank(logits, ranked_rows(2), table, table.features([0, 1]), 3)
    assert (found.scores[0, :2] > HOPELESS).all()
    assert found.scores[0, 2] == HOPELESS
    assert found.scores.isfinite().all()
    assert ((found.tokens >= 0) & (found.tokens < VOCAB)).all()
