"""The rule of sampling against a plain reference, and its promise that a row is decided alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mask_bits import as_bits
from slipstream.core.errors import InvalidRequest
from slipstream.core.params import SamplingParams
from slipstream.sampling import Features, SampleRows, SamplingTable, choose, gumbel, processed, raw_logprobs

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
