"""The drafter's contract. A new drafter is one file beside this one and a line in the registry.

A drafter only guesses; whatever it proposes, the tokens are the target's. So it may be wrong, but it must be quick,
and it must never touch a request's own state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from slipstream.core.draft import MAX_NODES, Draft, Tree
from slipstream.core.params import SamplingParams
from slipstream.core.verdict import Verdict
from slipstream.kernels.gpu.rows import RECENT, LaneState
from slipstream.kv.pages import PageCopy, PagePool, PageTable
from slipstream.models.batch import PassBatch
from slipstream.models.taps import Taps, TapView
from slipstream.sampling.table import Features, SamplingTable

if TYPE_CHECKING:
    from slipstream.models.runner import Runner  # brings all of transformers


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter needs from the engine."""

    device: bool = False  # True: proposes tensors (a `DeviceDrafter`); False: plain Python data (a `HostDrafter`)
    own_cache: bool = False  # keeps K and V of its own on the target's page table
    probabilities: bool = False  # tells what it drew from (`DraftRound.q`, `Draft.q`) where rejection sampling asks
    choices: bool = False  # verdicts say what the target chose at every node, accepted or not
    material: bool = False  # drafts from `DraftRequest.material`; where no drafter does, material is refused


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter is told of a request. It reads `tokens`, and never changes it."""

    id: str
    tokens: Sequence[int]  # prompt and answer so far; it grows from round to round
    prompt_length: int
    params: SamplingParams
    slot: int  # the request's row in the engine's static tensors
    prediction: Sequence[int] = ()  # the user's own guess at the answer, as tokens
    material: Sequence[Sequence[int]] = ()  # texts that the answer may quote, as tokens
    forced: Callable[[int], Sequence[int]] | None = None
    """At most so many of the tokens that must come next, where the answer has a form that leaves no choice."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a drafter that is named may be made of."""

    path: str | None  # as the user gave it behind the name
    model_path: Path  # the target's folder
    tokenizer: Any  # the target's
    resolve: Callable[[str], Path]  # where a model lies that is named as users name them; fetches it
    load_tokenizer: Callable[[Path], Any]
    open_runner: Callable[[Path, Runner | None], Runner]
    """Another model beside the target, checked and swapped as it is. The second: whose embeddings it may share."""
    say: Callable[[str], None] = lambda _: None  # what is worth knowing while things load
    target_config: Any = None  # the target's configuration: what a head must fit is seen before any weights are read


@dataclass(frozen=True, slots=True)
class Services:
    """What the engine lends a drafter. It reads these, and changes none of them."""

    pool: PagePool  # a cache of its own hangs on the target's pages
    page_table: Callable[[str], PageTable]  # of a request, by id
    sampling: SamplingTable  # the rule of sampling, and each request's parameters and noise
    max_rows: int  # most rows of one pass
    cache_pages: int  # pages that a cache of its own must have
    taps: TapView | None = None  # the target's hidden states that the drafter asked for, by cache slot


@dataclass(frozen=True, slots=True)
class DraftRound:
    """A round on the device, for drafters that are captured: what is guessed for whom, all in static tensors."""

    state: LaneState  # where every request stands; read, never changed
    lanes: Tensor  # [B] int64: the requests of this round, padded with the trash lane
    depth: int  # tokens to guess for each: the length of a chain, the levels of a tree
    keys: int  # no row sees more keys
    features: Features  # what some of the requests asked of the sampling
    nodes: int = 0  # of each tree, where the drafter makes trees
    recent: int = RECENT  # last tokens of one of them that may have to be read
    q: Tensor | None = None
    """[B, K, V] fp32 to be filled in: what each node was drawn from; None: nobody asks."""


@dataclass(frozen=True, slots=True)
class DeviceTree:
    """Trees guessed on the device, all of K nodes; parents stand before their children.

    A request that may have fewer gets the first of them, which are a tree too: so the best come first.
    """

    tokens: Tensor  # [B, K] int64
    parents: Tensor  # [B, K] int64, -1 is the root


class Drafter(ABC):
    """Anything that guesses. The engine calls `start` once, `propose` and `observe` once a round, `stop` once."""

    name: ClassVar[str]
    needs: ClassVar[Needs] = Needs()
    default_draft_tokens: ClassVar[int] = 5
    planned_draft_tokens: ClassVar[int] = 0  # where a planner says how many, at most, if they may be more than usual
    max_positions: int | None = None  # the longest context it can draft in; None: any
    weights_bytes: int = 0  # of its own weights, beside the target's
    remark: str = ""  # what users should know of how it was opened

    def call(self, name: str) -> None:
        """Have another name than the class's: the one that its user wrote, such as eagle3."""
        vars(self)["name"] = name  # which is a class's own to the checker of types

    @classmethod  # noqa: B027
    def check(cls, opening: Opening) -> None:
        """Refuse what cannot be opened, as far as that can be seen before any weights are read."""

    @classmethod
    def open(cls, opening: Opening, target: Runner) -> Drafter:
        """Make it for this target. Those with weights load them here."""
        return cls()

    def page_bytes(self, page_size: int) -> int:
        """What its own cache takes for each page of the target's, if it has one: memory is planned beforehand."""
        return 0

    def workspace_bytes(self, requests: int) -> int:
        """What it needs besides, where so many requests may run at a time."""
        return 0

    def held_bytes(self) -> int:
        """What it has gathered by now, in the host's memory. Any thread may ask, while the drafter works on."""
        return 0

    def attach(self, services: Services) -> None:  # noqa: B027
        """The engine is built: what it lends is ready. Called once, before any request."""

    def start(self, request: DraftRequest) -> None:  # noqa: B027 - most drafters need not know
        """A request was admitted: its prompt is known, and computed in the rounds to come."""

    def observe(self, verdicts: Sequence[Verdict]) -> None:  # noqa: B027
        """The round is over: what became of the drafts, and what was emitted. Called for undrafted rounds too."""

    def stop(self, request_id: str) -> None:  # noqa: B027
        """The request ended, or is to be recomputed: forget it. May come without a `start`."""


