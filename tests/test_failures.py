"""When something breaks: the request concerned ends with a clear error, the others with their answers."""

from __future__ import annotations

import json
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import VOCAB
from scripted import Answers, Right
from slipstream import LLM, RequestOutput, SamplingParams, SpeculationParams
from slipstream.core.draft import Draft, Tree
from slipstream.core.errors import DrafterError, EngineDied, RequestError
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DeviceDrafter, Drafter, DraftRequest, DraftRound, HostDrafter, Needs
from slipstream.engine.text import TextStream
from slipstream.models.batch import PassBatch

BAD = 13


class Broken:
    """Breaks the target: rows that read the bad token have NaN in their logits, and in the cache as well."""

    def __init__(self, llm: LLM, bad: int = BAD) -> None:
        self._forward = llm.engine.target.forward
        self.bad = bad
        self.on = True
        llm.engine.target.forward = self._pass  # type: ignore[method-assign]

    def _pass(self, batch: PassBatch, cache: Any) -> torch.Tensor:
        logits = self._forward(batch, cache)
        if not self.on:
            return logits
        broken = batch.input_ids == self.bad
        for layer in range(len(cache.layers)):
            cache.keys(layer)[batch.slots[broken]] = torch.nan
        assert batch.logit_rows is not None
        logits[broken[batch.logit_rows]] = torch.nan
        return logits


def tokens(output: RequestOutput) -> list[list[int]]:
    return [answer.token_ids for answer in output.outputs]


def healthy(output: RequestOutput) -> bool:
    return all(answer.error is None and answer.finish_reason == "length" for answer in output.outputs)


GOOD = [[20 + i] * (3 + 4 * i) for i in range(4)]
PARAMS = [
    SamplingParams(max_tokens=25, seed=i, temperature=0.4 * i, ignore_eos=True, logit_bias={BAD: -100.0}, n=1 + i % 2)
    for i in range(4)
]


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_nan_fails_one_request_and_no_other(open_llm: Callable[..., LLM], drafter: str | None) -> None:
    llm = open_llm(drafter=drafter)
    expected = [tokens(output) for output in llm.generate(GOOD, PARAMS)]
    broken = Broken(llm)
    for bad in ([BAD], [1, 2, BAD], [BAD] * 40, [5] * 30 + [BAD]):
        outputs = llm.generate([GOOD[0], GOOD[1], bad, GOOD[2], GOOD[3]], [*PARAMS[:2], PARAMS[1], *PARAMS[2:]])
        for answer in outputs[2].outputs:
            assert answer.finish_reason == "error"
            assert "no usable logits (NaN" in (answer.error or "")
            assert (answer.token_ids, answer.text) == ([], "")
            assert answer.speculation.emitted == 0
        others = [output for i, output in enumerate(outputs) if i != 2]
        assert all(healthy(output) for output in others)
        assert [tokens(output) for output in others] == expected
        assert llm.engine.pool.free_pages == llm.engine.pool.num_pages
        # its pages are the next one's
        assert [tokens(llm.generate(p, s)[0]) for p, s in zip(GOOD, PARAMS, strict=True)] == expected
    broken.on = False
    assert all(healthy(output) for output in llm.generate([[BAD]], PARAMS[0]))


