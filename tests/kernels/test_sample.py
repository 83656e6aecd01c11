"""Kernels of sampling, ranking and masks: each as its twin."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_cases import Case
from interpreted import DEVICE, FLOATS, as_bits
from interpreted import DEVICE as KERNEL_DEVICE
from slipstream.core.params import SamplingParams
from slipstream.kernels.gpu.forbid_bits import _launch, forbid_bits_, forbid_bits_twin_
from slipstream.kernels.gpu.jit import jit, tl
from slipstream.kernels.gpu.soft_rows import Wanted, Wish, _launch_judge, _launch_totals, judge_twin_
from slipstream.kernels.gpu.sortable import NOTHING, sortable, unsorted
from slipstream.sampling import Features, SampleRows, SamplingTable, gumbel, row_keys
from slipstream.sampling.fused import choose_fused, gumbel_noise
from slipstream.sampling.noise import hash_tokens
from slipstream.sampling.rank import HOPELESS, _filters, _tempered, rank, rank_fused

# The interpreter computes with numpy, which warns where a cold temperature rightly makes a score infinite.
EVERY_WISH = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=3, top_p=0.99),
    SamplingParams(top_k=200, top_p=0.95),
    SamplingParams(top_k=50),
    SamplingParams(min_p=0.02),
    SamplingParams(temperature=0.1, top_k=5, min_p=0.1),
]


ALL_FEATURES = Features(greedy=True, sampled=True, top_k=True, top_p=True, min_p=True)


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 1.0, 1.0, 1.7, 30.0, 1e-40]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, 500, 1000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999), st.sampled_from([1e-9, 1 - 2**-53])),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)


def some_logits(kind: str, rows: int, vocab_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator)
    if kind == "coarse":  # ties everywhere, signed zeros among them
        return logits.mul(2).round().mul(0.5)
    if kind == "equal":
        return torch.full_like(logits, -3.25)
    if kind == "masked":
        return (logits * 4).masked_fill(torch.rand(rows, vocab_size, generator=generator) < 0.9, -math.inf)
    return logits * {"flat": 0.01, "usual": 3.0, "peaked": 40.0, "huge": 1e37}[kind]


@settings(deadline=None, max_examples=25)
@given(
    kind=st.sampled_from(["coarse", "equal", "masked", "flat", "usual", "peaked", "huge"]),
    vocab_size=st.sampled_from([1, 300, 700]),
    params=st.lists(any_params, min_size=1, max_size=2),
    seed=st.integers(0, 2**32),
    chunk=st.sampled_from([128, 512]),
)
def test_tokens_are_the_twins(kind: str, vocab_size: int, params: list[SamplingParams], seed: int, chunk: int) -> None:
    Case(some_logits(kind, len(params), vocab_size, seed % 1000), params, seed=seed).check(chunk=chunk)


def test_a_row_is_decided_alone() -> None:
    """Neither by the other rows, nor by what they ask for, nor by how it is cut into chunks."""
    case = Case(some_logits("usual", len(EVERY_WISH), 1000, 5).to(torch.bfloat16).float(), EVERY_WISH)
    together = case.check(chunk=512)
    assert together == case.fused(chunk=1024, features=ALL_FEATURES)
    assert together == [case.alone(row, chunk=512) for row in range(len(EVERY_WISH))]


def test_a_broken_row_gives_nothing_and_harms_no_other() -> None:
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.8), SamplingParams(top_k=4)]
    whole = some_logits("usual", 4, 150, 6)
    tokens = Case(whole, params).fused(chunk=64)
    hurt = whole.repeat(2, 1)
    hurt[0, 149], hurt[1, 70], hurt[2, 3] = math.nan, -math.nan, math.inf
    hurt[3] = -math.inf
    assert Case(hurt, params).check(chunk=64)[:4] == [-1] * 4
    mixed = torch.cat((hurt[:2], whole[2:]))
    assert Case(mixed, params).fused(chunk=64) == [-1, -1, *tokens[2:]]


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        (SamplingParams(temperature=0), 1),
        (SamplingParams(top_k=3), 3),
        (SamplingParams(top_p=0.5), 75),
        (SamplingParams(top_p=0.5, top_k=100), 50),
        (SamplingParams(top_p=0.5, top_k=100, temperature=1e-30), 50),
        (SamplingParams(), 150),
    ],
    ids=["greedy", "top_k", "top_p", "both", "cold", "free"],
)
def test_ties_go_to_the_lowest_id(params: SamplingParams, possible: int) -> None:
    """150 equal logits in three chunks: of them the first stay possible."""
    logits = torch.zeros(6, 150)
    logits[:, ::2] = -0.0
    tokens = Case(logits, [params]).check(chunk=64)
    assert max(tokens) < possible
    assert max(tokens) > 0.5 * possible - 2  # likely with six draws, and they are always the same six


def test_missing_tokens_are_impossible() -> None:
    """A draft model's vocabulary may be smaller than the target's."""
    case = Case(some_logits("usual", len(EVERY_WISH), 290, 7), EVERY_WISH, vocab_size=333)
    case.check(chunk=256)


def test_logits_may_lie_in_any_way() -> None:
    logits = some_logits("usual", 2, 300, 8)
    case = Case(logits, [SamplingParams(top_p=0.8), SamplingParams(top_k=20)])
    table, rows = case.table(KERNEL_DEVICE), case.rows(KERNEL_DEVICE)
    wide = torch.cat((logits, torch.full((2, 13), 99.0)), dim=1).to(KERNEL_DEVICE)[:, :300]
    across = logits.T.contiguous().to(KERNEL_DEVICE).T
    for laid in (wide, across):
        assert choose_fused(laid, rows, table, ALL_FEATURES, chunk=128).tolist() == case.twin()
    same = case.logits[:1].expand(2, 300).to(KERNEL_DEVICE)
    assert choose_fused(same, rows, table, ALL_FEATURES).tolist() == Case(logits[:1].expand(2, 300), case.params).twin()
    none = SampleRows(rows.slots[:0], rows.positions[:0], rows.generated[:0])
    assert choose_fused(wide[:0], none, table, ALL_FEATURES).shape == (0,)


@jit
def _noise_kernel(low: tl.tensor, high: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    key = (tl.load(high).to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | tl.load(low).to(tl.uint32, bitcast=True)
    tl.store(out + at, gumbel_noise(key, at))


def test_the_noise_is_the_twins() -> None:
    """As exact as fp32 allows, for the small v that win too."""
    keys = row_keys(torch.tensor([3]), torch.tensor([0]), torch.tensor([77]))
    tokens = torch.arange(2**14, dtype=torch.int32)
    noise = torch.empty(2**14, device=KERNEL_DEVICE)
    low, high = keys[0].to(KERNEL_DEVICE)
    _noise_kernel[(1,)](low, high, noise, SIZE=2**14)
    expected = gumbel(keys, tokens)[0]
    assert hash_tokens(tokens).unique().numel() == 2**14
    assert expected.max() > 8
    torch.testing.assert_close(noise.cpu(), expected, rtol=2e-6, atol=2e-6)


def test_on_the_cpu_the_twin_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is for tests only."""
    monkeypatch.setattr(import_module("slipstream.sampling.choose"), "choose_fused", None)
    tokens = Case(torch.zeros(1, 64), [SamplingParams(top_k=2)]).twin()
    assert tokens[0] in (0, 1)


