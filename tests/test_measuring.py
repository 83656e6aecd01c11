"""Costs measured before the first request: what is timed, what is remembered, and that nothing of it stays behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import eagle_scenes
from medusa_checkpoints import tiny_medusa
from slipstream import LLM, SamplingParams
from slipstream.core.errors import ConfigError
from slipstream.drafters.model import ModelDrafter
from slipstream.engine import measuring, rehearsal
from slipstream.engine.draft_loops import DraftSize
from slipstream.engine.measuring import measure
from slipstream.engine.queued import QueuedBackend
from slipstream.engine.rehearsal import most_context, rehearse
from slipstream.engine.rounds import Round
from slipstream.plan.planner import AdaptivePlanner
from slipstream.plan.types import VERSION, Budget, Curve, DraftSeen, Load, MeasuredCosts, Offer

Open = Callable[..., LLM]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
COSTS = MeasuredCosts(
    Curve((1, 2, 4), (1.0, 1.5, 2.0)), 1e-3, 2e-3, {"model": (DraftSeen(1, Curve((1, 5), (0.1, 0.5))),)}
)


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_all_is_timed_and_nothing_stays_behind(open_llm: Open, tiny_draft: Path, rounds: str) -> None:
    options: dict[str, Any] = {"drafter": f"model:{tiny_draft}", "rounds": rounds, "draft_tokens": 4}
    fresh, llm = open_llm(**options), open_llm(**options)
    costs = measure(llm.engine, None)
    assert costs is not None
    assert costs.passes.sizes == (1, 2, 4, 8, 16, 32, 64)
    assert min(costs.passes.seconds) > 0
    assert costs.key_s >= 0
    assert costs.row_key_s >= 0
    assert [seen.requests for seen in costs.drafts["model"]] == [1, 4]
    assert costs.drafts["model"][0].curve.sizes == (1, 2, 4)
    assert "ngram" not in costs.drafts
    assert llm.engine.pool.free_pages == llm.engine.pool.num_pages
    assert not llm.engine.tables
    if isinstance(llm.engine.backend, QueuedBackend):
        state = llm.engine.backend.lanes.state
        assert state.pages[:-1].eq(llm.engine.pool.num_pages).all(), "behind everybody's pages stands nobody's"
        assert state.length[:-1].eq(1).all()
    prompt = [5, 6, 7, 8, 5, 6, 7]
    assert [o.outputs[0].token_ids for o in llm.generate([prompt], PARAMS)] == [
        o.outputs[0].token_ids for o in fresh.generate([prompt], PARAMS)
    ]


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_heads_are_timed(open_llm: Open, tmp_path: Path, rounds: str) -> None:
    eagle_scenes.eagle3().write(tmp_path / "eagle3")
    tiny_medusa(tmp_path / "medusa")
    drafters = [f"eagle3:{tmp_path / 'eagle3'}", f"medusa:{tmp_path / 'medusa'}"]
    said: list[str] = []
    costs = measure(open_llm(drafter=drafters, rounds=rounds).engine, None, said.append)
    assert costs is not None
    what = ["passes of the target", "drafts by eagle3", "drafts by medusa"]
    assert said == [f"measuring what {one} cost (once, unless the machine is busy)" for one in what], "none failed"
    assert {name: [seen.requests for seen in times] for name, times in costs.drafts.items()} == {
        "eagle3": [1, 4],
        "medusa": [1, 4],
    }


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_every_draft_that_is_timed_is_a_whole_one(open_llm: Open, tiny_draft: Path, rounds: str) -> None:
    """A draft model goes on from what it read: a second draft for the same request would find nothing to do."""
    engine = open_llm(drafter=f"model:{tiny_draft}", rounds=rounds, draft_tokens=4).engine
    drafter = engine.drafting.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    passes: list[int] = []
    way = "run" if rounds == "queued" else "forward"
    real = getattr(drafter.runner, way)

    def counting(*args: Any) -> Any:
        passes.append(1)
        return real(*args)

    setattr(drafter.runner, way, counting)
    with torch.inference_mode(), rehearse(engine, 2, 16) as scene:
        for nodes in (1, 4, 2):
            work = scene.draft(DraftSize("model", nodes))
            for _ in range(3):
                scene.rewind()
                passes.clear()
                work()
                assert len(passes) == nodes


def test_context_is_timed_with_the_sizes_that_there_are(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow model has few, an engine for few requests as well: what a long text adds is seen all the same."""
    clock = {4: 0.5, 8: 0.9}  # by rows: seconds with a long context
    monkeypatch.setattr(measuring, "_LOOKING_BACK", {"cpu": 8})
    monkeypatch.setattr(rehearsal._Eager, "target_pass", lambda scene, rows: rows)
    monkeypatch.setattr(measuring, "_seconds", lambda scene, rows: clock[rows])
    engine = open_llm(max_num_seqs=5).engine
    monkeypatch.setattr(measuring, "_SHORT", 8)
    curve = Curve((1, 2, 4, 8), (0.1, 0.1, 0.1, 0.1))
    key_s, row_key_s = measuring._context(engine, curve)
    tokens = 4 * (most_context(engine, 4) - 8)
    assert row_key_s * tokens == pytest.approx(0.4)
    assert key_s == pytest.approx(0, abs=1e-9)