def test_no_nan_is_left_in_the_cache(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    Broken(llm)
    llm.generate([[BAD] * 20, [3, BAD]], SamplingParams(n=2))
    for layer in range(len(llm.engine.cache.layers)):
        assert not llm.engine.cache.keys(layer).isnan().any()


def test_nan_in_the_middle_of_an_answer(open_llm: Callable[..., LLM]) -> None:
    """What came before stays; a sibling that never meets it goes on, on the prompt's pages that both share."""
    answers = Answers()
    llm = open_llm(drafter=Right(answers), planner="fixed")
    params = SamplingParams(n=6, max_tokens=60, seed=1, temperature=3, ignore_eos=True)
    prompt = [40 + i for i in range(37)]
    plain = tokens(open_llm(drafter=None).generate(prompt, params)[0])
    for sample, answer in enumerate(plain):
        answers.tell(prompt, 1, answer, sample)
    bad = next(  # one answer has it somewhere in the middle, another not at all
        token
        for token in plain[0][10:40]
        if token not in prompt and token not in plain[0][:10] and any(token not in other for other in plain)
    )
    Broken(llm, bad)
    (output,) = llm.generate(prompt, params)
    for found, right in zip(output.outputs, plain, strict=True):
        if bad in right[:-1]:
            assert found.finish_reason == "error"
            assert found.token_ids == right[: right.index(bad) + 1]
            assert found.speculation.emitted == len(found.token_ids)
        else:
            assert found.finish_reason == "length"
            assert found.token_ids == right
    assert {found.finish_reason for found in output.outputs} == {"error", "length"}
    assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


def test_where_every_token_is_forbidden(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    nothing = SamplingParams(min_tokens=2, stop_token_ids=range(VOCAB))
    outputs = llm.generate([[5], [6]], [nothing, PARAMS[2]])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "every token masked" in (outputs[0].outputs[0].error or "")
    assert healthy(outputs[1])


class Breakdown(Exception):
    pass


def test_an_exception_in_a_round_ends_what_runs_and_the_engine_goes_on(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    expected = [tokens(output) for output in llm.generate(GOOD, PARAMS)]
    forward, calls = llm.engine.target.forward, 0

    def fail_once(batch: Any, cache: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Breakdown("the lights went out")
        return forward(batch, cache)

    llm.engine.target.forward = fail_once  # type: ignore[method-assign]
    for output in llm.generate(GOOD, PARAMS):
        for answer in output.outputs:
            assert answer.finish_reason == "error"
            assert answer.error == "the engine failed: Breakdown: the lights went out"
            assert len(answer.token_ids) < 25
    assert not llm.engine.jobs
    assert llm.engine.pool.free_pages == llm.engine.pool.num_pages
    assert [tokens(output) for output in llm.generate(GOOD, PARAMS)] == expected


@pytest.mark.parametrize("where", ["eager.pack", "eager.choose", "eager.verify_exact", "step.emit"])
def test_wherever_it_breaks(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    llm = open_llm()
    (right,) = llm.generate(GOOD[2], PARAMS[2])

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise Breakdown(where)

    with monkeypatch.context() as patch:
        patch.setattr(f"slipstream.engine.{where}", fail)
        (output,) = llm.generate(GOOD[2], PARAMS[2])
        assert output.outputs[0].error == f"the engine failed: Breakdown: {where}"
    (again,) = llm.generate(GOOD[2], PARAMS[2])
    assert tokens(again) == tokens(right)


def test_a_request_that_cannot_start_fails_alone(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm()
    expected = [tokens(output) for output in llm.generate(GOOD, PARAMS)]
    add = llm.engine.sampling.add

    def refuse_seed_99(slot: int, params: SamplingParams, **state: Any) -> None:
        if params.seed == 99:
            raise Breakdown("not with this seed")
        add(slot, params, **state)

    monkeypatch.setattr(llm.engine.sampling, "add", refuse_seed_99)
    outputs = llm.generate([*GOOD, [1]], [*PARAMS, SamplingParams(seed=99, n=2)])
    assert [tokens(output) for output in outputs[:4]] == expected
    assert outputs[4].finished
    assert [a.error for a in outputs[4].outputs] == ["it could not start: Breakdown: not with this seed"] * 2


@pytest.mark.parametrize("where", ["target.forward", "sampling.add"])
def test_an_engine_whose_device_failed_is_closed(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Every call to it would fail from then on; also where it failed while a request started."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        try:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        except RuntimeError as error:
            raise ValueError("not as it should be") from error

    with LLM(tiny_target, device="cpu", memory="64MiB", drafter="none") as llm:
        part, method = where.split(".")
        monkeypatch.setattr(getattr(llm.engine, part), method, fail)
        (output,) = llm.generate([[1]], PARAMS[0])
        why = "the engine broke: ValueError: not as it should be"
        assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("error", why)
        assert (llm._loop.pulse().alive, llm._loop.pulse().why) == (False, why)
        with pytest.raises(EngineDied, match=f"the engine is closed: .*{why}"):
            llm.generate([[1]], PARAMS[0])


class RaisesAtTheEnd(Right):
    """A drafter whose `stop` raises what no code should."""

    name: ClassVar[str] = "raises_at_the_end"

    def stop(self, request_id: str) -> None:
        raise SystemExit(3)


def test_a_drafter_that_exits(open_llm: Callable[..., LLM]) -> None:
    answers = Answers()
    llm = open_llm(drafter=RaisesAtTheEnd(answers))
    params = SamplingParams(max_tokens=10, seed=1, ignore_eos=True)
    (plain,) = open_llm(drafter=None).generate([[1]], params)
    answers.tell([1], 1, plain.outputs[0].token_ids)
    for _ in range(2):
        (output,) = llm.generate([[1]], params)
        assert tokens(output) == tokens(plain)


def test_an_engine_that_cannot_even_clean_up_keeps_nobody_waiting(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm()
    entered, leave = threading.Event(), threading.Event()
    release = llm.engine.scheduler.release

    def fail_late(*args: Any) -> Any:
        entered.set()
        assert leave.wait(60)
        raise Breakdown("first")

    def fail_again(*args: Any) -> None:
        raise Breakdown("and again")

    monkeypatch.setattr(llm.engine.target, "forward", fail_late)
    monkeypatch.setattr(llm.engine.scheduler, "release", fail_again)
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            heard.put(llm.generate([[1], [2]], PARAMS[0]))
        except RequestError as error:
            heard.put(error)

    first = threading.Thread(target=ask)
    first.start()
    assert entered.wait(60)
    second = threading.Thread(target=ask)
    second.start()
    while not llm._loop._inbox.qsize():
        second.join(0.01)
    leave.set()
    first.join(60)
    second.join(60)
    found = [heard.get(timeout=60), heard.get(timeout=60)]
    (outputs,) = (f for f in found if isinstance(f, list))
    (refusal,) = (f for f in found if isinstance(f, RequestError))
    assert {a.finish_reason for output in outputs for a in output.outputs} == {"error"}
    assert any("and again" in (a.error or "") for output in outputs for a in output.outputs)
    assert "the engine is closed" in str(refusal)
    with pytest.raises(RequestError, match="the engine is closed"):
        llm.generate("a")
    monkeypatch.setattr(llm.engine.scheduler, "release", release)
    for answer in list(llm.engine.scheduler.running):
        release(answer)


def test_a_callers_queue_that_raises_ends_its_request_only(open_llm: Callable[..., LLM]) -> None:
    llm = open_llm()
    expected = [tokens(output) for output in llm.generate(GOOD, PARAMS)]

    def deaf(output: RequestOutput) -> None:
        raise Breakdown("not listening")

    job = llm._intake.job([1, 2], SamplingParams(max_tokens=200, ignore_eos=True), deaf, streaming=True)
    llm._loop.post([job], lambda error: None)
    assert [tokens(output) for output in llm.generate(GOOD, PARAMS)] == expected
    llm._loop.call(lambda: None)
    assert not llm.engine.jobs
    assert job.answers[0].output.finish_reason == "abort"


class _Guess(HostDrafter):
    """Guesses one token for ever, alone or beside others."""

    name = "guess"
    bounded = True

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return [self.tree if nodes >= len(self.tree) else Tree() for nodes in budget]


@pytest.mark.parametrize("tree", [Tree.chain([BAD]), Tree((BAD, 5, 6), (-1, -1, 1)), Tree.chain([5, BAD, 6])])
def test_a_guess_that_is_not_finite_changes_nothing(
    tmp_path: Path, open_llm: Callable[..., LLM], tiny_target: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its NaN reaches the rows beside it, by 0 times NaN; plain decoding never meets it."""
    monkeypatch.setattr("slipstream.models.parity._check_finite", lambda *_: None)  # which refuses such weights
    poisoned = tmp_path / "poisoned"
    shutil.copytree(tiny_target, poisoned)
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = torch.nan
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    llm = open_llm(poisoned, drafter=_Guess(tree), planner="fixed")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={BAD: -1e6})
    plain = replace(params, speculation=SpeculationParams(enabled=False))
    expected, got = llm.generate([[1, 2, 3], [4]], plain), llm.generate([[1, 2, 3], [4]], params)
    assert all(healthy(output) for output in (*expected, *got))
    assert [tokens(output) for output in got] == [tokens(output) for output in expected]
    assert all(output.outputs[0].speculation.drafted for output in got)


class _Bad(Drafter):
    """A drafter that raises where it is told to."""

    name = "bad"

    def __init__(self, where: str) -> None:
        self.where = where

    def start(self, request: DraftRequest) -> None:
        self.maybe("start")

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.maybe("observe")

    def stop(self, request_id: str) -> None:
        self.maybe("stop")

    def maybe(self, here: str) -> None:
        if here == self.where:
            raise RuntimeError("out of memory, say")


class _BadDevice(_Bad, DeviceDrafter):
    needs = Needs(device=True)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        self.maybe("propose")
        return Draft.pack([Tree.chain([7] * nodes) for nodes in budget], torch.device("cpu"))

    def draft(self, round: DraftRound) -> torch.Tensor:
        self.maybe("propose")
        return torch.full((len(round.lanes), round.depth), 7)


class _BadFollower(_BadDevice):
    needs = Needs(device=True, own_cache=True)

    def has_read(self, request_id: str) -> int:
        self.maybe("has_read")
        return 40

    def resume(self, request_id: str, known: int) -> None:
        self.maybe("resume")


@pytest.mark.parametrize(("where", "answers"), [("has_read", 2), ("resume", 1)])
def test_a_drafter_that_raises_beside_rounds_is_dropped(open_llm: Callable[..., LLM], where: str, answers: int) -> None:
    """At the end of an answer, and where the second finds the prompt of the first."""
    llm = open_llm(drafter=_BadFollower(where), planner="fixed")
    for _ in range(2):
        assert healthy(llm.generate([[5] * 40], SamplingParams(max_tokens=4, ignore_eos=True))[0])
    assert llm.snapshot().drops == {"bad": {"raised": answers}}


class _BadHost(_Bad, HostDrafter):
    bounded: ClassVar[bool] = True

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        self.maybe("propose")
        return [Tree.chain([7] * nodes) for nodes in budget]


class _BadThread(_BadHost):
    bounded = False


@pytest.mark.parametrize("where", ["start", "observe", "stop", "propose", "nowhere"])
def test_a_device_drafter_that_raises_is_dropped(
    open_llm: Callable[..., LLM], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = open_llm(drafter=_BadDevice(where), planner="fixed")
    plain = [replace(p, speculation=SpeculationParams(enabled=False)) for p in PARAMS]
    expected = [tokens(output) for output in llm.generate(GOOD, plain)]
    outputs = llm.generate(GOOD, PARAMS)
    assert [tokens(output) for output in outputs] == expected
    failed = [a.speculation.by_drafter["bad"].failures for output in outputs for a in output.outputs]
    assert all(failed) if where != "nowhere" else not any(failed)
    said = [record for record in caplog.records if record.name.startswith("slipstream")]
    drops = llm.snapshot().drops
    if where == "nowhere":
        assert (said, drops) == ([], {})
    else:
        assert len(said) == 1, "one line for one cause"
        assert said[0].getMessage().startswith("drafter bad failed: it raised RuntimeError")
        assert "out of memory, say" in caplog.text
        assert drops == {"bad": {"raised": len(failed)}}
        assert json.loads(json.dumps(asdict(llm.snapshot())))["drops"] == drops, "as the live page has it"
    if where not in ("nowhere", "stop"):  # the answer has ended then
        whys = [answer.speculation.why for output in outputs for answer in output.outputs]
        assert all(why.startswith("off: it raised RuntimeError") for why in whys), whys


@pytest.mark.parametrize("rounds", ["eager", "queued"])
@pytest.mark.parametrize("where", ["observe", "propose"])
@pytest.mark.parametrize("kind", [_BadHost, _BadThread, _BadDevice])
def test_a_strict_engine_raises_what_a_drafter_raises(
    open_llm: Callable[..., LLM], kind: type[Any], where: str, rounds: str
) -> None:
    llm = open_llm(drafter=kind(where), planner="fixed", strict_drafter=True, rounds=rounds)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    plain = replace(params, speculation=SpeculationParams(enabled=False))
    for streams in (False, True):
        with pytest.raises(DrafterError, match="drafter bad failed: it raised RuntimeError: out of mem") as raised:
            list(llm.stream(GOOD[0], params)) if streams else llm.generate(GOOD, params)
        assert isinstance(raised.value.__cause__, RuntimeError)
        assert all(healthy(output) for output in llm.generate(GOOD, plain)), "it goes on"


def test_a_tokenizer_that_breaks_at_the_end(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer ends all the same, holds nothing any more, and says what is missing."""
    llm = open_llm(drafter=None)
    monkeypatch.setattr(TextStream, "finish", lambda self: 1 / 0)
    answer = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0]
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 4)
    assert "ZeroDivisionError" in (answer.error or "")
    assert not llm.engine.busy
