"""Calls to host drafters: a bad one costs its draft and never an answer.

A drafter may be third-party code. One that raises or returns nonsense is dropped for the requests concerned, which go
on without drafts. One that might hang runs in a thread of its own, fed by a queue: if it is late, the step goes on
without it; after three late steps in a row it is dropped for good. Everything is counted, and each cause is logged once
with its traceback.
"""

from __future__ import annotations

import logging
import math
import operator
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

from slipstream.core.draft import MAX_NODES, Tree, chain_parents
from slipstream.core.errors import DrafterError
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, HostDrafter

LATE_SHARE = 0.1  # deadline as a share of a step
LATE_AT_LEAST_S = 0.010  # shortest deadline; thread switches alone can take less than this
LATE_IN_A_ROW = 3
BACKLOG = 1024  # calls that a drafter may leave waiting
SETTLE_S = 1.0  # longest wait of a strict engine for a drafter to handle the end of a request

_log = logging.getLogger(__name__)
_BAD_CODE = (Exception, SystemExit)
_PLAIN = {int}
_NOTHING = Tree()


class Failure(NamedTuple):
    """A drafter's failure. reason: one of four, for metrics; why: what users are told."""

    reason: str  # "raised", "invalid", "late" or "unread"
    why: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The error's text goes to the log only: it may contain other users' tokens."""
        if isinstance(error, DrafterError):
            return cls("invalid", "it gave no valid draft")
        return cls("raised", f"it raised {type(error).__name__}")


class FailureLog:
    """Logs failures of drafters, each cause once.

    error: with `strict`, the first failure. Its owner raises and clears it.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.error: DrafterError | None = None
        self.strict = strict
        self._logged: set[tuple[str, str, int]] = set()

    def note(self, name: str, failure: Failure, error: BaseException | None = None, stack: str = "") -> None:
        text = f"drafter {name} failed: {failure.why}"
        at = traceback.extract_tb(error.__traceback__)[-1:] if error is not None else []
        cause = (name, failure.why, (at[0].lineno or 0) if at else 0)
        if cause not in self._logged:
            self._logged.add(cause)
            _log.warning("%s (more of this is only counted)%s", text, stack, exc_info=error)
        if self.strict and self.error is None:
            self.error = DrafterError(text if error is None else f"{text}: {error}")
            self.error.__cause__ = error


@dataclass(frozen=True, slots=True)
class Proposals:
    """The checked drafts of a step: one tree and one promise for each request."""

    trees: tuple[Tree, ...]
    promises: tuple[Sequence[float] | None, ...]
    failures: Mapping[str, Failure] = field(default_factory=dict)  # by request, since the last step
    late: bool = False


@dataclass(slots=True)
class _Answer:
    tree: Tree
    promise: Sequence[float] | None = None


_NO_ANSWER = _Answer(_NOTHING)


