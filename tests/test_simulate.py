"""Simulated traffic against the real engine on a clock that passes cost exactly; and the parts of a simulation."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from conftest import EOS
from simulator.costs import RoundCosts
from simulator.recorder import Recorder, overlap
from simulator.recording import (
    VERSION,
    Costs,
    DrafterKind,
    DraftSeen,
    HostSeen,
    Machine,
    Made,
    Offer,
    PassSeen,
    Planning,
    Recording,
    Trace,
    WaitSeen,
)
from simulator.replayed import ReplayedDevice, Walk, Walks, made_prompt
from simulator.replica import Replica, Setting, Speculation
from simulator.simulate import doubts, drafters_of, simulate, traces_of
from simulator.traffic import Coming, poisson, read_traffic, rehearse, replay
from slipstream import RequestOutput, SamplingParams, SpeculationParams
from slipstream.bench.traffic import Outcome, Served, Spread, Targets, poisson_times
from slipstream.core.errors import CapacityError, ConfigError
from slipstream.core.outputs import CompletionOutput
from slipstream.core.verdict import Authors, Verdict, author
from slipstream.engine.listening import Offered, RoundTimes
from slipstream.engine.state import Answer, Job, Phase
from slipstream.engine.text import TextStream
from slipstream.plan import types as planned
from slipstream.plan.cost import filled
from slipstream.plan.planner import AdaptivePlanner
from stepping import Stepper

HOST_S = 0.0007
NO_PLANNING = Planning()


def pass_s(rows: int) -> float:
    return 0.010 + 0.0008 * rows


class Clock:
    """Time that goes on only where something is said to cost."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def record_real(
    model: Path, monkeypatch: pytest.MonkeyPatch, *, planner: str, requests: int = 24, gap: float = 0.06
) -> Recording:
    """The real engine under real traffic, where a pass takes `pass_s` on a clock of the test's own."""
    stepper = Stepper(model, "ngram", planner=planner, max_num_seqs=8)
    engine = stepper.engine
    clock, forward, dice, stops = Clock(), engine.target.forward, random.Random(5), random.Random(55)
    monkeypatch.setattr(time, "perf_counter", clock)

    def slow(batch, cache):  # type: ignore[no-untyped-def]
        clock.now += pass_s(batch.num_rows)
        return forward(batch, cache)

    monkeypatch.setattr(engine.target, "forward", slow)
    recorder = Recorder(engine)
    engine.listen(recorder, all_guesses=True)
    times = [1000.0]
    while len(times) < requests:
        times.append(times[-1] + dice.expovariate(1 / gap))
    sinks: list[list[RequestOutput]] = []
    while times or engine.busy:
        if not engine.busy:
            clock.now = max(clock.now, times[0])
        while times and times[0] <= clock.now:
            word = dice.choices(range(256), k=dice.randint(2, 5))
            ends = stops.sample(range(256), 8)  # some end before they must
            params = SamplingParams(temperature=0, max_tokens=dice.randint(8, 40), ignore_eos=True, stop_token_ids=ends)
            sinks.append([])
            job = stepper._intake.job(word * dice.randint(2, 9), params, sinks[-1].append, streaming=False)
            job.arrived = times.pop(0)  # while the engine was at work
            engine.add(job)
        clock.now += HOST_S
        engine.step()
    monkeypatch.undo()
    assert all(len(sink) == 1 and sink[0].outputs[0].error is None for sink in sinks)
    return recorder.recording("tiny", busy=False)


@pytest.mark.parametrize("planner", ["fixed", "adaptive"])
def test_a_simulation_agrees_with_the_real_engine(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, planner: str
) -> None:
    recording = record_real(tiny_target, monkeypatch, planner=planner)
    traces = list(recording.traces)
    assert len(traces) == 24
    assert sum(offer.right for trace in traces for offer in trace.offers.get("ngram", ())) > 50, "nothing to accept"
    assert 3 < sum(trace.spare > 0 for trace in traces) < 21, "some end before they must"
    real = [
        Served(t.arrived, t.prompt_tokens, t.output_tokens, t.arrived + t.first_token_s, t.arrived + t.total_s)
        for t in traces
    ]
    setting = Setting("fixed" if planner == "fixed" else "planned", "ngram")
    simulated = simulate(recording, setting, replay(traces), traces)
    told, seen = Outcome.of(simulated, Targets()), Outcome.of(real, Targets())
    assert told.requests == seen.requests
    assert told.tokens_per_s == pytest.approx(seen.tokens_per_s, rel=0.1)
    assert told.ttft.p50 == pytest.approx(seen.ttft.p50, rel=0.1)
    assert told.tpot.p50 == pytest.approx(seen.tpot.p50, rel=0.1)
    again = simulate(recording, setting, replay(traces), traces)
    assert again == simulated, "the same input must give the same result"
    off = simulate(recording, Setting("off"), replay(traces), traces)
    assert median(r.rounds / r.output_tokens for r in off) == 1.0
    assert sum(r.rounds for r in simulated) < sum(r.rounds for r in off)


def machine(**changes: object) -> Machine:
    usual = {
        "num_pages": 4096,
        "page_size": 16,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "batch_tokens": 512,
        "draft_rows": 256,
        "draft_tokens": None,
        "row_slope": 0.001,
        "queued": False,
    }
    return Machine(**{**usual, **changes})  # type: ignore[arg-type]


