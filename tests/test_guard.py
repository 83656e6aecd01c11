"""The guard and the registry: whatever a drafter does, the engine gets drafts that it can verify, in time."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest

from slipstream.core.draft import Tree
from slipstream.core.errors import ConfigError
from slipstream.core.params import SamplingParams
from slipstream.core.verdict import Verdict
from slipstream.drafters import DrafterSpec, drafter_factory, drafter_names, parse_spec, register
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.drafters.guard import BACKLOG, DrafterGuard, Failure
from slipstream.drafters.ngram import NgramDrafter

VOCAB = 10
AT_ONCE = 0.0  # the shortest deadline: 10 ms
PATIENT = 300.0  # a deadline of 30 s, which only a fault would reach


def request(name: str) -> DraftRequest:
    return DraftRequest(name, [1, 2], 2, SamplingParams(), slot=0)


def verdict(name: str) -> Verdict:
    return Verdict(name, (1,), 0, 0, ())


class Scripted(HostDrafter):
    """Does for each request what the script says; drafts one token where it says nothing."""

    name: ClassVar[str] = "scripted"

    def __init__(self, script: dict[str, Callable[[], Any]] | None = None) -> None:
        self.script = script or {}
        self.calls: list[tuple[str, ...]] = []

    def _play(self, name: str, *ids: str) -> list[Any]:
        self.calls.append((name, *ids))
        return [self.script.get(f"{name} {i}", lambda: Tree((3,), (-1,)))() for i in ids]

    def start(self, request: DraftRequest) -> None:
        self._play("start", request.id)

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        return self._play("propose", *(r.id for r in requests))

    def promise(self, request_id: str) -> Sequence[float] | None:
        give: Callable[[], Any] = self.script.get(f"promise {request_id}", lambda: None)
        return give()  # type: ignore[no-any-return]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self._play("observe", *(v.request_id for v in verdicts))

    def stop(self, request_id: str) -> None:
        self._play("stop", request_id)


class InPlace(Scripted):
    bounded: ClassVar[bool] = True


def fail() -> None:
    raise ZeroDivisionError("bad luck")


def leave() -> None:
    raise SystemExit(1)


@pytest.fixture(params=[Scripted, InPlace], ids=["threaded", "in place"])
def kind(request: pytest.FixtureRequest) -> type[Scripted]:
    chosen: type[Scripted] = request.param
    return chosen


GARBAGE: dict[str, Any] = {
    "an id above the vocabulary": Tree((VOCAB,), (-1,)),
    "a negative id": Tree((-1,), (-1,)),
    "a parent behind its child": Tree((1, 2), (1, -1)),
    "its own parent": Tree((1,), (0,)),
    "a parent below the root": Tree((1,), (-2,)),
    "too many nodes": Tree.chain([1] * 5),
    "fewer parents than tokens": Tree((1, 2), (-1,)),
    "the same sibling twice": Tree((1, 1), (-1, -1)),
    "None": None,
    "tokens alone": [1, 2],
    "floats": Tree((1.0,), (-1,)),  # type: ignore[arg-type]
    "words": Tree(("a",), (-1,)),  # type: ignore[arg-type]
    "no tokens at all": Tree(None, None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_drops_the_drafter_for_that_request_only(kind: type[Scripted], garbage: Any) -> None:
    drafter = kind({"propose bad": lambda: garbage})
    guard = DrafterGuard(drafter, VOCAB)
    requests = [request("good"), request("bad"), request("fine")]
    first = guard.propose(requests, [4, 4, 4], PATIENT)
    assert [tree.tokens for tree in first.trees] == [(3,), (), (3,)]
    assert list(first.failures) == ["bad"]
    assert first.failures["bad"] in (Failure("invalid", "it gave no valid draft"), Failure.of(TypeError()))
    second = guard.propose(requests, [4, 4, 4], PATIENT)
    assert [tree.tokens for tree in second.trees] == [(3,), (), (3,)]
    assert drafter.calls[-1] == ("propose", "good", "fine")
    assert not second.failures
    assert guard.failures == 1
    assert guard.dropped is None


@pytest.mark.parametrize("trouble", [fail, leave])
def test_the_culprit_of_a_call_that_raises_is_found(kind: type[Scripted], trouble: Callable[[], None]) -> None:
    drafter = kind({"propose bad": trouble})
    guard = DrafterGuard(drafter, VOCAB)
    proposals = guard.propose([request("good"), request("bad")], [4, 4], PATIENT)
    assert [tree.tokens for tree in proposals.trees] == [(3,), ()]
    assert list(proposals.failures) == ["bad"]
    assert guard.failures == 2  # the batched call, and the one for the culprit


def test_the_reason_names_the_error(kind: type[Scripted], caplog: pytest.LogCaptureFixture) -> None:
    guard = DrafterGuard(kind(dict.fromkeys(("propose a", "propose b", "stop a"), fail)), VOCAB)
    failure = Failure("raised", "it raised ZeroDivisionError")
    assert guard.propose([request("a"), request("b")], [4, 4], PATIENT).failures == {"a": failure, "b": failure}
    (said,) = caplog.records  # of one cause
    assert said.getMessage().startswith("drafter scripted failed: it raised ZeroDivisionError")
    assert "bad luck" in caplog.text
    assert "in fail" in caplog.text


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_trees(kind: type[Scripted], count: int) -> None:
    class Miscounting(kind):  # type: ignore[valid-type, misc]
        def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
            return [Tree()] * count

    guard = DrafterGuard(Miscounting(), VOCAB)
    proposals = guard.propose([request("a"), request("b")], [4, 4], PATIENT)
    assert proposals.trees == (Tree(), Tree())
    # Asked one by one, a drafter that always gives one tree is right.
    assert set(proposals.failures) == (set() if count == 1 else {"a", "b"})


def test_no_requests_and_no_budget_ask_nothing(kind: type[Scripted]) -> None:
    drafter = kind()
    guard = DrafterGuard(drafter, VOCAB)
    assert guard.propose([], [], PATIENT).trees == ()
    assert guard.propose([request("a")], [0], PATIENT).trees == (Tree(),)
    assert drafter.calls == []


def test_promises_come_with_the_trees(kind: type[Scripted]) -> None:
    guard = DrafterGuard(kind({"promise a": lambda: [0.5]}), VOCAB)
    assert guard.propose([request("a"), request("b")], [4, 4], PATIENT).promises == ((0.5,), None)


@pytest.mark.parametrize("promise", [[], [float("nan")], [1.5], 7])
def test_promises_that_are_none(kind: type[Scripted], promise: Any) -> None:
    guard = DrafterGuard(kind({"promise a": lambda: promise}), VOCAB)
    proposals = guard.propose([request("a"), request("b")], [4, 4], PATIENT)
    assert [len(tree) for tree in proposals.trees] == [0, 1]
    assert list(proposals.failures) == ["a"]


def test_start_and_observe_that_raise_drop_their_request(kind: type[Scripted]) -> None:
    drafter = kind({"start a": fail, "observe b": fail})
    guard = DrafterGuard(drafter, VOCAB)
    for name in "abc":
        guard.start(request(name))
    guard.observe([verdict("b"), verdict("c")])
    guard.propose([request("c")], [4], PATIENT)  # behind the others in the mailbox
    proposals = guard.propose([request(name) for name in "abc"], [4, 4, 4], PATIENT)
    assert [len(tree) for tree in proposals.trees] == [0, 0, 1]
    assert drafter.calls[-1] == ("propose", "c")
    guard.observe([verdict("a"), verdict("c")])
    guard.propose([request("c")], [4], PATIENT)
    assert drafter.calls[-2] == ("observe", "c")


def test_a_request_that_starts_again_gets_another_chance(kind: type[Scripted]) -> None:
    drafter = kind({"propose a": fail, "stop a": fail})
    guard = DrafterGuard(drafter, VOCAB)
    guard.propose([request("a")], [4], PATIENT)
    guard.stop("a")
    guard.propose([request("b")], [4], PATIENT)  # behind the stop in the mailbox
    drafter.script.clear()
    guard.start(request("a"))
    assert guard.propose([request("a")], [4], PATIENT).trees == (Tree((3,), (-1,)),)
    assert guard.failures == 2


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """An event that is set when the test is over, which releases the waiting thread."""
    event = threading.Event()
    yield event
    event.set()


def test_a_drafter_that_hangs_is_skipped_and_then_dropped(never: threading.Event) -> None:
    guard = DrafterGuard(Scripted({"propose a": never.wait}), VOCAB)
    begin = time.perf_counter()
    for late in (1, 2, 3):
        assert guard.dropped is None
        proposals = guard.propose([request("a"), request("b")], [4, 4], AT_ONCE)
        assert proposals.trees == (Tree(), Tree())
        assert proposals.late
        assert guard.late == late
    assert guard.dropped == Failure("late", "it was late 3 times in a row")
    assert not guard.propose([request("a")], [4], PATIENT).late  # it is not asked any more
    guard.observe([verdict("a")])
    guard.stop("a")
    assert 0.030 <= time.perf_counter() - begin < 5


@pytest.mark.parametrize("call", ["start", "observe"])
def test_other_calls_that_hang_do_not_block(never: threading.Event, call: str) -> None:
    guard = DrafterGuard(Scripted({f"{call} a": never.wait}), VOCAB)
    guard.start(request("a"))
    guard.observe([verdict("a")])
    for _ in range(3):
        assert guard.propose([request("b")], [4], AT_ONCE).late
    assert guard.dropped is not None


def test_a_drafter_that_is_late_once_comes_back(never: threading.Event) -> None:
    drafter = Scripted({"propose a": lambda: never.wait() and Tree((4,), (-1,))})
    guard = DrafterGuard(drafter, VOCAB)
    for _ in range(2):
        assert guard.propose([request("a")], [4], AT_ONCE).late
    never.set()
    proposals = guard.propose([request("a")], [4], PATIENT)
    assert proposals.trees == (Tree((4,), (-1,)),)
    assert (guard.late, guard.dropped) == (2, None)
    assert drafter.calls == [("propose", "a")] * 2  # the second question was too old to be asked
    never.clear()
    for _ in range(2):
        assert guard.propose([request("a")], [4], AT_ONCE).late
    assert guard.dropped is None  # not three in a row


def test_a_drafter_that_reads_no_notes_is_dropped(never: threading.Event) -> None:
    guard = DrafterGuard(Scripted({"observe a": never.wait}), VOCAB)
    for _ in range(BACKLOG + 3):
        guard.observe([verdict("a")])
    assert guard.dropped == Failure("unread", f"it left {BACKLOG} notes unread")


def drafter_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "drafter-scripted"]


@pytest.mark.parametrize("forget", [False, True])
def test_its_thread_ends_with_the_guard(forget: bool) -> None:
    before = set(drafter_threads())
    guard: DrafterGuard | None = DrafterGuard(Scripted(), VOCAB)
    assert guard is not None
    (thread,) = set(drafter_threads()) - before
    assert thread.daemon
    guard.propose([request("a")], [4], PATIENT)
    if forget:
        guard = None
        gc.collect()
    else:
        guard.close()
        assert guard.propose([request("a")], [4], PATIENT).trees == (Tree(),)
    thread.join(30)
    assert not thread.is_alive()


def test_a_real_drafter_behind_the_guard() -> None:
    guard = DrafterGuard(NgramDrafter(), VOCAB)
    one = DraftRequest("a", [1, 2, 3, 4, 1, 2], 6, SamplingParams(), 0)
    guard.start(one)
    proposals = guard.propose([one], [2], PATIENT)
    assert proposals.trees == (Tree.chain([3, 4]),)
    assert proposals.promises[0] is not None
    guard.observe([Verdict("a", (3, 4, 1), 2, 2, (0, 1))])
    guard.stop("a")
    assert (guard.failures, guard.late, guard.dropped) == (0, 0, None)


def test_specs_are_names_and_paths() -> None:
    assert parse_spec("ngram") == DrafterSpec("ngram")
    assert parse_spec("model:some/folder") == DrafterSpec("model", "some/folder")
    assert parse_spec("draft:C:/models") == DrafterSpec("draft", "C:/models")
    assert (str(parse_spec("draft:x")), parse_spec("draft:x").kind) == ("draft:x", "model")
    assert {"ngram", "prediction", "model"} <= set(drafter_names())
    assert "draft" not in drafter_names()
    assert drafter_factory("ngram") is NgramDrafter


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngrams", "drafter 'ngrams' is unknown: must be one of auto, draft, eagle, eagle3, .*medusa, model.* or none"),
        ("", "drafter '' is unknown"),
        ("model:", "a path must follow the colon"),
        ("ngram:folder", "ngram takes no path, write 'ngram'"),
    ],
)
def test_wrong_specs_explain_themselves(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_spec(text)


def test_names_are_given_once() -> None:
    for name in ("ngram", "draft", "a:b", ""):
        with pytest.raises(ConfigError):
            register(name, Scripted)
    with pytest.raises(ConfigError, match="unknown"):
        drafter_factory("nobody")


def test_listing_drafters_loads_none_of_them() -> None:
    code = "import sys, slipstream.drafters as d; d.parse_spec('model:x'); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
