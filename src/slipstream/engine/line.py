"""The waiting line, fair over tenants: one client's flood does not delay another's. And the limit of its length.

The next answer is the oldest of the tenant with the fewest tokens: deficit round robin, with credit given one token at
a time. A running answer counts with its prompt and an expected output length, an ended one with its real tokens.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from slipstream.core.errors import QueueFull
from slipstream.engine.state import Answer

_FIRST_TOKENS = 256.0
"""Expected length of an answer before any has ended."""
_FIRST_S = 1.0
"""Expected seconds of an answer before any has ended."""
_NEWEST = 0.1
"""Weight of the latest answer in running means of lengths and times."""
_REMEMBERED = 1024
"""Accounts that are kept of tenants without any request here."""


@dataclass(slots=True)
class _Account:
    """Tokens of one tenant."""

    done: int  # of ended answers
    coming: int = 0  # expected of started ones


class WaitingLine:
    """Waiting answers by tenant. Preempted answers keep their place: they come before all that never ran.

    A new tenant begins with the fewest finished tokens among waiting tenants. Absence therefore earns nothing, and its
    first request waits for at most one request of each other tenant. Tokens that a tenant had while no other wanted
    them are no debt either: one whose answers have all ended begins at most one request above that.
    """

    def __init__(self) -> None:
        self._preempted: list[Answer] = []  # in the order of their turns
        self._lines: dict[str, OrderedDict[Answer, None]] = {}  # by tenant, the oldest first; none is empty
        self._accounts: dict[str, _Account] = {}  # by tenant
        self._last = _Account(0)  # of the tenant served last
        self._usual = _FIRST_TOKENS  # running mean of the tokens of an answer

    def __len__(self) -> int:
        return len(self._preempted) + sum([len(line) for line in list(self._lines.values())])

    def __contains__(self, answer: Answer) -> bool:
        return answer in self._lines.get(answer.tenant, ()) or answer in self._preempted

    def __iter__(self) -> Iterator[Answer]:
        return chain(self._preempted, *self._lines.values())

    def lengths(self) -> dict[str, int]:
        """Waiting answers by tenant. Called from any thread."""
        found = {tenant: len(line) for tenant, line in list(self._lines.items())}
        for answer in list(self._preempted):
            found[answer.tenant] = found.get(answer.tenant, 0) + 1
        return found

    def add(self, answer: Answer) -> None:
        """Put it behind the others of its tenant, or a preempted one in its old place."""
        if answer.turn is not None:
            insort(self._preempted, answer, key=turn_of)
            return
        if answer.tenant not in self._lines:
            self._open(answer)
        self._lines[answer.tenant][answer] = None

    def take(self) -> Answer:
        """Remove and return the next answer, and charge its tenant. The line must not be empty."""
        if self._preempted:
            return self._preempted.pop(0)
        accounts = self._accounts
        tenant = min(self._lines, key=lambda name: accounts[name].done + accounts[name].coming)
        answer, _ = self._lines[tenant].popitem(last=False)
        if not self._lines[tenant]:
            del self._lines[tenant]
        self._last = accounts[tenant]
        answer.charge = self._expected(answer)
        self._last.coming += answer.charge
        return answer

    def put_back(self, answer: Answer) -> None:
        """A taken answer cannot start yet: return it to its place, and the charge to its tenant."""
        self.add(answer)
        if answer.turn is None:
            self._lines[answer.tenant].move_to_end(answer, last=False)
            self._accounts[answer.tenant].coming -= answer.charge

    def remove(self, answer: Answer) -> None:
        """Remove an answer that waits."""
        line = self._lines.get(answer.tenant)
        if line is None or answer not in line:
            self._preempted.remove(answer)
            return
        del line[answer]
        if not line:
            del self._lines[answer.tenant]

    def settle(self, answer: Answer) -> None:
        """A started answer ended: count its real tokens instead of the expected ones."""
        account = self._accounts[answer.tenant]
        account.coming -= answer.charge
        account.done += _own_prompt(answer) + answer.generated
        self._usual += _NEWEST * (answer.generated - self._usual)

    def _expected(self, answer: Answer) -> int:
        """The tokens that it will probably take."""
        return _own_prompt(answer) + min(answer.params.max_tokens, int(self._usual))

    def _open(self, answer: Answer) -> None:
        """Begin the line of a tenant that had none waiting."""
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


def turn_of(answer: Answer) -> int:
    """The number of a started answer in the order of first admissions."""
    assert answer.turn is not None
    return answer.turn


def _own_prompt(answer: Answer) -> int:
    """Prompt tokens that it computes: siblings share their leader's."""
    return answer.prompt_length if answer.leader is None else 1


class Admission:
    """Refuses requests when too many wait. The engine's thread reports how long answers take."""

    def __init__(self, max_queue: int | None) -> None:
        self.max_queue = max_queue
        self.refused = 0
        self._answer_s = _FIRST_S  # running mean of the time of an answer
        self._seen = False

    def check(self, waiting: int, running: int) -> None:
        """Raise `QueueFull` if `waiting` answers, beyond those that can start at once, are too many."""
        if self.max_queue is None or waiting < self.max_queue:
            return
        self.refused += 1
        must_start = waiting - self.max_queue + 1
        seconds = must_start * self._answer_s / max(1, running)
        raise QueueFull(
            f"{waiting} requests wait, and max_queue={self.max_queue}: come again in about {seconds:.1f} s", seconds
        )

    def observe(self, seconds: float) -> None:
        """An answer ended this long after it had started."""
        self._answer_s += (_NEWEST if self._seen else 1.0) * (seconds - self._answer_s)
        self._seen = True