def made_up(per_row: float, *, right: int = 4, offered: int = 5, draft_s: float = 0.0, **changes: object) -> Recording:
    """Requests whose drafter is always right so far; a pass takes 10 ms, and `per_row` more for each row."""
    passes = [PassSeen(n, n, 0, 100 * n, 0.010 + per_row * n, 9) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]
    places = range(1, 100, right + 1)
    chances = tuple(0.99 if n < right else 0.01 for n in range(offered))
    offers = tuple(Offer(at, offered, tuple(range(right)), chances) for at in places)
    trace = Trace(50, 100, 0.0, 0.1, 1.0, ("ngram",), {"ngram": offers})
    return Recording(
        "made up",
        machine(**changes),
        (DrafterKind("ngram", False, offered),),
        Costs(tuple(passes), (DraftSeen("ngram", 1, offered, draft_s, 9),), (HostSeen(1, 0.001, 9),)),
        (trace,),
    )


def test_off_is_a_round_a_token_and_costs_add_up() -> None:
    recording = made_up(0.0)
    (one,) = simulate(recording, Setting("off"), replay(recording.traces), recording.traces)
    assert one.rounds == one.output_tokens == 100
    assert one.ended == pytest.approx(100 * 0.011)
    assert one.tpot == pytest.approx(0.011)


def test_rounds_behind_a_prompt_take_longer_where_that_was_seen() -> None:
    """Recorded were small passes behind wide ones nearly always: half as long again as among themselves."""
    recording = made_up(0.0)
    wakes = [(0.0, 1.0, 5), (2.5, 1.5**0.5, 30), (5.0, 1.5, 60)]
    small = [PassSeen(1, 1, 0, c, 0.010 * slower, count, wake) for wake, slower, count in wakes for c in (50, 60)]
    traces = [replace(trace, output_tokens=6) for trace in recording.traces]
    tpots = []
    for told in (small, [replace(seen, wake=0.0) for seen in small]):
        wide = [PassSeen(0, 0, 50, 0, 0.200, 9)]
        costs = replace(recording.costs, passes=(*wide, *told))
        (one,) = simulate(replace(recording, costs=costs), Setting("off"), replay(traces), traces)
        tpots.append(one.tpot)
    felt = [0.011 + 0.005 * math.exp(-0.6 * number) for number in range(5)]  # about: fades by half in 14 ms
    assert tpots[0] == pytest.approx(sum(felt) / 5, rel=0.03)
    assert tpots[0] > 1.1 * 0.011
    assert tpots[1] == pytest.approx(0.001 + 0.010 * (5 + 30 * 1.5**0.5 + 60 * 1.5) / 95, rel=0.01), "as the mean"


@pytest.mark.parametrize(("spare", "rows"), [(97, 6 + 6), (1, 3 + 2), (0, 2 + 1)])
def test_guesses_go_beyond_an_end_that_nobody_knew_of(spare: int, rows: int) -> None:
    """Wrong ones, of an answer of three tokens; a row costs a millisecond, and the prompt has 50."""
    recording = made_up(0.001, right=0)
    ends = [replace(trace, output_tokens=3, spare=spare) for trace in recording.traces]
    (one,) = simulate(recording, Setting("fixed", "ngram"), replay(ends), ends)
    assert one.ended == pytest.approx(3 * (0.010 + 0.001) + 0.001 * (50 + rows))


def test_speculation_pays_while_rows_are_free_and_planned_leaves_it_where_they_are_not() -> None:
    cheap, dear = made_up(0.00001), made_up(0.004)
    for recording, better in ((cheap, True), (dear, False)):
        coming = poisson(40.0, 120, recording.traces, seed=1)
        spans = {}
        for way in ("off", "fixed", "planned"):
            served = simulate(recording, Setting(way, "ngram"), coming, recording.traces)
            spans[way] = Outcome.of(served, Targets()).tpot.p50
        if better:
            assert spans["planned"] < 0.5 * spans["off"]
        assert spans["planned"] <= 1.05 * min(spans["off"], spans["fixed"]), spans


def test_always_wrong_guesses_cost_the_planned_engine_little() -> None:
    recording = made_up(0.002, right=0)
    coming = poisson(2.0, 40, recording.traces, seed=3)
    rates = {
        way: Outcome.of(simulate(recording, Setting(way, "ngram"), coming, recording.traces), Targets()).tpot.p50
        for way in ("off", "fixed", "planned")
    }
    assert rates["fixed"] > 1.3 * rates["off"]
    assert rates["planned"] < 1.05 * rates["off"]


def test_replicas_share_the_load() -> None:
    recording = made_up(0.0001)
    coming = poisson(30.0, 150, recording.traces, seed=2)
    waits = []
    for replicas in (1, 2, 8):
        served = simulate(recording, Setting("off"), coming, recording.traces, replicas=replicas)
        assert len(served) == 150
        waits.append(Outcome.of(served, Targets(ttft=0.1, tpot=0.013)).good)
    assert waits[0] < waits[1] < waits[2] == 1.0, waits