def test_requests_that_pose_leave_even_where_something_breaks(open_llm: Open) -> None:
    engine = open_llm().engine

    def break_off() -> None:
        with rehearse(engine, 2, 16):
            assert engine.pool.free_pages < engine.pool.num_pages
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        break_off()
    assert engine.pool.free_pages == engine.pool.num_pages
    assert not engine.tables


def test_a_pass_that_would_take_too_long_is_not_timed() -> None:
    sizes = [1, 2, 4, 8, 16, 32, 48, 64]
    assert measuring._within(sizes, 0.001, 2.0) == sizes
    assert measuring._within(sizes, 0.05, 2.0) == [1, 2, 4, 8, 16]
    assert measuring._within(sizes, 1.0, 2.0) == []


def test_a_large_model_is_looked_at_once(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one pass takes longer than all of them may, two more would only keep the user waiting."""
    engine = open_llm().engine
    passes: list[int] = []
    real = engine.target.forward

    def counting(*given: Any) -> Any:
        passes.append(1)
        return real(*given)

    monkeypatch.setattr(engine.target, "forward", counting)
    assert measure(engine, 1e-9) is None
    assert len(passes) == 1


def broken(*_: object) -> MeasuredCosts:
    raise RuntimeError("no clock")


def planner_of(llm: LLM) -> AdaptivePlanner:
    planner = llm.engine.drafting.planner
    assert isinstance(planner, AdaptivePlanner)
    return planner


def test_they_are_remembered_and_small_models_are_not_measured(
    open_llm: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "_STEADY", float("inf"))  # the tests' machine may be as busy as it likes
    assert planner_of(open_llm()).costs.measured is None, "too small to be worth it"
    assert planner_of(open_llm(measure_costs=False)).costs.measured is None
    first = planner_of(open_llm(measure_costs=True)).costs.measured
    (file,) = (tmp_path / "costs").glob("*.json")
    assert first is not None
    assert json.loads(file.read_text())["version"] == VERSION
    monkeypatch.setattr(measuring, "_SMALL_MODEL", 0)
    monkeypatch.setattr(measuring, "measure", lambda *_: pytest.fail("it was measured before"))
    assert planner_of(open_llm()).costs.measured == first
    file.write_text(json.dumps({**first.as_json(), "version": VERSION + 1}))
    monkeypatch.setattr(measuring, "measure", lambda *_: COSTS)
    assert planner_of(open_llm()).costs.measured == COSTS, "of another version"
    assert planner_of(open_llm(drafter="suffix", max_num_seqs=4)).costs.measured == COSTS, "another setting"
    monkeypatch.setattr(measuring, "measure", lambda *_: replace(COSTS, is_steady=False))
    files = len(list((tmp_path / "costs").iterdir()))
    assert planner_of(open_llm(measure_costs=True, max_num_seqs=2)).costs.measured == COSTS
    assert len(list((tmp_path / "costs").iterdir())) == files, "a busy machine says nothing for the next time"
    monkeypatch.setattr(measuring, "measure", broken)
    assert planner_of(open_llm(max_num_seqs=3)).costs.measured is None, "requests can run without"
    with pytest.raises(RuntimeError, match="no clock"):
        open_llm(max_num_seqs=3, measure_costs=True)
    assert open_llm(drafter=None, measure_costs=True).engine.drafting.drafters == {}


@pytest.mark.parametrize("left", [0, 2, 5])
def test_what_there_was_no_time_for_is_measured_at_the_next_start(
    open_llm: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """A first start compiles, and may find no time for drafts: what it has is used, and not taken for all there is."""
    eagle_scenes.eagle3().write(tmp_path / "eagle3")
    engine = open_llm(drafter=f"eagle3:{tmp_path / 'eagle3'}").engine
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "_STEADY", float("inf"))
    asked: list[int] = []

    class Short(measuring._TimeLeft):
        def is_over(self) -> bool:
            asked.append(1)
            self.missed = len(asked) > left
            return self.missed

    with monkeypatch.context() as short:
        short.setattr(measuring, "_TimeLeft", Short)
        costs = measuring.known_costs(engine, tmp_path, True)
    assert costs is not None
    assert not costs.is_whole
    assert len(costs.passes.sizes) == min(3 + left, 7)
    assert not costs.drafts or left == 5
    assert not list(tmp_path.glob("costs/*"))
    whole = measuring.known_costs(engine, tmp_path, True)
    assert whole is not None
    assert whole.drafts["eagle3"]
    assert len(list(tmp_path.glob("costs/*"))) == 1


def test_they_are_remembered_however_much_memory_was_free(open_llm: Open, tmp_path: Path) -> None:
    """The size of the cache goes by that, and a drafter keeps where its own places begin."""
    eagle_scenes.eagle3().write(tmp_path / "eagle3")
    spec = f"eagle3:{tmp_path / 'eagle3'}"
    files = [
        measuring._costs_file(open_llm(drafter=drafter, memory=memory).engine, tmp_path)
        for drafter, memory in (
            (spec, "1MiB"),
            (spec, "2MiB"),
            (f"{spec}?depth=2", "1MiB"),
            (f"{spec}?width=3", "1MiB"),
        )
    ]
    assert files[0] == files[1]
    assert len(set(files)) == 3


def test_a_pass_too_large_to_be_captured_does_not_slow_down_the_others(
    open_llm: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no memory for a graph of so many rows, rounds with fewer are captured all the same."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    engine = open_llm(rounds="queued").engine
    assert isinstance(engine.backend, QueuedBackend)
    rounds: Any = engine.backend.rounds
    rounds._pool, rounds._graphs = object(), True  # as on a GPU

    def capture(one: Round, pool: object) -> None:
        if one.shape.rows > 16:
            raise torch.OutOfMemoryError("no memory left")
        one._verify_graph = one._verify

    monkeypatch.setattr(Round, "capture", capture)
    assert measuring.known_costs(engine, tmp_path, True) is not None
    assert rounds.pool is not None, "the next ones are tried again"
    assert {found.shape.rows for found in rounds._rounds.values()} == {1, 2, 4, 8, 16}
    assert all(found.is_captured for found in rounds._rounds.values())
    assert not list(tmp_path.glob("costs/*")), "not how passes will be run: nothing for the next time"


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="measure_costs='sometimes'"):
        LLM("default", measure_costs="sometimes")  # type: ignore[arg-type]


def test_json_and_back() -> None:
    assert MeasuredCosts.from_json(json.loads(json.dumps(COSTS.as_json()))) == COSTS
    for broken in (
        {},
        {"version": VERSION},
        {**COSTS.as_json(), "passes": []},
        {**COSTS.as_json(), "passes": [[2, 1]] * 2},
    ):
        assert MeasuredCosts.from_json(broken) is None


def test_the_first_plan_is_by_what_was_measured() -> None:
    """By the prior of a GPU a row costs nothing; measured here, a second one doubles the pass."""

    def planner(seconds: tuple[float, ...]) -> AdaptivePlanner:
        made = AdaptivePlanner(0.001)
        made.adopt(
            MeasuredCosts(Curve((1, 2, 4, 8), seconds), drafts={"d": (DraftSeen(1, Curve((1, 4), (0.1, 0.4))),)})
        )
        return made

    offer, load = Offer("d", ["a"], [4]), Load(1, 10)
    assert planner((1.0, 2.0, 4.0, 8.0)).plan([offer], load) == [Budget([0])]
    flat = planner((1.0, 1.0, 1.0, 1.0))
    assert flat.plan([offer], load)[0].nodes[0] > 0
    assert flat.reasons()["d"].startswith("d ")