class _Job:
    """A call in the mailbox. A job that was given up and has not started is skipped."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.done = threading.Event()
        self.given_up = False


class DrafterGuard:
    """Calls a `HostDrafter` for one engine. Never raises because of the drafter, and never blocks for long."""

    def __init__(self, drafter: HostDrafter, vocab_size: int, log: FailureLog | None = None) -> None:
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.failures = 0  # number of calls that raised or returned nonsense
        self.late = 0  # number of steps skipped
        self.dropped: Failure | None = None  # the reason, if it is dropped for good
        self._log = log or FailureLog()
        self._late_in_a_row = 0
        self._failed: dict[str, Failure] = {}  # requests without drafts
        self._unreported: dict[str, Failure] = {}
        self._lock = threading.Lock()  # over the failures, which both threads write
        self._mailbox: SimpleQueue[_Job | None] | None = None
        if not drafter.bounded:
            self._mailbox = SimpleQueue()
            weakref.finalize(self, self._mailbox.put, None)
            serve = (self._mailbox,)
            self._thread = threading.Thread(target=_serve, args=serve, name=f"drafter-{drafter.name}", daemon=True)
            self._thread.start()

    def propose(self, requests: Sequence[DraftRequest], budgets: Sequence[int], round_s: float) -> Proposals:
        """Drafts for these requests, within a tenth of a step of `round_s` seconds (at least 10 ms)."""
        answers: dict[str, _Answer] = {}
        asked = [
            (request, budget)
            for request, budget in zip(requests, budgets, strict=True)
            if budget > 0 and request.id not in self._failed
        ]
        late = False
        if asked and self.dropped is None:
            if self._mailbox is None:  # in place: a thread switch would cost more than the guesses
                self._ask(asked, answers)
            else:
                late = not self._run(lambda: self._ask(asked, answers), max(LATE_AT_LEAST_S, LATE_SHARE * round_s))
                self._note_lateness(late)
        failures: dict[str, Failure] = {}
        if self._unreported:
            with self._lock:
                failures, self._unreported = self._unreported, {}
        if late:
            answers = {}
        given = [answers.get(request.id, _NO_ANSWER) for request in requests]
        return Proposals(tuple([a.tree for a in given]), tuple([a.promise for a in given]), failures, late)

    def start(self, request: DraftRequest) -> None:
        self._post(lambda: self._start(request))

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        served = [v for v in verdicts if v.request_id not in self._failed] if self._failed else verdicts
        if served:
            self._post(lambda: self._tell(served))

    def stop(self, request_id: str) -> None:
        self._post(lambda: self._stop(request_id))

    def settle(self) -> None:
        """Wait until the drafter has handled the calls in its mailbox, at most `SETTLE_S`."""
        if self._mailbox is not None and self.dropped is None:
            self._run(lambda: None, SETTLE_S)

    def close(self) -> None:
        """Let the thread end after the calls in its mailbox. No more drafts."""
        if self.dropped is None:
            self._end(Failure("closed", "the engine was closed"))

    # The following run in the drafter's thread, or in place for a bounded drafter.

    def _ask(self, asked: Sequence[tuple[DraftRequest, int]], answers: dict[str, _Answer]) -> None:
        """Fill in the answers. If the drafter fails on all requests together, ask for one at a time."""
        try:
            trees = self._propose(asked)
        except _BAD_CODE as error:
            if len(asked) == 1:
                self._fail(asked[0][0].id, error)
                return
            self._caught(error)
            for one in asked:
                self._ask([one], answers)
            return
        for (request, budget), tree in zip(asked, trees, strict=True):
            try:
                checked = _checked(tree, self.vocab_size, budget)
                if checked.tokens:
                    promise = _checked_promise(self.drafter.promise(request.id), checked)
                    answers[request.id] = _Answer(checked, promise)
            except _BAD_CODE as error:
                self._fail(request.id, error)

    def _propose(self, asked: Sequence[tuple[DraftRequest, int]]) -> Sequence[Tree]:
        trees = list(self.drafter.propose([request for request, _ in asked], [budget for _, budget in asked]))
        if len(trees) != len(asked):
            raise DrafterError(f"{len(trees)} trees for {len(asked)} requests: must be one for each")
        return trees

    def _tell(self, verdicts: Sequence[Verdict]) -> None:
        try:
            self.drafter.observe(verdicts)
        except _BAD_CODE as error:
            if len(verdicts) == 1:
                self._fail(verdicts[0].request_id, error)
                return
            self._caught(error)
            for verdict in verdicts:  # a verdict may be observed twice, which only spoils an estimate
                self._tell([verdict])

    def _start(self, request: DraftRequest) -> None:
        try:
            self.drafter.start(request)
        except _BAD_CODE as error:
            self._fail(request.id, error)

    def _stop(self, request_id: str) -> None:
        try:
            self.drafter.stop(request_id)
        except _BAD_CODE as error:
            self._caught(error)
        self._failed.pop(request_id, None)  # after all calls for this request: none can mark it again

    def _fail(self, request_id: str, error: BaseException) -> None:
        failure = self._caught(error)
        with self._lock:
            self._failed[request_id] = self._unreported[request_id] = failure

    def _caught(self, error: BaseException) -> Failure:
        self.failures += 1
        failure = Failure.of(error)
        self._log.note(self.drafter.name, failure, error)
        return failure

    # The mailbox.

    def _run(self, work: Callable[[], None], deadline_s: float) -> bool:
        """Run the work. Returns False if it is late; a late job that has not begun never will."""
        assert self._mailbox is not None
        job = _Job(work)
        self._mailbox.put(job)
        if job.done.wait(deadline_s):
            return True
        job.given_up = True
        return False

    def _post(self, work: Callable[[], None]) -> None:
        """Queue the work, in order, without waiting."""
        if self.dropped is not None:
            return
        if self._mailbox is None:
            work()
            return
        self._mailbox.put(_Job(work))
        if self._mailbox.qsize() > BACKLOG:
            self._drop(Failure("unread", f"it left {BACKLOG} notes unread"))

    def _note_lateness(self, late: bool) -> None:
        self.late += late
        self._late_in_a_row = self._late_in_a_row + 1 if late else 0
        if self._late_in_a_row == LATE_IN_A_ROW:
            self._drop(Failure("late", f"it was late {LATE_IN_A_ROW} times in a row"))

    def _drop(self, failure: Failure) -> None:
        """Drop it for good. The log shows its thread's stack."""
        if self.dropped is None:
            frame = sys._current_frames().get(self._thread.ident or 0)
            stack = "".join(["\nIts thread is at:\n", *traceback.format_stack(frame)]) if frame is not None else ""
            self._log.note(self.drafter.name, failure, stack=stack)
            self._end(failure)

    def _end(self, failure: Failure) -> None:
        self.dropped = failure
        if self._mailbox is not None:
            self._mailbox.put(None)