def test_goodput_counts_who_met_both_targets() -> None:
    served = [Served(0.0, 5, 11, 0.5, 1.5), Served(0.0, 5, 11, 0.1, 1.1), Served(0.0, 5, 11, 0.1, 4.1)]
    out = Outcome.of(served, Targets.parse("ttft=0.2,tpot=0.15"))
    assert out.good == pytest.approx(1 / 3)
    assert out.goodput == pytest.approx(1 / 4.1)
    assert Targets.parse("") == Targets()
    assert Spread.of([0.25]) == Spread(0.25, 0.25, 0.25)
    for wrong in ("ttft", "ttft=x", "tttf=1", "tpot=0", "tpot=-1"):
        with pytest.raises(ConfigError, match="latency-target"):
            Targets.parse(wrong)


def test_requests_wait_where_pages_are_short_and_too_long_ones_are_refused() -> None:
    recording = made_up(0.001, num_pages=24)
    served = simulate(recording, Setting("off"), poisson(1000.0, 6, recording.traces, seed=0), recording.traces)
    assert len(served) == 6
    assert max(r.ttft for r in served) > 1.0, "two of them fit at a time"
    tight = made_up(0.001, max_model_len=120)
    with pytest.raises(CapacityError, match="120"):
        simulate(tight, Setting("off"), replay(tight.traces), tight.traces)


def test_some_answers_come_before_the_traffic_that_is_recorded() -> None:
    came: list[tuple[int, list[float]]] = []

    def send(times: Sequence[float], nodes: int) -> list[Served]:
        came.append((nodes, list(times)))
        reading_s = 5.0 if len(came) == 1 else 0.5  # the first one's is an accident
        return [Served(at, 5, 11, at + reading_s, at + reading_s + 1) for at in times]

    assert rehearse(send, drafts=True, crowds=False) == 1.5
    assert came[:4] == [(0, [0.0])] * 3 + [(0, [0.0] * 4)]
    assert came[4][1] == pytest.approx([0.6 * i for i in range(8)]), "each when the prompt before it was read"
    assert came[5:] == [(1, [0.0]), (1, [0.0] * 4), (4, [0.0]), (4, [0.0] * 4)]
    came.clear()
    rehearse(send, drafts=False, crowds=True)
    assert came[5:] == [(0, [0.0] * 16), (0, [0.0] * 32)]


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("costs", "passes", 0, 4), "x", "seconds='x'"),
        (("costs", "passes", 0, 4), -1.0, "seconds=-1.0"),
        (("costs", "host", 0, 1), math.nan, "seconds=nan"),
        (("planning", "round_s"), "x", "round_s='x'"),
        (("machine", "num_pages"), 0, "num_pages=0"),
        (("traces", 0, "request", 0), -39, "prompt_tokens=-39"),
        (("traces", 0, "offers"), [], "AttributeError"),
        (("traces", 0, "offers", "ngram", 0, 0), "x", "position='x'"),
        (("traces", 0, "offers", "ngram", 0, 1), 1000000, "nodes=1000000"),
        (("traces", 0, "offers", "ngram", 0, 2), "abc", "path='a'"),
    ],
)
def test_numbers_that_nobody_can_have_recorded_are_damage(
    tmp_path: Path, where: Sequence[str | int], value: object, said: str
) -> None:
    file = tmp_path / "r.json"
    made_up(0.0).save(file)
    whole = part = json.loads(file.read_text())
    *path, last = where
    for key in path:
        part = part[key]
    part[last] = value
    file.write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=f"the recording is damaged .*{said}.*; record it again"):
        Recording.load(file)


