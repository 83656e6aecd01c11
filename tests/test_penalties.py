"""Penalties count along each row's own draft path, as if the path had been emitted."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.core.params import SamplingParams
from slipstream.sampling import Features, SampleRows, SamplingTable, choose, processed

V = 12

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


def paths_of(tree: list[tuple[int, int]]) -> list[list[int]]:
    """The path to the root and to every node; a node's second number picks its parent among those before it."""
    paths: list[list[int]] = [[]]
    for token, parent in tree:
        paths.append([*paths[parent % len(paths)], token])
    return paths


def rows_of(paths: list[list[int]], slot: int) -> SampleRows:
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
    paths = paths_of(tree)
    table = SamplingTable(3, V)
    table.add(0, SamplingParams(temperature=0), seed=0)
    table.add(2, params, seed=6, prompt=prompt, output=output)
    rows, logits = rows_of(paths, 2), random_logits(len(paths))
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
    paths = paths_of(tree)
    table = SamplingTable(1, V)
    table.add(0, params, seed=6, prompt=prompt, output=output, bad_words=words)
    rows, logits = rows_of(paths, 0), random_logits(len(paths))
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