def _serve(mailbox: SimpleQueue[_Job | None]) -> None:
    """The drafter's thread. It holds no reference to the guard, which can thus be collected."""
    while (job := mailbox.get()) is not None:
        if not job.given_up:
            job.work()
        job.done.set()
        del job  # it refers to the guard


def _checked(tree: object, vocab_size: int, budget: int) -> Tree:
    """The tree with plain integers. Raises if it is invalid."""
    if not isinstance(tree, Tree):
        raise DrafterError(f"{type(tree).__name__} instead of a Tree")
    if (tree.tokens == () and tree.parents == ()) or _is_plain_chain(tree, vocab_size, budget):
        return tree
    plain = Tree(tuple(map(operator.index, tree.tokens)), tuple(map(operator.index, tree.parents)))
    plain.check(vocab_size, budget)
    return plain


def _is_plain_chain(tree: Tree, vocab_size: int, budget: int) -> bool:
    """Fast check for the usual case: a chain of plain integers within the budget."""
    tokens, parents = tree.tokens, tree.parents
    if type(tokens) is not tuple or len(tokens) > min(budget, MAX_NODES) or parents is not chain_parents(len(tokens)):
        return False
    return set(map(type, tokens)) == _PLAIN and min(tokens) >= 0 and max(tokens) < vocab_size


def _checked_promise(promise: Sequence[float] | None, tree: Tree) -> Sequence[float] | None:
    if promise is None:
        return None
    chances = tuple(map(float, promise))
    if len(chances) != len(tree.tokens):
        raise DrafterError(f"{len(chances)} promises for {len(tree)} nodes: must be one for each")
    if not chances or (math.isfinite(sum(chances)) and min(chances) >= 0 and max(chances) <= 1):
        return chances
    for node, chance in enumerate(chances):
        if not (math.isfinite(chance) and -1e-6 <= chance <= 1 + 1e-6):
            raise DrafterError(f"node {node}: promise {chance} must be a probability")
    return tuple(min(1.0, max(0.0, chance)) for chance in chances)