WISHES = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1e-40),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=2, top_k=3),
    SamplingParams(min_p=0.2),
]


R = len(WISHES)


# The interpreter computes with numpy, which warns where a cold temperature rightly makes a score infinite.


def table_of(wishes: list[SamplingParams], vocab_size: int, device: torch.device = DEVICE) -> SamplingTable:
    table = SamplingTable(len(wishes), vocab_size, device)
    for slot, wish in enumerate(wishes):
        table.add(slot, wish, seed=3 + slot)
    return table


def rows_of(slots: list[int], device: torch.device = DEVICE) -> SampleRows:
    at = torch.tensor(slots, device=device)
    return SampleRows(slots=at, positions=at + 10, generated=torch.zeros_like(at))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("wishes", [[WISHES[0]] * R, WISHES, [WISHES[1], WISHES[0]] * 3], ids=["greedy", "all", "two"])
def test_the_kernels_match_the_twin(wishes: list[SamplingParams], drafts: bool) -> None:
    torch.manual_seed(1)
    vocab_size, width, count = 600, 150 if drafts else 600, 5
    table, rows = table_of(wishes, vocab_size), rows_of(list(range(R)))
    features = table.features(list(range(R)))
    logits = 4 * torch.randn(R, width, device=DEVICE)
    logits[:, 7] = logits[:, 3]  # ties
    vocab = torch.randperm(vocab_size)[:width].sort().values.to(DEVICE) if drafts else None
    floor = _tempered(logits, rows, table, features).floor if _filters(features) else None
    tokens, scores = rank_fused(logits, rows, table, count, vocab, floor, HOPELESS, sampled=features.sampled, chunk=64)
    cpu = torch.device("cpu")
    ids = None if vocab is None else vocab.cpu()
    on_cpu = (rows_of(list(range(R)), cpu), table_of(wishes, vocab_size, cpu))
    twin = rank(logits.cpu(), *on_cpu, features, count, ids)
    torch.testing.assert_close(scores.cpu(), twin.scores, rtol=1e-4, atol=1e-4)
    assert all(len(set(line)) == count for line in tokens.tolist())
    # of what cannot come any token will do, and of equals either
    for line in range(R):
        real = twin.scores[line] > HOPELESS
        alike = twin.scores[line].diff().abs().min() < 1e-4
        if not alike:
            assert tokens.cpu()[line][real].tolist() == twin.tokens[line][real].tolist()


