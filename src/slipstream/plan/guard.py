"""The guard turns off drafters that lose against plain decoding, by measured time alone; probes try unused drafters.

Estimates can be wrong together, so drafted steps are compared with plain steps of the same batch size, by drafter. A
drafter that loses rests until its loss is `PROBE_SHARE` of the time, and is then tried again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from slipstream.plan.cost import RECENT, Medians
from slipstream.plan.types import Gain, StepSeen, bucket_of

HORIZON = 64
"""Steps within which a change must repay its cost, and the guard's shortest rest: text changes about as often."""
PROBE_SHARE = 0.01
"""Share of the time that probes may cost in all: below what users notice."""

MEMBERS = 8  # most requests in a probe: more requests add little information
_SAVED = 512  # steps whose probe share may be saved up
_EVIDENCE = RECENT // 2 + 1  # steps before a drafter is judged
_FADE = 1 - 2 / HORIZON  # by step
_SLACK = 0.97  # a drafter is off below this part of the required gain
_RUN = 3  # plain steps in a row; the last is timed, since the device may wait for the host before it
_OLD = 8 * HORIZON  # steps after which plain steps are timed again


@dataclass(slots=True)
class _Record:
    """Faded sums over the drafted steps of one drafter and batch size."""

    tokens: float = 0.0  # for each request
    plain: float = 0.0  # plain steps in the same time
    steps: float = 0.0
    scatter: float = 0.0  # squared differences of tokens and plain steps
    until: int = 0  # the drafter is off before this step
    last: float = 1.0  # its gain at the last judgement

    @property
    def compared(self) -> bool:
        return self.plain > 0 or self.until > 0

    @property
    def gain(self) -> float:
        return self.tokens / max(self.plain, self.steps) if self.plain else 1.0

    def add(self, tokens: float, plain: float) -> None:
        self.tokens = self.tokens * _FADE + tokens
        self.plain = self.plain * _FADE + plain
        self.steps = self.steps * _FADE + 1
        self.scatter = self.scatter * _FADE + (tokens - plain) ** 2


class Guard:
    """Hears of every step. min_gain: the required speed relative to plain decoding."""

    def __init__(self, min_gain: float = 1.0) -> None:
        self._min_gain = min_gain
        self._records: dict[tuple[str, int], _Record] = {}  # by drafter and bucket
        self._gains: dict[str, Gain] = {}  # by request
        self._plain = Medians()  # by bucket: seconds of plain steps
        self._timed: dict[int, int] = {}  # by bucket: step of the last timed plain step
        self._run = (0, 0)  # bucket and number of plain steps in a row
        self._compares = 0  # plain steps left of the comparison
        self._asked = 0  # step of the last comparison
        self._step = 0

    def next_step(self, requests: int) -> None:
        """Decide whether the next step of this batch size is plain, for comparison: see `compares`."""
        self._step += 1
        if self._compares:
            self._compares -= 1
            return
        seen = self._timed.get(bucket_of(requests))
        is_due = seen is None or self._step - seen > _OLD
        waits = 2 * _RUN if seen is None else HORIZON  # the last comparison may still be in flight
        has_steps = bool(self._records) or bool(self._timed)
        if requests and has_steps and is_due and self._step - self._asked > waits:
            self._compares, self._asked = _RUN, self._step

    @property
    def compares(self) -> bool:
        """True while the planned step is plain for comparison."""
        return self._compares > 0

    def is_off(self, drafter: str, requests: int) -> bool:
        record = self._records.get((drafter, bucket_of(requests)))
        return record is not None and self._step < record.until

    def observe(self, step: StepSeen) -> None:
        requests = step.load.requests
        bucket, drafters = bucket_of(requests), step.drafters
        if not drafters:
            self._run = (bucket, self._run[1] + 1 if self._run[0] == bucket else 1)
            if self._run[1] >= _RUN:
                self._plain.add(bucket, max(step.total_s - step.wait_s, 1e-9))
                self._timed[bucket] = self._step
            return
        self._run = (0, 0)
        for name in drafters:
            self._records.setdefault((name, bucket), _Record())
        if bucket not in self._timed or not requests:
            return
        plain_s = self._plain.get(bucket)
        emitted = sum([turn.emitted for turn in step.turns]) / requests
        for name in drafters:
            own_s = step.total_s - (0.0 if name in step.waited else step.wait_s)
            # the bound keeps one very slow step from deciding
            self._records[name, bucket].add(emitted, min(own_s / plain_s, max(4.0, 2 * emitted)))
            if step.expected_gain > 1:  # not a probe
                self._judge(self._records[name, bucket])
        drafted = sum([turn.drafted for turn in step.turns])
        longer = (step.total_s / plain_s - 1) * requests
        for turn in step.turns:
            if turn.drafted:  # the extra time is split by drafted rows
                gain = self._gains.setdefault(turn.request_id, Gain())
                gain.drafts += 1
                gain.tokens += turn.emitted
                gain.plain += max(0.1, 1 + longer * turn.drafted / drafted)
                gain.planned += step.expected_gain

    def _judge(self, record: _Record) -> None:
        if record.steps < _EVIDENCE * _FADE**_EVIDENCE or self._step < record.until:
            return
        record.last = record.gain
        lost = self._min_gain * max(record.plain, record.steps) - record.tokens
        if record.gain < self._min_gain * _SLACK and lost > 2 * record.scatter**0.5:
            record.until = self._step + max(HORIZON, round(lost / PROBE_SHARE))
            record.tokens = record.plain = record.steps = record.scatter = 0.0  # the next trial is judged by itself

    def gain(self, request_id: str) -> Gain:
        return self._gains.get(request_id) or Gain()

    def gains(self) -> dict[str, float]:
        """The recent gain by drafter and batch size. Thread-safe."""
        known = list(self._records.items())
        judged = [(key, record.gain if record.plain else record.last) for key, record in known if record.compared]
        return {f"{name}; {bucket} at once": gain for (name, bucket), gain in judged}

    def why(self, drafter: str, requests: int) -> str | None:
        """The reason why a drafter is off; None: it is on."""
        if not self.is_off(drafter, requests):
            return None
        bucket = bucket_of(requests)
        last = self._records[drafter, bucket].last
        of = "1 request" if bucket == 1 else f"{bucket} requests"
        asked = f", and min_gain asks for {self._min_gain:g}" if self._min_gain > 1 else ""
        return f"off: its drafts made steps of {of} {last:.2f}x as fast as none{asked}; tried again later"

    def forget(self, request_id: str) -> None:
        self._gains.pop(request_id, None)


class Probes:
    """The time budget for trying drafters that are not used, in equal parts: an untried drafter stays unknown."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}  # by drafter: seconds

    def earn(self, drafters: Collection[str], step_s: float) -> None:
        """Credit unused drafters with their part of one step's budget."""
        for name in drafters:
            saved = self._saved.get(name, 0.0) + PROBE_SHARE * step_s / len(drafters)
            self._saved[name] = min(saved, PROBE_SHARE * _SAVED * step_s)

    def spend(self, drafter: str, cost_s: float) -> bool:
        """Pay for a probe; False: the drafter's budget does not cover it."""
        saved = self._saved.get(drafter, 0.0)
        if saved < cost_s:
            return False
        self._saved[drafter] = saved - max(cost_s, 0.0)
        return True
