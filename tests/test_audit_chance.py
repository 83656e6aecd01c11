"""The audit of rejection sampling: right rules pass, biased ones are found out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams
from slipstream.audit.chance import Fit
from slipstream.audit.probe import PROBE
from slipstream.audit.results import Audit, Outcome
from slipstream.audit.run import settings
from slipstream.engine import engine as engine_module
from slipstream.verify import rejection
from test_audit import CONFIG, Audited

OWN = SamplingParams(temperature=0.4, seed=5, max_tokens=14)  # sharp enough that answers share their beginnings
SAMPLED = replace(CONFIG, drafters=("model",), settings=settings(14, 5, OWN), samples=384)


@pytest.fixture(scope="module")
def audited(tiny_target: Path, tiny_draft: Path) -> Iterator[Audited]:
    tiny = Audited(tiny_target, f"model:{tiny_draft}", max_num_seqs=8)
    yield tiny
    tiny.llm.close()


def outcomes(result: Audit) -> dict[str, Outcome]:
    return {check.title: check.outcome for check in result.checks if check.kind == "distribution"}


RULES = ["rejection sampling, the rule on a chain", "rejection sampling, the rule on a tree"]
DRAWN = ["rejection sampling · model", f"rejection sampling · {PROBE}"]


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_right_rules_pass(tiny_target: Path, tiny_draft: Path, rounds: str) -> None:
    audited = Audited(tiny_target, f"model:{tiny_draft}", max_num_seqs=8, rounds=rounds)
    try:
        result = audited.audit(SAMPLED)
    finally:
        audited.llm.close()
    assert outcomes(result) == dict.fromkeys(RULES + DRAWN, Outcome.PASS)
    assert result.passed()
    for check in result.checks:
        if check.kind == "distribution":
            assert check.drafted > check.accepted > 0
            assert check.compared > 500


def test_a_biased_rule_is_a_bug(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(u: Tensor, chance: Tensor, odds: Tensor) -> Tensor:
        return u.double() * odds * 0.8 < chance

    monkeypatch.setattr(rejection, "_passes", lenient)
    result = audited.audit(replace(SAMPLED, samples=1))
    assert [outcomes(result)[title] for title in RULES] == [Outcome.BUG] * 2
    assert not result.passed()


def test_an_engine_that_believes_drafts_is_a_bug(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    def believing(
        choices: Tensor, logits: Tensor, rows: Any, row_of: Tensor, draft: Any, *rest: Any, **more: Any
    ) -> Tensor:
        """Takes the first guess of all who asked for rejection sampling."""
        found = choices.clone()
        if draft.width:
            found[:, 0] = torch.where(draft.counts > 0, draft.tokens[:, 0], found[:, 0])
        return found

    monkeypatch.setattr(engine_module, "mixed_choices", believing)
    result = audited.audit(SAMPLED)
    assert outcomes(result)[DRAWN[1]] is Outcome.BUG
    assert "do not have the model's distribution" in result.bugs[0].why


P = torch.tensor([0.5, 0.25, 0.2, 0.04, 0.01, 0.0])


def drawn(p: Tensor, count: int = 3000) -> Tensor:
    picked = torch.multinomial(p, count, replacement=True, generator=torch.Generator().manual_seed(3))
    return picked.bincount(minlength=len(p))


def test_a_fit_believes_what_was_drawn_and_nothing_else() -> None:
    fit = Fit()
    fit.add(drawn(P), P)
    assert 0.01 < fit.p_value < 1
    assert (fit.draws, fit.freedom, fit.impossible) == (3000, 4, 0)
    other = Fit()
    other.add(drawn(torch.tensor([0.42, 0.33, 0.2, 0.04, 0.01, 0.0])), P)
    assert other.p_value < 1e-10


def test_a_fit_forgives_what_slack_explains() -> None:
    p = torch.tensor([0.53, 0.22, 0.2, 0.04, 0.01, 0.0])
    strict, lax = Fit(), Fit(slack=0.2)
    strict.add(drawn(p), P)
    lax.add(drawn(p), P)
    assert strict.p_value < 0.01 < lax.p_value


def test_what_cannot_be_drawn_must_not_be() -> None:
    fit = Fit()
    fit.add(torch.tensor([500, 250, 200, 40, 10, 1]), P)
    assert fit.p_value == 0


def test_no_draws_tell_nothing() -> None:
    fit = Fit()
    fit.add(torch.tensor([1, 1, 0, 0, 0, 0]), P)
    assert (fit.freedom, fit.p_value) == (0, 1.0)
