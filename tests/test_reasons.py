"""What an answer says of its drafters was decided for it, and for no other request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.draft import Tree
from slipstream.core.params import SpeculationParams
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.drafters.guard import Proposals
from slipstream.engine.reasons import LATE, RESTING, SILENT, UNASKED
from slipstream.plan.planner import Planner
from slipstream.plan.types import Decision

Open = Callable[..., LLM]
ODD, EVEN = [5, 6, 7], [5, 6, 7, 8]


class OddOnly(HostDrafter):
    """Guesses for prompts of an odd length."""

    name: ClassVar[str] = "odd"

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        parts = zip(requests, budget, strict=True)
        return [Tree.chain([7] * nodes) if request.prompt_length % 2 else Tree() for request, nodes in parts]


class Weighing(Planner):
    """Takes what there is, for the first of those who have something, and says how many decoded."""

    def __init__(self, *, asks: bool = True) -> None:
        self.off: str | None = None
        self._asks, self._decided = asks, None if asks else Decision(9, 5, 2.0)

    def asks(self, drafter: str, requests: int) -> bool:
        return self._asks

    def trim(
        self,
        drafter: str,
        request_ids: Sequence[str],
        trees: Sequence[Tree],
        promises: Sequence[Sequence[float] | None],
        requests: int,
        *,
        whole: bool = False,
    ) -> list[Tree]:
        first = next((i for i, tree in enumerate(trees) if tree), -1)
        if first >= 0:
            self._decided = Decision(requests, len(trees[first]), 2.0)
        return [tree if i == first else Tree() for i, tree in enumerate(trees)]

    def decision(self, drafter: str) -> Decision | None:
        return self._decided

    def words(self, drafter: str, decision: Decision, *, shared: bool = True) -> str:
        return f"{decision.requests if shared else 'own'} at once: {decision.text(drafter)}"

    def why_off(self, drafter: str) -> str | None:
        return self.off


def params(tokens: int = 12, **speculation: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, speculation=SpeculationParams(**speculation)
    )


def opened(open_llm: Open, planner: Planner | None = None, **options: Any) -> LLM:
    llm = open_llm(drafter=OddOnly(), planner="fixed", draft_tokens=3, **options)
    llm.engine.drafting.planner = planner or Weighing()
    return llm


def plans(llm: LLM, prompts: list[list[int]], asked: SamplingParams | list[SamplingParams]) -> list[dict[str, str]]:
    return [output.outputs[0].speculation.plan for output in llm.generate(prompts, asked)]


def test_what_was_decided_for_others_is_not_said(open_llm: Open) -> None:
    llm = opened(open_llm)
    assert "1 at once: odd" in plans(llm, [ODD], params())[0]["odd"]
    assert plans(llm, [EVEN], params()) == [{"odd": SILENT}]
    assert plans(llm, [ODD], params(1)) == [{}], "it had no round to plan"
    alone, other = plans(llm, [ODD, EVEN], [params(6), params()])
    assert alone["odd"].startswith("2 at once")
    assert other == {"odd": SILENT}


def test_a_tenant_hears_nothing_of_others(open_llm: Open) -> None:
    planner = Weighing()
    llm = opened(open_llm, planner)
    assert plans(llm, [ODD], params(tenant="ann"))[0]["odd"].startswith("own at once")
    planner.off = "off: its drafts made steps of 8 requests 0.90x as fast as none"
    assert plans(llm, [ODD], params())[0]["odd"] == planner.off
    assert plans(llm, [ODD], params(tenant="ann"))[0]["odd"] == RESTING
    full = Decision(7, 0, 0.5, row=1.0)  # arithmetic is used up
    assert "batch 7" in full.text("odd", "9 of 10 right")
    private = full.text("odd", shared=False)
    assert "the batch leaves no spare arithmetic" in private
    assert "7" not in private


def test_a_plan_of_others_only_is_said_to_be_theirs(open_llm: Open) -> None:
    first, second = plans(opened(open_llm), [ODD, ODD], [params(60), params(6)])
    assert "1 at once: odd" in first["odd"]
    assert second == {"odd": "2 at once: off: guesses for others were worth more (2.00x expected)"}


@pytest.mark.parametrize(
    ("asked", "options", "why"),
    [
        (params(draft_tokens=0), {}, "off: the request asked for 0 draft tokens"),
        (params(2), {}, "off: the answer ended before a guess could help"),
        (params(), {"max_draft_memory": 0}, "off: drafts may take no memory (max_draft_memory)"),
        (params(), {"max_num_seqs": 1, "max_draft_rows": 1}, "off: a pass has 1 rows for 1 requests and their guesses"),
        (params(64), {"max_model_len": 5}, "off: the context was full"),
    ],
)
def test_its_own_limit_is_the_reason(open_llm: Open, asked: SamplingParams, options: dict[str, Any], why: str) -> None:
    for planner in (Weighing(), Planner()):
        (plan,) = plans(opened(open_llm, planner, **options), [ODD], asked)
        assert plan["odd"].startswith(why)


def test_places_for_fewer_guesses_than_requests(open_llm: Open) -> None:
    llm = opened(open_llm)
    llm.engine.drafting._caps._places = 1
    assert set(map(str, plans(llm, [EVEN, EVEN], params()))) == {
        "{'odd': 'off: memory for 1 guesses is too little for 2 requests (max_draft_memory)'}"
    }


def test_who_was_not_asked_says_so_and_not_what_was_planned_before(open_llm: Open) -> None:
    llm = opened(open_llm, Weighing(asks=False))
    assert plans(llm, [ODD], params()) == [{"odd": UNASKED}]
    assert plans(llm, [ODD], params(draft_tokens=0)) == [{"odd": "off: the request asked for 0 draft tokens"}]


def test_a_limit_that_comes_at_the_end_is_not_the_reason(open_llm: Open) -> None:
    """The last token of an answer is never drafted; and where nothing is weighed, nothing is said."""
    assert plans(opened(open_llm, Planner()), [ODD], params()) == [{}]
    assert plans(opened(open_llm, Planner()), [EVEN], params()) == [{"odd": SILENT}]


def test_who_is_late_says_so(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = opened(open_llm)
    late = Proposals((Tree(),), (None,), {}, late=True)
    monkeypatch.setattr(llm.engine.drafting.guards["odd"], "propose", lambda *_: late)
    assert plans(llm, [ODD], params()) == [{"odd": LATE}]