def test_a_recording_survives_its_file(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record_real(tiny_target, monkeypatch, planner="fixed", requests=6)
    recording = replace(recording, planning=Planning(-1e-4, 2e-5))
    file = tmp_path / "r.json"
    recording.save(file)
    read = Recording.load(file)
    assert read.planning == recording.planning
    assert read.machine == recording.machine
    assert read.drafters == recording.drafters
    assert read.costs == recording.costs
    assert drafters_of(read) == ["ngram"]
    assert len(traces_of(read, "ngram")) == 6
    for ours, theirs in zip(recording.traces, read.traces, strict=True):
        assert ours.offers.keys() == theirs.offers.keys()
        assert ours.spare == theirs.spare
        for name, offers in ours.offers.items():
            assert [(o.position, o.nodes, o.path, o.parents) for o in offers] == [
                (o.position, o.nodes, o.path, o.parents) for o in theirs.offers[name]
            ]
    assert file.stat().st_size < 60_000
    for text, said in (
        ("{", r"is no recording, .*make one"),
        ("{}", "no recording"),
        ("[1]", "no recording"),
        ('{"slipstream_recording":3}', "by an older slipstream .version 3, this one reads 4.; record it again"),
        ('{"slipstream_recording":99}', "by a newer slipstream"),
        (f'{{"slipstream_recording":{VERSION}}}', "damaged"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            Recording.load(file)


def test_inside_a_right_stretch_the_rest_of_the_offer_is_left() -> None:
    offers = (Offer(2, 5, (0, 1, 2), (0.9, 0.8, 0.7, 0.1, 0.1)), Offer(9, 2, ()))
    walk = Walk(Trace(4, 20, 0, 0, 0, ("d",), {"d": offers}), {"d": 1.0}, random.Random(0))
    assert walk.offer("d", 1) is None
    assert walk.offer("d", 2) is offers[0]
    rest = walk.offer("d", 4)
    assert rest is not None
    assert (rest.nodes, rest.right) == (3, 1)
    assert rest.promises is not None
    assert rest.promises[0] == pytest.approx(0.7 / 0.8)
    assert walk.offer("d", 6) is None, "behind what was right nothing is known"
    assert walk.offer("d", 22) is offers[0], "a longer answer begins again"
    assert walk.depth("d", 2, 8) == 3, "its fourth guess was wrong"
    assert walk.depth("d", 2, 2) == 2


def test_stalls_count_and_accidents_do_not(tiny_target: Path) -> None:
    recorder = Recorder(Stepper(tiny_target, "ngram").engine)
    for seconds in (1.0, 1.0, 1.0, 1.0, 3.5, 1000.0):
        recorder.round([], [], [], RoundTimes(0.0, 0.0, seconds, rows=1))
    (seen,) = recorder.recording("tiny", busy=False).costs.passes
    assert seen.seconds == pytest.approx((4 + 3.5 + 8) / 6)


@pytest.mark.parametrize("queued", [False, True])
def test_what_passes_felt_of_wider_ones_is_recorded(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    recorder, clock = Recorder(Stepper(tiny_target, "ngram").engine), Clock()
    monkeypatch.setattr(recorder, "_queued", queued)
    monkeypatch.setattr(time, "perf_counter", clock)
    for rows, seconds in ((64, 0.2), *[(1, 0.006)] * 30, (64, 0.2)):
        clock.now += seconds
        recorder.round([], [], [], RoundTimes(0.0, 0.0, seconds, rows=rows))
    passes = recorder.recording("tiny", busy=False).costs.passes
    wakes = [seen.wake for seen in passes if seen.rows == 1]
    if queued:
        assert wakes == [0], "a device is as fast at all times"
        return
    assert wakes == sorted(wakes)
    assert (min(wakes), max(wakes)) == pytest.approx((0, 6), abs=0.2)
    assert sum(seen.count for seen in passes if seen.rows == 1) == 30
    assert all(seen.wake == 0 for seen in passes if seen.rows == 64)


def test_traffic_comes_at_its_rate_and_from_files(tmp_path: Path) -> None:
    times = poisson_times(5.0, 4000, seed=1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(800, rel=0.1)
    assert times == poisson_times(5.0, 4000, seed=1) != poisson_times(5.0, 4000, seed=2)
    traces = [Trace(1, 2, 0, 0, 0), Trace(3, 4, 0, 0, 0)]
    assert sorted(one.like for one in poisson(1.0, 10, traces, seed=0)) == [0] * 5 + [1] * 5
    file = tmp_path / "t.jsonl"
    lines = [{"arrival": 7 + i, "prompt_tokens": 5, "output_tokens": 6} for i in range(3)]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [one.at for one in read_traffic(file, traces, 0)] == [0, 1, 2]
    assert [one.at for one in read_traffic(file, traces, 0, rate=4.0)] == [0, 0.25, 0.5]
    file.write_text("\n".join([json.dumps(lines[0])] * 2))
    with pytest.raises(ConfigError, match=r"--rate 4: the requests of .*t\.jsonl all come at once; leave it out"):
        read_traffic(file, traces, 0, rate=4.0)
    for bad in ("", "{}", '{"arrival": 0, "prompt_tokens": 0, "output_tokens": 1}', "x"):
        file.write_text(bad + "\n")
        with pytest.raises(ConfigError, match=r"t\.jsonl"):
            read_traffic(file, traces, 0)


def test_who_does_not_listen_costs_nothing_and_a_recorder_hears_device_drafts(tiny_target: Path) -> None:
    stepper = Stepper(tiny_target, f"model:{tiny_target}")
    assert stepper.engine.listener is None is stepper.engine.drafting.listener
    recorder = Recorder(stepper.engine)
    stepper.engine.listen(recorder, all_guesses=True)
    sink: list[RequestOutput] = []
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculation=SpeculationParams())
    stepper.engine.add(stepper._intake.job([1, 2, 3, EOS - 9], params, sink.append, streaming=False))
    while stepper.engine.busy:
        stepper.engine.step()
    recording = recorder.recording("tiny", busy=False)
    (trace,) = recording.traces
    (name,) = trace.drafters
    assert [offer.right for offer in trace.offers[name]][:2] == [5, 5], "it drafts for itself"
    assert all(seen.seconds > 0 for seen in recording.costs.drafts)
    served = simulate(recording, Setting("fixed", name), replay([trace]), [trace])
    assert served[0].rounds == sink[0].outputs[0].speculation.rounds


def test_the_planner_of_a_simulation_hears_of_steps() -> None:
    """Without them its guard would know nothing."""
    recording = made_up(0.0001)
    (trace,) = recording.traces
    traces = [replace(trace, temperature=warmth, overlap=part) for warmth, part in ((0.0, 0.0), (1.0, 0.6))]
    engine = Replica(recording, RoundCosts(recording.costs, apart=False), Setting("planned", "ngram"))
    for one in traces:
        engine.add(Served(0.0, one.prompt_tokens, one.output_tokens), Walk(one, {}, random.Random(0)))
    while engine.load:
        engine.step(engine.busy_until)
    gains = engine.drafting.planner.gains()
    assert {name.partition(";")[0] for name in gains} == {"ngram"}
    assert min(gains.values()) > 3, "four of five guesses are right, and rows are nearly free"
    for length, part in ((200, 0.0), (200, 0.7), (50, 0.3)):
        assert overlap(made_prompt(length, part)) == pytest.approx(part, abs=0.03)


def test_of_a_recorded_tree_the_surest_nodes_are_guessed_as_deep_as_was_asked() -> None:
    """Its right path is 0, 2, 3; node 1 is a wrong first guess, node 4 the second of the second level."""
    tree = Offer(0, 5, (0, 2, 3), None, (-1, -1, 0, 2, 0))
    walks = Walks()
    walks.begin("a", Walk(Trace(4, 20, 0, 0, 0, ("head",), {"head": (tree,)}), {}, random.Random(0)))
    head = ReplayedDevice(DrafterKind("head", True, 5, levels=3, most_nodes=5, width=2), walks)
    assert head.grows
    assert [head.most_at(levels) for levels in (1, 2)] == [2, 5]
    whole = head.guess("a", 0, 5, 3)
    assert (whole.parents, [whole.tokens[n] for n in (0, 2, 3)]) == ((-1, -1, 0, 2, 0), [0, 1, 2])
    flat = head.guess("a", 0, 4, 2)
    assert flat.parents == (-1, -1, 0, 0)
    assert flat.tokens[:3:2] == (0, 1), "of two levels, what stands deeper makes room"
    assert head.guess("a", 0, 3, 1).parents == (-1, -1, -1), "it has no more of them: what is lacking is wrong"


def queued_engine(host: bool, planning: Planning = NO_PLANNING, way: Speculation = "planned") -> Replica:
    """Passes take 10 ms, and a round that waits for the host 2 ms more."""
    recording = made_up(0.0, queued=True)
    kind = DrafterKind("ngram", False, 5) if host else DrafterKind("ngram", True, 5)
    costs = replace(recording.costs, host=(HostSeen(1, 0.0, 9),), waits=(WaitSeen(1, 1, 0, 0.002, 9),))
    recording = replace(recording, drafters=(kind,), costs=costs, planning=planning)
    engine = Replica(recording, RoundCosts(costs, apart=True), Setting(way, "ngram"))
    engine.add(Served(0.0, 50, 100), Walk(recording.traces[0], {}, random.Random(0)))
    return engine


def test_a_tree_of_few_nodes_is_right_no_deeper_than_they_reach() -> None:
    """Recorded without its nodes: of 60, these were right, by their rank."""
    trees = Offer(0, 60, (0, 2, 5, 30)), Offer(5, 60, (0, 1))
    walks = Walks()
    walks.begin("a", Walk(Trace(4, 20, 0, 0, 0, ("head",), {"head": trees}), {}, random.Random(0)))
    head = ReplayedDevice(DrafterKind("head", True, 63, levels=10, width=8), walks)
    sizes = {(1, 10): [0], (3, 10): [0, 2], (6, 2): [0, 2], (15, 4): [0, 2, 5], (60, 10): [0, 2, 5, 30]}
    for (nodes, levels), right in sizes.items():
        tree = head.guess("a", 0, nodes, levels)
        assert len(tree.tokens) == nodes
        assert [tree.tokens.index(place) for place in range(len(right))] == right
        assert [tree.parents[node] for node in right] == [-1, *right[:-1]]
        assert sum(token < 60 for token in tree.tokens) == len(right), "all others never come"
    inside = [walks.of("a").ranks("head", 2) for _ in range(200)]
    assert {tuple(path[:2]) for path in inside} == {(0, 8)}, "below the node of rank 2 its nodes are among the first"
    assert {tuple(path[2:]) for path in inside} == {(), (9, 10, 11)}, "or what the next tree has follows, too"
    assert walks.of("a").ranks("head", 9) == [], "nobody guessed there"
    apart = Walk(Trace(4, 20, 0, 0, 0, ("head",), {"head": (trees[0], Offer(9, 60, (0, 1)))}), {}, random.Random(0))
    assert {tuple(apart.ranks("head", 2)) for _ in range(200)} == {(0, 8), (0, 8, 9)}, "the next tree is far away"


def test_ranks_are_kept_in_files_and_said_to_be_missing(tmp_path: Path) -> None:
    recording = made_up(0.0)
    trace = replace(recording.traces[0], offers={"head": (Offer(1, 60, (0, 2, 5)), Offer(5, 60, (0, 1)))})
    head = DrafterKind("head", True, 63, levels=10)
    recording = replace(recording, drafters=(head,), traces=(trace,), made=Made(ranks=True))
    file = tmp_path / "r.json"
    recording.save(file)
    read = Recording.load(file)
    assert read.traces == recording.traces
    assert not any("ranks" in doubt for doubt in doubts(read, "head", together=False))
    assert any("ranks" in doubt for doubt in doubts(replace(read, made=Made(ranks=False)), "head", together=False))


@pytest.mark.parametrize("mixed", [False, True])
def test_ranks_of_trees_that_the_device_joined_to_others_are_not_known(tiny_target: Path, mixed: bool) -> None:
    engine = Stepper(tiny_target, f"model:{tiny_target}").engine
    (name,), recorder = engine.drafting.on_device, Recorder(engine)
    answer = engine_answer(name, tokens=[1, 2, 3, 4, 5, 6])
    authors = Authors(("ngram", name), ((-1, -1), (0, 1, 2, 3, 4)), frozenset((name,))) if mixed else author(name)
    verdict = Verdict(answer.id, (4, 5, 6), 5, 2, (1, 3)).by(authors)
    recorder.round([answer], [verdict], [3], RoundTimes(0.0, 0.0, 0.01, rows=6))
    recording = recorder.recording("tiny", busy=False)
    ((offer,),) = [trace.offers[name] for trace in recording.traces]
    assert offer.path == ((0, 1) if mixed else (1, 3))
    assert recording.made.ranks is not mixed


def engine_answer(drafter: str, tokens: list[int]) -> Answer:
    """One that has ended, of a prompt of three tokens."""
    params = SamplingParams(temperature=0, max_tokens=9)
    job = Job("a", None, tokens[:3], params, lambda output: None, arrived=0.0)
    answer = Answer(job, 0, 0, tokens, TextStream(_Silent(), ()), CompletionOutput(0))
    answer.phase, answer.drafters = Phase.ENDED, (drafter,)
    return answer


class _Silent:
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return ""


def test_a_planner_begins_with_what_was_recorded() -> None:
    """Before its first round: of passes, and of a drafter that takes time, no further than it may guess."""
    recording = made_up(0.0, queued=True, draft_tokens=3)
    drafts = tuple(DraftSeen("head", 1, nodes, 0.001 * nodes, 9) for nodes in (1, 3, 6))
    costs = replace(recording.costs, drafts=drafts)
    recording = replace(recording, costs=costs, drafters=(DrafterKind("head", True, 6),))
    engine = Replica(recording, RoundCosts(costs, apart=True), Setting("planned", "head"))
    planner = engine.drafting.planner
    assert isinstance(planner, AdaptivePlanner)
    assert planner.costs.knows_draft("head")
    assert planner.costs.drafts("head", [1, 2, 3], 1) == pytest.approx([0.001, 0.002, 0.003])


def test_a_guess_of_the_host_takes_what_it_takes_for_the_usual_number() -> None:
    """Of a drafter that is free to ask: recorded at 5 guesses a time, and with many."""
    recording = made_up(0.0, draft_s=0.002)
    drafts = (*recording.costs.drafts, DraftSeen("ngram", 1, 63, 0.050, 9))
    recording = replace(recording, costs=replace(recording.costs, drafts=drafts))
    (one,) = simulate(recording, Setting("fixed", "ngram"), replay(recording.traces), recording.traces)
    rounds = one.rounds - 1
    assert one.ended == pytest.approx(0.011 + rounds * 0.013, rel=0.02)


def test_who_comes_late_overtakes_nobody() -> None:
    recording = made_up(0.0, queued=True)
    ends = [Coming(0.0, 50, 2, 0), Coming(0.015, 50, 2, 0), Coming(0.02, 50, 2, 0)]
    passes = (*recording.costs.passes, PassSeen(0, 0, 50, 0, 0.009, 9))
    recording = replace(recording, costs=replace(recording.costs, passes=passes, host=(HostSeen(1, 0.001, 9),)))
    served = sorted(simulate(recording, Setting("off"), ends, recording.traces), key=lambda one: one.arrived)
    assert [one.arrived for one in served] == [0.0, 0.015, 0.02]
    firsts = [one.first_token for one in served]
    assert firsts == sorted(firsts)


def test_only_where_rounds_are_queued_somebody_falls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere drafters read along whether they guess or not."""
    told: dict[bool, set[int]] = {True: set(), False: set()}
    for queued in (True, False):
        recording = replace(made_up(0.004, right=0, queued=queued), drafters=(DrafterKind("ngram", True, 5),))
        engine = Replica(recording, RoundCosts(recording.costs, apart=queued), Setting("planned", "ngram"))
        planner = engine.drafting.planner

        def note(
            offers: Sequence[planned.Offer], load: planned.Load, heard: set[int] = told[queued]
        ) -> list[planned.Budget]:
            heard.update(len(offer.lagging) for offer in offers)
            return [planned.Budget([0] * len(offer.caps)) for offer in offers]

        monkeypatch.setattr(planner, "plan", note)
        for number in range(3):
            engine.add(Served(0.0, 50, 100), Walk(recording.traces[0], {}, random.Random(number)))
        now = 0.0
        for _ in range(80):
            engine.step(now)
            now = engine.busy_until
    assert max(told[True]) > 0
    assert told[False] == {0}


@pytest.mark.parametrize(("queued", "read"), [(False, 1), (True, 2)])
def test_who_comes_while_queued_rounds_run_is_behind_the_one_that_is_queued_already(queued: bool, read: int) -> None:
    """A round takes 10 ms, but 20 where a prompt has a pass of its own beside that of a decode. The second request
    comes in the first one's second round, the third when nobody is left for a round behind this one."""
    recording = made_up(0.0, queued=queued)
    passes = (*recording.costs.passes, *(PassSeen(0, 0, n, 0, 0.010, 9) for n in (50, 100)))
    recording = replace(recording, costs=Costs(passes))
    beside = 0.020 if queued else 0.010
    traffic = [Coming(0.0, 50, 20, 0), Coming(0.015, 50, 3, 0), Coming(0.18 + beside + 0.005, 50, 2, 0)]
    first, second, third = sorted(
        simulate(recording, Setting("off"), traffic, recording.traces), key=lambda served: served.arrived
    )
    assert second.first_token == pytest.approx(0.010 * (1 + read) + beside)
    assert first.ended == pytest.approx(0.19 + beside)
    assert third.first_token == pytest.approx(first.ended + 0.010)


def test_what_drafters_on_the_host_made_a_queued_round_wait_is_told_apart(tiny_target: Path) -> None:
    """What guesses took that cost nothing to ask for is part of it."""
    recorder = Recorder(Stepper(tiny_target, "ngram", rounds="queued").engine)
    recorder.offered(Offered("ngram", [], [5], [], [], 0.0015))
    recorder.round([], [], [], RoundTimes(0.003, 0.0, 0.010, rows=4, waited=0.002, newcomers=1))
    recorder.round([], [], [], RoundTimes(0.001, 0.0, 0.010, rows=1))
    costs = recorder.recording("tiny", busy=False).costs
    (waited,), (beside,) = costs.waits, costs.host
    assert (waited.count, waited.rows, waited.newcomers, beside.count) == (1, 4, 1, 2)
    assert (waited.seconds, beside.seconds) == pytest.approx((0.002, 0.001))


def test_an_accident_among_waits_of_as_many_requests_does_not_count(tiny_target: Path) -> None:
    """Though it was the only one of so many rows. Where requests start, waits are of another kind."""
    recorder = Recorder(Stepper(tiny_target, "ngram", rounds="queued").engine)
    for rows, waited, newcomers in [(4, 0.002, 0)] * 9 + [(8, 1.0, 0), (8, 0.1, 1)]:
        recorder.round([], [], [], RoundTimes(waited, 0.0, 0.010, rows=rows, waited=waited, newcomers=newcomers))
    waits = recorder.recording("tiny", busy=False).costs.waits
    seconds = {(seen.rows, seen.newcomers): seen.seconds for seen in waits}
    assert seconds == pytest.approx({(4, 0): 0.002, (8, 0): 0.016, (8, 1): 0.1})


def test_waits_of_a_simulated_round_are_those_of_its_requests_rows_and_newcomers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A free guess is part of the wait. Somebody starts while the first one's second round runs, in the fourth."""
    recording = made_up(0.0, draft_s=0.004, queued=True)
    costs = replace(recording.costs, host=(HostSeen(1, 0.0, 9),), waits=(WaitSeen(1, 1, 0, 0.002, 9),))
    asked: list[tuple[int, int, int]] = []
    wait_s = RoundCosts.wait_s

    def noted(self: RoundCosts, requests: int, rows: int, newcomers: int = 0) -> float:
        asked.append((requests, rows, newcomers))
        return wait_s(self, requests, rows, newcomers)

    monkeypatch.setattr(RoundCosts, "wait_s", noted)
    engine = Replica(recording, RoundCosts(costs, apart=True), Setting("fixed", "ngram"))
    engine.add(Served(0.0, 50, 100), Walk(recording.traces[0], {}, random.Random(0)))
    lasted = []
    for number in range(5):
        if number == 2:
            engine.add(Served(engine.busy_until - 0.001, 50, 100), Walk(recording.traces[0], {}, random.Random(0)))
        begun = engine.busy_until
        engine.step(begun)
        lasted.append(engine.busy_until - begun)
    assert asked[0] == (0, 0, 1)
    one, two = filled(1 + 5), filled(2 * (1 + 5))
    assert asked[1:] == [(1, one, 0), (1, one, 0), (1, one, 1), (2, two, 0)]
    assert lasted[1:3] == pytest.approx([0.012, 0.012])


def test_prompts_that_have_passes_of_their_own_are_recorded_by_themselves(tiny_target: Path) -> None:
    """What they took, and whether drafters read them, too; a round without them is as it was."""
    recorder = Recorder(Stepper(tiny_target, "ngram", rounds="queued").engine)
    decoding = engine_answer("ngram", tokens=[1, 2, 3, 4, 5])
    verdict = Verdict(decoding.id, (5,), 0, 0, ())
    decoding.phase = Phase.RUNNING
    for times in (
        RoundTimes(0.0, 0.0, 0.013, rows=1, read_rows=50, read=0.009, along=True),
        RoundTimes(0.0, 0.0, 0.012, rows=1, read_rows=50, read=0.008),
        RoundTimes(0.0, 0.0, 0.004, rows=1),
    ):
        recorder.round([decoding], [verdict], [1], times)
    recorder.round([], [], [], RoundTimes(0.0, 0.0, 0.007, read_rows=20, read=0.007))
    passes = recorder.recording("tiny", busy=False).costs.passes
    known = {(p.requests, p.rows, p.read_rows, p.along, p.count): p.seconds for p in passes}
    assert known == {
        (0, 0, 20, False, 1): pytest.approx(0.007),
        (0, 0, 50, False, 1): pytest.approx(0.008),
        (0, 0, 50, True, 1): pytest.approx(0.009),
        (1, 1, 0, False, 3): pytest.approx(0.004),
    }


def test_waits_are_longer_for_each_row_and_where_requests_begin() -> None:
    """2 ms for one request and 3 for two, 0.1 more a row and 4 for each that begins; of four only one wait was seen."""
    seen = [
        WaitSeen(n, rows, newcomers, 0.001 + 0.001 * n + 0.0001 * rows + 0.004 * newcomers, 9)
        for n, rows, newcomers in itertools.product((1, 2), (8, 16, 40), (0, 1))
    ]
    waits = (*seen, WaitSeen(4, 8, 1, 0.005 + 0.0008 + 0.004, 1))
    recording = made_up(0.0, queued=True)
    told = RoundCosts(replace(recording.costs, waits=waits), apart=True)
    assert told.wait_s(1, 8) == pytest.approx(0.0028)
    assert told.wait_s(2, 24, 3) == pytest.approx(0.003 + 0.0024 + 0.012)
    assert told.wait_s(4, 40) == pytest.approx(0.009)
    few = RoundCosts(replace(recording.costs, waits=(*seen[:2], *seen[-2:])), apart=True)
    assert few.wait_s(1, 8) == few.wait_s(1, 40, 3), "two of a kind are no proof"
    assert RoundCosts(recording.costs, apart=True).wait_s(1, 8, 1) == 0


def test_prompts_take_longer_where_a_head_reads_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth longer, whatever their length: recorded both ways for five of these, of others with the head only."""
    recording = made_up(0.0, queued=True)
    both = [
        PassSeen(0, 0, n, 0, (0.004 + 0.0001 * n) * (1 + 0.2 * along), 3, 0.0, along)
        for n in (10, 30, 50, 70, 90)
        for along in (False, True)
    ]
    more = [PassSeen(0, 0, n, 0, (0.004 + 0.0001 * n) * 1.2, 3, 0.0, True) for n in (20, 40, 60, 80)]
    costs = replace(recording.costs, passes=(*recording.costs.passes, *both, *more), host=())
    ends = [replace(trace, output_tokens=1, drafters=("head",), offers={}) for trace in recording.traces]
    recording = replace(recording, costs=costs, drafters=(DrafterKind("head", True, 5),))
    ways: dict[Speculation, float] = {"off": 0.009, "fixed": 0.009 * 1.2}
    for way, prompt_s in ways.items():
        (one,) = simulate(recording, Setting(way, "head"), replay(ends), ends)
        assert one.ended == pytest.approx(prompt_s, rel=0.01), way
    (one,) = simulate(recording, Setting("planned", "head"), replay(ends), ends)
    assert one.ended == pytest.approx(0.009 * 1.2, rel=0.01), "a new planner leaves nobody"
    monkeypatch.setattr(AdaptivePlanner, "follows", lambda planner, drafter: False)
    (one,) = simulate(recording, Setting("planned", "head"), replay(ends), ends)
    assert one.ended == pytest.approx(0.009, rel=0.01), "it has had no part for long"
    monkeypatch.undo()
    few = replace(recording, costs=replace(costs, passes=(*recording.costs.passes[:10], *both[:4], *more)))
    (one,) = simulate(few, Setting("off", "head"), replay(ends), ends)
    assert one.ended > 0.0095, "two are no proof"


@pytest.mark.parametrize("host", [True, False])
def test_a_queued_round_waits_for_the_host_and_else_is_planned_before_the_last_is_heard_of(
    monkeypatch: pytest.MonkeyPatch, host: bool
) -> None:
    engine = queued_engine(host)
    planner = engine.drafting.planner
    told: list[str] = []
    for name in ("observe", "observe_step", "observe_wait"):
        monkeypatch.setattr(planner, name, lambda *_, _name=name, **__: told.append(_name))
    plan = planner.plan

    def note(offers: Sequence[planned.Offer], load: planned.Load) -> list[planned.Budget]:
        told.extend(["plan"] * bool(load.requests))
        return plan(offers, load)

    monkeypatch.setattr(planner, "plan", note)
    engine.step(0.0)  # its prompt, for which there is nothing to plan
    assert not told
    for _ in range(3):
        begun = engine.busy_until
        engine.step(begun)
        assert engine.busy_until - begun == pytest.approx(0.012 if host else 0.010)
    if host:
        assert told == ["plan", *(2 * ["observe", "plan", "observe_wait", "observe_step"])]
    else:
        assert told == ["plan", *(2 * ["plan", "observe", "observe_step"])]


@pytest.mark.parametrize(
    ("way", "host", "longer_s"), [("planned", True, 0.004), ("planned", False, 0), ("fixed", True, 0)]
)
def test_who_waits_for_the_host_waits_for_the_planner_too(way: Speculation, host: bool, longer_s: float) -> None:
    engines = [queued_engine(host, planning, way) for planning in (Planning(), Planning(0.003, 0.001))]
    for _ in range(3):
        for engine in engines:
            engine.step(engine.busy_until)
    usual, longer = engines
    assert longer.busy_until - usual.busy_until == pytest.approx(2 * longer_s), "the first round reads the prompt"


def test_nobody_is_told_of_an_answer_that_was_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last round is heard of behind the plan in which it lost its place, when the planner has forgotten it."""
    recording = made_up(0.0, queued=True, num_pages=14, right=0)
    engine = Replica(recording, RoundCosts(recording.costs, apart=True), Setting("fixed", "ngram"))
    told: list[bool] = []

    def note(drafter: str, request_id: str, *_: object) -> None:
        told.append(any(answer.id == request_id for answer in engine.scheduler.running))

    monkeypatch.setattr(engine.drafting.planner, "observe", note)
    for number in range(2):
        engine.add(Served(0.0, 50, 100), Walk(recording.traces[0], {}, random.Random(number)))
    while engine.load:
        engine.step(engine.busy_until)
    assert engine.scheduler.preemptions
    assert len(told) > 150
    assert all(told)


def test_all_guesses_are_made_for_a_recording_only(tiny_target: Path) -> None:
    engine = Stepper(tiny_target, "ngram").engine
    recorder = Recorder(engine)
    assert not engine.drafting.records, "it does not listen yet"
    engine.listen(recorder, all_guesses=True)
    assert engine.drafting.records
    engine.listen(None)
    assert not engine.drafting.records