class HostDrafter(Drafter):
    """Guesses in plain Python. Late or raising, it costs its request the draft, never the answer."""

    bounded: ClassVar[bool] = False
    """True where `propose` cannot hang: the engine then calls it in place instead of under a deadline."""
    source: ClassVar[str] = ""
    """What its guesses are taken from, in words that reasons are made of ("follows the prediction"); "text": they are
    copied, and reasons say from where; "": nothing worth saying."""
    costly: ClassVar[bool] = False
    """True where guesses take time: the planner then says beforehand how many pay."""

    whole: ClassVar[bool] = False
    """True where trees have nodes that it learns from, whatever their chance: the planner takes a tree whole or not at
    all, by what such trees brought in the rounds before. So nodes keep their numbers; where pages are short, the last
    ones are missing."""

    least_chance: float = 0.0
    """Set before every `propose`: guesses that are less likely are of no use in this round. It need not heed it."""

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        """One tree a request, of at most `budget[i]` nodes; an empty tree is plain decoding. Does not block."""

    def promise(self, request_id: str) -> Sequence[float] | None:
        """For the tree just proposed: each node's estimated probability that its whole path is accepted.

        The planner cuts the tree where it would not pay. None: the drafter cannot tell.
        """
        return None


class DeviceDrafter(Drafter):
    """Guesses on the target's device, in static tensors, without the host looking on."""

    taps: Taps = Taps()  # the target's hidden states that it reads: `Services.taps` has them
    makes_trees: bool = False  # `draft` gives a `DeviceTree` of `round.nodes`, not a chain
    depth: int = 0  # of a tree: its levels at most, as far as its nodes allow; chains are as long as they may be
    grows: bool = False  # its trees grow level by level, each of which takes time: the plan says how many there are
    most_nodes: int = MAX_NODES  # it never guesses more for a request
    reads_ahead: int = 1  # its own cache holds at a place what depends on so many tokens behind it
    rereads: int = 2  # last tokens that a draft reads again, whatever was read before: it may be behind by as many
    fewer_rereads: tuple[int, ...] = ()  # numbers of them that are enough where `DraftRound.recent` is no more

    def most_at(self, levels: int) -> int:
        """Nodes that its trees of so many levels can have."""
        return self.most_nodes

    def reaches(self, requests: int) -> int:
        """Last tokens that a draft for so many requests reads at most: `rereads`, or more where that costs little."""
        return self.rereads

    def unread(self, committed: int) -> int:
        """Last tokens that it has to read behind a round of its own guesses that committed so many at most.

        Its last guess was not read, nor was the target's own token.
        """
        return 2

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Requests were forked: copy these pages in the drafter's own cache, if it has one."""

    def clear_pages(self, pages: Sequence[int]) -> None:
        """A request met numbers that are not finite and gives these pages back: leave none of them in its own cache.

        Whoever gets the pages next does not see them, but 0 times NaN is NaN.
        """

    def resume(self, request_id: str, known: int) -> None:
        """So many tokens of a request's prompt are in the drafter's own cache, from another that began alike.

        Called behind `start`, where the host asks for drafts.
        """

    def has_read(self, request_id: str) -> int:
        """Tokens of a request that are in its own cache, where the host asks for drafts: others may resume there."""
        return 0

    def read(self, batch: PassBatch) -> None:
        """The target computes these tokens of prompts now. Called where rounds are queued, before any `draft`."""

    def capture_prompts(self, trash_slot: int, pool: Any) -> None:
        """From now on `read` may be captured in graphs with this memory; the cache's `trash_slot` is nobody's."""

    def catch_up(self, requests: Sequence[DraftRequest], known: Sequence[int]) -> None:
        """Rounds went by without a draft: read these requests' tokens from `known` on, but for the last two."""

    def draft(self, round: DraftRound) -> Tensor | DeviceTree:  # [B, depth] int64, or trees of `round.nodes`
        """Guess for each request, without looking at a value: on a GPU this is captured in a graph.

        Writes only the drafter's own cache, for the last tokens, as many as it `reaches`, and behind them. It may be
        asked twice for the same place, and for requests that have ended meanwhile: nothing but `round` and that cache
        may decide the guesses.
        """
        raise NotImplementedError(f"drafter {self.name!r} cannot draft inside a queued round")

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        """One row of the draft a request. Writes only the drafter's own cache, behind the committed length."""

    def propose_trees(self, requests: Sequence[DraftRequest], budget: Sequence[int], levels: int) -> Draft:
        """The same of one that makes trees, of so many levels at most; one whose trees do not grow need not listen."""
        return self.propose(requests, budget)
