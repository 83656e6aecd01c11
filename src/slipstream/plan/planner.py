"""The plan of a round: how many nodes each request's draft gets. It changes speed only, never tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from slipstream.core.draft import Tree
from slipstream.plan.decisions import Decision
from slipstream.plan.gain import Gain
from slipstream.plan.gains import NO_WAIT, Turn, Waited
from slipstream.plan.measured import Load, MeasuredCosts
from slipstream.plan.traits import Traits


class Beside(NamedTuple):
    """Another drafter that guesses for the same request, and how many nodes it has or may have."""

    drafter: str
    nodes: int


class TreeSeen(NamedTuple):
    """What became of a tree, beyond how deep it was right."""

    nodes: int
    path: Sequence[int]  # which of them were right, numbered as the drafter ranked them; () where that is not known


class Levels(NamedTuple):
    """A number of levels that trees may have, and how many nodes such trees have at most."""

    deep: int
    nodes: int


class TreeBudget(NamedTuple):
    """Trees for the requests of a round: those of one drafter are grown together, all to as many levels."""

    nodes: list[int]  # [B]
    levels: int


class Planner:
    """Decides sizes before drafting (`budget`) and after it, where the drafter says how sure it is (`trim`).

    This one always drafts as much as was asked for: for measurements and tests.

    rows: how many requests decode in the pass, those with other drafters or none included: each emits a token anyway.
    beside: of each request, who drafts for it already; (): nobody for any of them.
    """

    exclusive = False
    """Of several on the device that may guess for a request, does one guess in a round? Then each is asked as if it
    were alone."""

    foresees = False
    """Does it take time to plan, so that it is done ahead where a device would wait for it?"""

    def budget(
        self,
        drafter: str,
        request_ids: Sequence[str],
        caps: Sequence[int],
        rows: int,
        beside: Sequence[Sequence[Beside]] = (),
    ) -> list[int]:
        """Most nodes for each request, for a drafter whose guesses cost time."""
        return list(caps)

    def budget_trees(
        self,
        drafter: str,
        request_ids: Sequence[str],
        caps: Sequence[int],
        rows: int,
        beside: Sequence[Sequence[Beside]] = (),
        *,
        levels: Sequence[Levels],
    ) -> TreeBudget:
        """The same for one that makes trees, and to how many levels they are grown: one of these, the most stand last.

        All levels are computed, whatever is taken of them.
        """
        return TreeBudget(list(caps), levels[-1].deep)

    def trim(
        self,
        drafter: str,
        request_ids: Sequence[str],
        trees: Sequence[Tree],
        promises: Sequence[Sequence[float] | None],
        rows: int,
    ) -> list[Tree]:
        """What to keep of guesses that cost nothing to have."""
        return list(trees)

    def asks(self, drafter: str, rows: int) -> bool:
        """Is this drafter worth a question in this round of so many requests?"""
        return True

    def observe_asked(self, drafter: str, taken: bool, seconds: float, *, costly: bool = False) -> None:
        """A drafter was asked: was anything taken of its guesses, and how long did all of that take?

        costly: its guesses take time, and it was reckoned what they would bring, wherever they are made.
        """

    def least(self, rows: int) -> float:
        """The chance of a guess below which it is of no use in this round of so many requests; 0: any may be."""
        return 0.0

    def take(self, drafter: str, request_ids: Sequence[str], trees: Sequence[Tree], rows: int) -> list[Tree]:
        """What to keep of guesses that are only of use as a whole."""
        return list(trees)

    def rests(self, drafter: str, rows: int) -> bool:
        """Is waiting for this drafter on the host not worth it for now, with so many requests?"""
        return False

    def peeks(self, drafter: str, rows: int, requests: int) -> Sequence[int]:
        """For which of its requests is this drafter on the host, for which nobody waits, asked all the same by what is
        known of the texts? A round of so many rows is under way by which they go on."""
        return ()

    def peek(
        self,
        drafter: str,
        request_ids: Sequence[str],
        trees: Sequence[Tree],
        promises: Sequence[Sequence[float] | None],
        rows: int,
    ) -> bool:
        """That is what it said: is it worth waiting for now?"""
        return False

    def next_round(self, requests: int = 0, context: int = 0, running: int = 0) -> None:
        """A round of so many decoding requests with so many tokens in all is about to be planned; 0: not said.

        running: how many there are with those whose prompts are read, or could be, beside it.
        """

    def suppose(self, drafters: Sequence[str]) -> None:
        """Device drafters are planned before those on the host are asked, of whom these are supposed to guess."""

    def put_aside(self) -> None:
        """They are planned. Next those on the host are asked."""

    def go_on(self) -> None:
        """These guessed as was supposed: what was planned for the others stands."""

    def plan_again(self) -> None:
        """They did not, and the others are planned once more."""

    def skip_round(self) -> None:
        """The round that was planned ahead does not take place: others decode in the next one."""

    def leaves(self, drafter: str) -> bool:
        """Has this one, whose guesses take time, had no part in rounds of as many requests for long? Then newcomers
        are not read for it: it can catch up."""
        return False

    def idles(self, requests: int) -> bool:
        """May this round of so many go without a plan, since nothing was drafted in the last one? Asked once a round,
        where no drafter on the host is waited for."""
        return False

    def start(self, request_id: str, traits: Traits) -> None:
        """A request begins, of which so much is known."""

    def speculates(self, request_id: str, drafters: tuple[str, ...] = ()) -> bool:
        """May these guess for it together in this round? Not where none of them does, nor in rounds to compare with."""
        return True

    def allows(self, request_id: str, drafters: tuple[str, ...] = ()) -> bool:
        """The same of any round of as many requests as the last: not where that slows down requests of its kind."""
        return True

    def silence(self, drafter: str, request_ids: Sequence[str], rows: int) -> None:
        """In this round it may not guess for any of these, which are all that it could."""

    @property
    def hoped(self) -> float:
        """How many times as fast as plain decoding the round is to be that was planned last; 1: nothing pays in it."""
        return 1.0

    @property
    def silences(self) -> bool:
        """Is there anybody who may not guess in this round? Else nobody has to be asked about, one by one."""
        return False

    def pad_passes(self) -> None:
        """Passes come in a few sizes only, and are filled up to the next one."""

    def limit_rows(self, rows: int) -> None:
        """A pass with drafts has so many rows at the most."""

    def adopt(self, measured: MeasuredCosts) -> None:
        """Passes and drafts were measured before the first request."""

    def observe_pass(self, rows: int, seconds: float, load: Load | None = None, *, is_tree: bool = False) -> None:
        """A target pass over this many rows took this long. load: None: that of the round that was planned last."""

    def observe_reads(self, requests: int, tokens: int, seconds: float) -> None:
        """A round of so many decoding requests brought them so many tokens; to read prompts of others in a pass of
        their own took it so long, 0: there were none."""

    def observe_round(
        self,
        turns: Sequence[Turn],
        seconds: float,
        context: int = 0,
        beyond_s: float | None = None,
        waited: Waited = NO_WAIT,
        hoped: float | None = None,
        ready_s: float = 0.0,
    ) -> None:
        """A round of these requests, with so many tokens in all, took this long, drafts and host included.

        beyond_s: what of it was not the pass; None: that is not known, because rounds overlap. waited: for whom.
        hoped: how fast it was to be; None: it was planned last. ready_s: what the host took to queue it while another
        one was under way; 0: none was.
        """

    def observe_plain(self, load: Load, seconds: float, waited: Waited) -> None:
        """A round of these without drafts took this long, prompts of others not counted that were read beside it."""

    def gain(self, request_id: str) -> Gain:
        """How many times as fast as plain rounds its drafted rounds were; 1 before there were any."""
        return Gain()

    def gains(self) -> dict[str, float]:
        """The same by kind of request, of late."""
        return {}

    def resting(self) -> list[str]:
        """Kinds of requests for which drafters are off at present, since they made them slower."""
        return []

    def reasons(self) -> dict[str, str]:
        """By drafter: what was decided in the last round that it could have drafted in, and why."""
        return {}

    def decision(self, drafter: str) -> Decision | None:
        """The last plan of its guesses; None: nothing was weighed."""
        return None

    def words(self, drafter: str, decision: Decision, *, shared: bool = True) -> str:
        """Such a plan of its guesses, as people read it. shared: with what is known from requests of others."""
        return ""

    def why(self, request_id: str, drafter: str | None = None) -> str | None:
        """Why a drafter, or anybody, may not guess for a request at present; None: it may."""
        return None

    def observe_wait(self, drafter: str, seconds: float) -> None:
        """The device had nothing to do for so long, because a drafter on the host had to know a round's result.

        Without what `observe_draft` was told of.
        """

    def observe_waited(self, drafters: Sequence[str], requests: int, tokens: int, seconds: float) -> None:
        """A round of so many requests that waited for these on the host brought so many tokens in so long,
        without what prompts took; catching up included."""

    def observe_draft(
        self, drafter: str, size: int, seconds: float, requests: int = 1, *, is_tree: bool = False
    ) -> None:
        """A drafter whose guesses cost time took this long for so many requests.

        size: nodes that it guessed for each; of trees, their levels.
        """

    def lag(self, drafter: str, request_ids: Collection[str]) -> None:
        """Of those that this drafter is asked about next, it would have to read first what it missed of these."""

    def observe_catch_up(self, drafter: str, requests: int, seconds: float) -> None:
        """A drafter had to read what it had missed of so many before a round: so much longer did the round take."""

    def observe(self, drafter: str, request_id: str, drafted: int, accepted: int, tree: TreeSeen | None = None) -> None:
        """What became of one request's draft: how deep it was, and how far right. tree: None: none was planned."""

    def hear(self, drafter: str, request_id: str, token: int) -> None:
        """A request went on with this token in a round without guesses of this drafter; it may have had some."""

    def forget(self, request_id: str) -> None:
        """The request ended."""
