"""The exactness check can fail: each of these mistakes, put in on purpose, is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exactness import FEW, Case, cases, differences, plain, run
from scripted import Answers, Bushy, BushyWrong, Right, RightThenWrong
from slipstream import LLM, CompletionOutput, SamplingParams
from slipstream.core.draft import Draft
from slipstream.core.verdict import Verdicts
from slipstream.engine import eager
from slipstream.engine.packing import PackedPass, pack
from slipstream.kv.cache import Moves, compaction
from slipstream.verify.exact import verify_exact

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Bench:
    llm: LLM
    cases: list[Case]
    expected: list[CompletionOutput]

    def check(self, drafter: str) -> list[str]:
        return differences(self.cases, self.expected, run(self.llm, self.cases, drafter))


@pytest.fixture(scope="module")
def bench(tiny_target: Path) -> Iterator[Bench]:
    answers = Answers()
    drafters = [kind(answers) for kind in (Right, RightThenWrong, Bushy, BushyWrong)]
    with LLM(tiny_target, device="cpu", drafter=drafters, planner="fixed", max_num_seqs=8, memory="64MiB") as llm:
        strong = SamplingParams(
            temperature=0.7,
            seed=7,
            max_tokens=24,
            ignore_eos=True,
            frequency_penalty=1.5,
            presence_penalty=1.0,
            logit_bias=FEW,
        )
        batch = [*cases()[:3], *cases()[12:15], Case("strong penalties", (10, 20, 30), strong)]
        yield Bench(llm, batch, plain(llm, batch, answers))


def mistaken_verdicts(change: Callable[[Draft, Tensor, Verdicts], Verdicts]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            eager, "verify_exact", lambda draft, choices: change(draft, choices, verify_exact(draft, choices))
        )

    return patch


def mistaken_pass(change: Callable[[PackedPass, int], PackedPass]) -> Patch:
    def patched(decodes: Any, chunks: Any, draft: Draft, *, paths: bool) -> PackedPass:
        return change(pack(decodes, chunks, draft, paths=paths), len(decodes))

    return lambda monkeypatch: monkeypatch.setattr(eager, "pack", patched)


def one_too_many(draft: Draft, choices: Tensor, verdicts: Verdicts) -> Verdicts:
    """On a chain, also take the node behind the last right one; then the target's token behind that."""
    if not draft.width:
        return verdicts
    more = (verdicts.accepted + 1).minimum(draft.counts)[:, None]  # [B, 1]
    node = torch.arange(draft.width)
    tokens = torch.zeros_like(choices)
    tokens[:, : draft.width] = draft.tokens
    tokens = tokens.scatter(1, more, choices.gather(1, more))
    return Verdicts(torch.where(node < more, node, 0), more[:, 0], tokens)


def without_comparing(draft: Draft, choices: Tensor, verdicts: Verdicts) -> Verdicts:
    """Take the whole chain."""
    tokens = torch.cat((draft.tokens, torch.zeros_like(choices[:, :1])), dim=1)
    tokens = tokens.scatter(1, draft.counts[:, None], choices.gather(1, draft.counts[:, None]))
    return Verdicts(torch.arange(draft.width).expand_as(draft.tokens), draft.counts, tokens)


def drafts_own_token(draft: Draft, choices: Tensor, verdicts: Verdicts) -> Verdicts:
    """Where a guess was wrong, emit the guess, not what the target chose."""
    place = verdicts.accepted[:, None]  # [B, 1]
    if not draft.width:
        return verdicts
    guess = draft.tokens.gather(1, place.clamp_max(draft.width - 1))
    own = torch.where(place < draft.counts[:, None], guess, verdicts.tokens.gather(1, place))
    return Verdicts(verdicts.path, verdicts.accepted, verdicts.tokens.scatter(1, place, own))


def first_sibling(draft: Draft, choices: Tensor, verdicts: Verdicts) -> Verdicts:
    """Right tokens, but the cache keeps the rows of the first nodes instead of those of the path."""
    return Verdicts(torch.arange(draft.width).expand_as(verdicts.path), verdicts.accepted, verdicts.tokens)


def no_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def stay(slot_of_row: Tensor, path: Tensor, accepted: Tensor) -> Moves:
        moves = compaction(slot_of_row, path, accepted)
        return Moves(moves.src, moves.src)

    monkeypatch.setattr(eager, "compaction", stay)


def noise_by_node(packed: PackedPass, decodes: int) -> PackedPass:
    """Rows of a request count up from its root, whatever their depth."""
    positions = packed.rows.positions.clone()
    for start, end in zip(packed.batch.row_starts[:decodes], packed.batch.row_starts[1 : decodes + 1], strict=True):
        positions[start:end] = positions[start] + torch.arange(end - start)
    return replace(packed, rows=replace(packed.rows, positions=positions))


def penalties_without_path(packed: PackedPass, decodes: int) -> PackedPass:
    return replace(packed, rows=replace(packed.rows, path=None))


def siblings_visible(packed: PackedPass, decodes: int) -> PackedPass:
    """Causal order instead of ancestors."""
    return replace(packed, batch=replace(packed.batch, masks=None, is_tree=(False,) * packed.batch.num_requests))


def positions_by_row(packed: PackedPass, decodes: int) -> PackedPass:
    """Rotary positions count nodes instead of depth."""
    positions = packed.batch.positions.clone()
    for start, end in zip(packed.batch.row_starts[:decodes], packed.batch.row_starts[1 : decodes + 1], strict=True):
        positions[start:end] = positions[start] + torch.arange(end - start)
    return replace(packed, batch=replace(packed.batch, positions=positions))


MISTAKES: dict[str, tuple[str, Patch]] = {
    "accepts one node too many": ("right_then_wrong", mistaken_verdicts(one_too_many)),
    "accepts without comparing": ("right_then_wrong", mistaken_verdicts(without_comparing)),
    "emits the draft's token": ("right_then_wrong", mistaken_verdicts(drafts_own_token)),
    "keeps the first siblings": ("bushy", mistaken_verdicts(first_sibling)),
    "skips compaction": ("bushy", no_moves),
    "keys the noise by node": ("bushy", mistaken_pass(noise_by_node)),
    "lets penalties ignore the path": ("right", mistaken_pass(penalties_without_path)),
    "lets siblings see each other": ("bushy", mistaken_pass(siblings_visible)),
    "counts nodes as positions": ("bushy", mistaken_pass(positions_by_row)),
}


@pytest.mark.parametrize("drafter", ["right", "right_then_wrong", "bushy", "bushy_wrong"])
def test_without_a_mistake_nothing_is_found(bench: Bench, drafter: str) -> None:
    assert not bench.check(drafter)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(bench: Bench, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, patch = MISTAKES[mistake]
    patch(monkeypatch)
    found = bench.check(drafter)
    monkeypatch.undo()
    assert any(" became " in difference for difference in found)  # other tokens, not merely an error
    assert not bench.check(drafter)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_one_who_gets_no_drafts_is_none_the_worse(
    bench: Bench, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistakes are about drafts: plain decoding, and so what drafts are measured by, does not have them."""
    MISTAKES[mistake][1](monkeypatch)
    batch, expected = bench.cases[1:4], bench.expected[1:4]
    assert not differences(batch, expected, run(bench.llm, batch, None))
