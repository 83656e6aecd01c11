"""The guard: what drafts truly brought, by measured steps alone. It shuts what loses against plain decoding.

Estimates can be wrong together: a drafter that promises too much, a cost that was not thought of. So drafted steps are
compared with plain ones of as many requests, by drafter. A drafter that loses is off for a rest, so long that what it
lost is `PROBE_SHARE` of the time, and then tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.plan.cost import RECENT, Medians
from slipstream.plan.probe import PROBE_SHARE
from slipstream.plan.types import Gain, StepSeen, bucket_of

HORIZON = 64
"""Steps over which a change must repay what it costs, and the guard's first rest: text changes about as often."""

_EVIDENCE = RECENT // 2 + 1  # steps before a drafter is judged
_FADE = 1 - 2 / HORIZON  # by step
_SLACK = 0.97  # of the gain that is asked for: below it a drafter is off
_RUN = 3  # plain steps in a row, of which the last tells: before it the device may wait for the host
_OLD = 8 * HORIZON  # steps after which plain ones are timed again: machines change


@dataclass(slots=True)
class _Record:
    """Of one drafter and batch size. Sums over its drafted steps, faded."""

    tokens: float = 0.0  # for each request
    plain: float = 0.0  # plain steps in the same time
    steps: float = 0.0
    scatter: float = 0.0  # of what steps brought beyond plain ones: what may be chance
    until: int = 0  # the step before which it is off
    last: float = 1.0  # its gain when it was judged last

    @property
    def told(self) -> bool:
        """Was it ever compared?"""
        return self.plain > 0 or self.until > 0

    @property
    def gain(self) -> float:
        return self.tokens / max(self.plain, self.steps) if self.plain else 1.0

    def add(self, tokens: float, plain: float) -> None:
        for name in ("tokens", "plain", "steps", "scatter"):
            setattr(self, name, getattr(self, name) * _FADE)
        self.tokens += tokens
        self.plain += plain
        self.steps += 1
        self.scatter += (tokens - plain) ** 2

    def begin_anew(self) -> None:
        self.tokens = self.plain = self.steps = self.scatter = 0.0


@dataclass(slots=True)
class _Own:
    """The same of one request, whole."""

    drafts: int = 0
    tokens: float = 0.0
    plain: float = 0.0
    expected: float = 0.0


class Guard:
    """Told of every step. min_gain: how many times as fast as plain decoding drafts must be."""

    def __init__(self, min_gain: float = 1.0) -> None:
        self._min_gain = min_gain
        self._records: dict[tuple[str, int], _Record] = {}  # by drafter and bucket
        self._own: dict[str, _Own] = {}
        self._plain = Medians()  # by bucket: seconds of plain steps
        self._timed: dict[int, int] = {}  # … and when the last of them was
        self._run = (0, 0)  # bucket and number of plain steps in a row
        self._compares = 0  # plain steps of a comparison that are left
        self._asked = 0  # when the last comparison was asked for
        self._step = 0

    def next_step(self, requests: int) -> None:
        """Says by `compares` whether the next step of about so many goes without drafts."""
        self._step += 1
        if self._compares:
            self._compares -= 1
            return
        seen = self._timed.get(bucket_of(requests))
        is_due = seen is None or self._step - seen > _OLD
        waits = 2 * _RUN if seen is None else HORIZON  # where nothing was heard of the last one
        if requests and self._told and is_due and self._step - self._asked > waits:
            self._compares, self._asked = _RUN, self._step

    @property
    def _told(self) -> bool:
        return bool(self._records) or bool(self._timed)

    @property
    def compares(self) -> bool:
        """Does the step that is planned go without drafts, to compare others with it?"""
        return self._compares > 0

    def is_off(self, drafter: str, requests: int) -> bool:
        record = self._records.get((drafter, bucket_of(requests)))
        return record is not None and self._step < record.until

    def observe(self, step: StepSeen) -> None:
        requests = step.load.requests
        bucket, who = bucket_of(requests), step.drafters
        if not who:
            self._run = (bucket, self._run[1] + 1 if self._run[0] == bucket else 1)
            if self._run[1] >= _RUN:
                self._plain.add(bucket, max(step.total_s - step.wait_s, 1e-9))
                self._timed[bucket] = self._step
            return
        self._run = (0, 0)
        for name in who:
            self._records.setdefault((name, bucket), _Record())
        if bucket not in self._timed or not requests:
            return
        plain_s = self._plain.get(bucket)
        emitted = sum([turn.emitted for turn in step.turns]) / requests
        for name in who:
            own_s = step.total_s - (0.0 if name in step.waited else step.wait_s)
            # one step that takes very long is a hiccup
            self._records[name, bucket].add(emitted, min(own_s / plain_s, max(4.0, 2 * emitted)))
            if step.expected_gain > 1:  # else it was a probe
                self._judge(self._records[name, bucket])
        drafted = sum([turn.drafted for turn in step.turns])
        longer = (step.total_s / plain_s - 1) * requests
        for turn in step.turns:
            if turn.drafted:  # a request pays for the rows that it asked for
                own = self._own.setdefault(turn.request_id, _Own())
                own.drafts += 1
                own.tokens += turn.emitted
                own.plain += max(0.1, 1 + longer * turn.drafted / drafted)
                own.expected += step.expected_gain

    def _judge(self, record: _Record) -> None:
        if record.steps < _EVIDENCE * _FADE**_EVIDENCE or self._step < record.until:
            return
        record.last = record.gain
        lost = self._min_gain * max(record.plain, record.steps) - record.tokens
        if record.gain < self._min_gain * _SLACK and lost > 2 * record.scatter**0.5:
            record.until = self._step + max(HORIZON, round(lost / PROBE_SHARE))
            record.begin_anew()  # a trial is judged by itself

    def gain(self, request_id: str) -> Gain:
        own = self._own.get(request_id)
        if own is None:
            return Gain()
        measured = own.tokens / max(own.plain, own.drafts)  # guesses make no step shorter: what says so is noise
        return Gain(own.drafts, own.expected / own.drafts, measured)

    def gains(self) -> dict[str, float]:
        """By drafter and batch size, of late."""
        known = list(self._records.items())  # any thread may ask
        judged = [(key, record.gain if record.plain else record.last) for key, record in known if record.told]
        return {f"{name}; {bucket} at once": gain for (name, bucket), gain in judged}

    def why(self, drafter: str, requests: int) -> str | None:
        """Why a drafter is off; None: it is not."""
        if not self.is_off(drafter, requests):
            return None
        bucket = bucket_of(requests)
        last = self._records[drafter, bucket].last
        of = "1 request" if bucket == 1 else f"{bucket} requests"
        asked = f", and min_gain asks for {self._min_gain:g}" if self._min_gain > 1 else ""
        return f"off: its drafts made steps of {of} {last:.2f}x as fast as none{asked}; tried again later"

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)