def test_broken_rows_give_tokens_without_hope() -> None:
    table, rows = table_of(WISHES[:3], 100), rows_of([0, 1, 2])
    logits = torch.full((3, 100), torch.nan, device=DEVICE)
    logits[1] = -torch.inf
    tokens, scores = rank_fused(logits, rows, table, 4, None, None, HOPELESS, sampled=True, chunk=64)
    assert (scores == HOPELESS).all()
    assert all(len(set(line)) == 4 and max(line) < 100 for line in tokens.tolist())


@jit
def _both_ways(x_ptr: tl.tensor, key_ptr: tl.tensor, again_ptr: tl.tensor, N: tl.constexpr) -> None:
    at = tl.arange(0, N)
    key = sortable(tl.load(x_ptr + at))
    tl.store(key_ptr + at, key)
    tl.store(again_ptr + at, unsorted(key))


def test_keys_are_in_the_order_of_their_numbers() -> None:
    edges = [torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, -1e38, 1.0, -1.0]
    x = torch.cat((torch.tensor(edges), torch.randn(64 - len(edges)))).to(DEVICE)
    key, again = torch.empty(64, dtype=torch.int32, device=DEVICE), torch.empty_like(x)
    _both_ways[(1,)](x, key, again, N=64)
    assert torch.equal(again, x)
    assert torch.equal(key[:, None] < key, x[:, None] < x)
    assert torch.equal(key[:, None] == key, x[:, None] == x)  # both zeros are one
    assert int(key[1]) == int(getattr(NOTHING, "value", NOTHING))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300, 4097])
@pytest.mark.parametrize("apply", [_launch, forbid_bits_twin_, forbid_bits_])
def test_only_allowed_tokens_are_left(vocab_size: int, apply: object) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator).to(DEVICE)
    allowed = (torch.rand(3, vocab_size, generator=generator) < 0.5).to(DEVICE)
    wanted = torch.where(allowed, logits, -math.inf)
    apply(logits, as_bits(allowed))  # type: ignore[operator]
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("apply", [_launch, forbid_bits_twin_])
def test_a_broken_logit_stays_broken(apply: object) -> None:
    logits = torch.tensor([[0.0, math.nan, math.inf, -math.inf]], device=DEVICE)
    apply(logits, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE))  # type: ignore[operator]
    assert logits[0].isnan().tolist() == [False, True, True, False]


def test_rows_of_a_wider_tensor_are_found() -> None:
    whole = torch.zeros(2, 80, device=DEVICE)
    _launch(whole[:, :40], torch.zeros(2, 2, dtype=torch.int32, device=DEVICE))
    assert (whole[:, :40] == -math.inf).all()
    assert (whole[:, 40:] == 0).all()


ROWS, STEPS = 3, 2


def target(vocab: int, names: int) -> tuple[Tensor, Tensor]:
    """Logits of the target, and which of its tokens can be named."""
    made = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(ROWS, vocab, generator=made)
    logits[0, 5] = -torch.inf  # a token that cannot come
    return logits.to(DEVICE), torch.randperm(vocab, generator=made)[:names].sort().values.to(DEVICE)


@pytest.mark.parametrize("vocab", [64, 100, 333])
def test_totals(vocab: int) -> None:
    logits, _ = target(vocab, vocab)
    total, best = _launch_totals(logits, block=64)
    torch.testing.assert_close(total, logits.logsumexp(1))
    assert torch.equal(best, logits.argmax(1))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "wish", [Wish(), Wish(variation=0.7), Wish(sharpen=0.25), Wish(0.3, 0.5), Wish(keyed=2), Wish(0.3, 0.5, 0.7)]
)
@pytest.mark.parametrize("names", [64, 100, 170])
def test_judging(names: int, wish: Wish, dtype: torch.dtype) -> None:
    seen, ids = target(200, names)
    best = torch.full((200,), -1, device=DEVICE)
    best[ids] = torch.arange(names, device=DEVICE)
    said = torch.tensor([2, -1, 7], device=DEVICE)  # one cannot be named
    wanted = Wanted(seen[:, ids], seen.logsumexp(1), best[seen.argmax(1)], said)
    wanted.best[1] = -1  # its best token cannot be named
    guesses = (2 * torch.randn(STEPS * ROWS, names, generator=torch.Generator().manual_seed(1))).to(DEVICE, dtype)
    guesses[3, 5] = 60.0  # so sure of another token that its odds are cut
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0], device=DEVICE)
    mine, theirs = guesses.clone(), guesses.clone()
    found = _launch_judge(mine, wanted, weight, wish, block=64)
    twin = judge_twin_(theirs, wanted, weight, wish)
    torch.testing.assert_close(found, twin, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine, theirs)
    assert twin.hit.tolist()[1] == 0
    assert [chance > 0 for chance in twin.met.tolist()] == [wish.keyed > 0 and row % ROWS != 1 for row in range(6)]
