"""The requests that wait for their turn, served fairly over tenants: one client's flood does not delay another's.

The next is the oldest request of the tenant that has had the fewest tokens: deficit round robin, with credit given one
token at a time. A request that starts counts with its prompt and the expected length of its answer, one that ended with
the tokens that it took.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from slipstream.core.errors import QueueFull
from slipstream.engine.state import Answer

_FIRST_GUESS = 256.0
_NEWS = 0.1
"""Weight of the latest answer in the running mean of lengths."""
_REMEMBERED = 1024
"""Tenants without any request here whose accounts are kept."""


@dataclass(slots=True)
class _Account:
    """Tokens of one tenant."""

    done: int  # of answers that are over
    coming: int = 0  # expected of those that had their turn

    @property
    def total(self) -> int:
        return self.done + self.coming


class WaitingLine:
    """Answers by tenant. One that was preempted keeps its place: it comes before all that never ran.

    A tenant that comes anew begins with the fewest finished tokens of those who wait. So absence earns nothing, and its
    first request waits for one request of each other tenant at most. Nor does it cost: what a tenant had while nobody
    else wanted it is no debt, so that one whose answers are all over begins at most one request later than that.
    """

    def __init__(self) -> None:
        self._returned: list[Answer] = []  # preempted, in the order of their turns
        self._lines: dict[str, OrderedDict[Answer, None]] = {}  # by tenant, the oldest first; none is empty
        self._accounts: dict[str, _Account] = {}  # by tenant
        self._last = _Account(0)  # of the tenant served last
        self._usual = _FIRST_GUESS  # tokens of an answer, lately

    def __len__(self) -> int:
        return len(self._returned) + sum([len(line) for line in list(self._lines.values())])

    def __contains__(self, answer: Answer) -> bool:
        return answer in self._lines.get(answer.tenant, ()) or answer in self._returned

    def __iter__(self) -> Iterator[Answer]:
        return chain(self._returned, *self._lines.values())

    def lengths(self) -> dict[str, int]:
        """Waiting answers by tenant. Any thread may ask."""
        found = {tenant: len(line) for tenant, line in list(self._lines.items())}
        for answer in list(self._returned):
            found[answer.tenant] = found.get(answer.tenant, 0) + 1
        return found

    def add(self, answer: Answer) -> None:
        """Behind the others of its tenant; one that was preempted, to its old place."""
        if answer.turn is not None:
            insort(self._returned, answer, key=turn_of)
            return
        if answer.tenant not in self._lines:
            self._open(answer)
        self._lines[answer.tenant][answer] = None

    def take(self) -> Answer:
        """The next, which waits no more. There must be one."""
        if self._returned:
            return self._returned.pop(0)
        tenant = min(self._lines, key=lambda name: self._accounts[name].total)
        answer, _ = self._lines[tenant].popitem(last=False)
        if not self._lines[tenant]:
            del self._lines[tenant]
        self._last = self._accounts[tenant]
        answer.charge = self._expected(answer)
        self._last.coming += answer.charge
        return answer

    def put_back(self, answer: Answer) -> None:
        """It was taken and cannot start yet: it has its place again, and its tenant the tokens."""
        self.add(answer)
        if answer.turn is None:
            self._lines[answer.tenant].move_to_end(answer, last=False)
            self._accounts[answer.tenant].coming -= answer.charge

    def remove(self, answer: Answer) -> None:
        """It waits no more. It must have."""
        line = self._lines.get(answer.tenant)
        if line is None or answer not in line:
            self._returned.remove(answer)
            return
        del line[answer]
        if not line:
            del self._lines[answer.tenant]

    def settle(self, answer: Answer) -> None:
        """An answer that had its turn is over: count what it took instead of what was expected."""
        account = self._accounts[answer.tenant]
        account.coming -= answer.charge
        account.done += _read(answer) + answer.generated
        self._usual += _NEWS * (answer.generated - self._usual)

    def _expected(self, answer: Answer) -> int:
        """Tokens that it will take, as answers go lately."""
        return _read(answer) + min(answer.params.max_tokens, int(self._usual))

    def _open(self, answer: Answer) -> None:
        accounts, tenant = self._accounts, answer.tenant
        if len(accounts) > _REMEMBERED + 2 * len(self._lines):
            accounts = {name: one for name, one in accounts.items() if one.coming or name in self._lines}
            self._accounts = accounts
        least = min((accounts[name].done for name in self._lines), default=self._last.done)
        account = accounts.setdefault(tenant, _Account(least))
        account.done = max(account.done, least)
        if not account.coming:
            account.done = min(account.done, least + self._expected(answer))
        self._lines[tenant] = OrderedDict()


def _read(answer: Answer) -> int:
    """Prompt tokens that it computes; siblings share their leader's."""
    return answer.prompt_length if answer.leader is None else 1


def turn_of(answer: Answer) -> int:
    assert answer.turn is not None
    return answer.turn


_FIRST_GUESS_S = 1.0
_NEWS = 0.1
"""How much the last answer counts beside those before it."""


class Admission:
    """Refuses requests when too many wait. The engine's thread tells it how long answers take."""

    def __init__(self, max_queue: int | None) -> None:
        self.max_queue = max_queue
        self.refused = 0
        self._answer_s = _FIRST_GUESS_S  # how long an answer runs, lately
        self._seen = False

    def check(self, waiting: int, running: int) -> None:
        """Raise `QueueFull` where so many wait, beyond those who can start at once."""
        if self.max_queue is None or waiting < self.max_queue:
            return
        self.refused += 1
        leaving = waiting - self.max_queue + 1  # so many must have their turn first
        seconds = leaving * self._answer_s / max(1, running)
        raise QueueFull(
            f"{waiting} requests wait, and max_queue={self.max_queue}: come again in about {seconds:.1f} s", seconds
        )

    def observe(self, seconds: float) -> None:
        """An answer ran this long."""
        self._answer_s += (_NEWS if self._seen else 1.0) * (seconds - self._answer_s)
        self._seen = True
