"""The drafter's contract. This file is enough to write one.

A drafter only guesses: whatever it proposes, the emitted tokens are the target's. It may be wrong, but it must be
quick, and it must not change a request's state. The engine calls, for each request, `start` once, then `propose` and
`observe` once a step, and `stop` once. A `HostDrafter` works in plain Python; a `DeviceDrafter` works in tensors on the
target's device, inside captured graphs. What a drafter needs from the engine it declares in `needs`.

A complete drafter, which guesses that the last token repeats (docs/extending.md has a longer one):

    from slipstream.core.draft import Tree
    from slipstream.drafters.base import HostDrafter

    class RepeatDrafter(HostDrafter):
        name = "repeat"
        bounded = True  # `propose` never hangs

        def propose(self, requests, budget):
            return [Tree.chain([r.tokens[-1]] * nodes) for r, nodes in zip(requests, budget)]

Use it as `--drafter FILE.py:RepeatDrafter` or `LLM(model, drafter=RepeatDrafter())`, or add its module to this folder
and a line to the registry (`__init__.py`): `register("repeat", "slipstream.drafters.repeat:RepeatDrafter")`.
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

    device: bool = False  # it is a `DeviceDrafter`, which proposes tensors; else a `HostDrafter`
    own_cache: bool = False  # it keeps K and V of its own on the target's page table
    probabilities: bool = False  # it reports the distributions of its guesses (`DraftRound.q`, `Draft.q`) on request
    choices: bool = False  # it reads the target's choice at every node, accepted or not, from verdicts
    material: bool = False  # it drafts from `DraftRequest.material`, which is refused if no drafter does


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A drafter's view of a request. It must not change `tokens`."""

    id: str
    tokens: Sequence[int]  # prompt and answer so far; it grows from step to step
    prompt_length: int
    params: SamplingParams
    slot: int  # the request's row in the engine's static tensors
    prediction: Sequence[int] = ()  # the user's own guess at the answer, as tokens
    material: Sequence[Sequence[int]] = ()  # texts that the answer may quote, as tokens
    forced: Callable[[int], Sequence[int]] | None = None
    """Returns up to n tokens that must come next, for an answer whose format leaves no choice."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a named drafter can be built from."""

    path: str | None  # what the user wrote after the name
    model_path: Path  # the target's folder
    tokenizer: Any  # the target's
    resolve: Callable[[str], Path]  # finds or fetches the folder of a model by its name
    load_tokenizer: Callable[[Path], Any]
    open_runner: Callable[[Path, Runner | None], Runner]
    """Loads another model, checked like the target. Second argument: a runner whose embeddings it may share."""
    say: Callable[[str], None] = lambda _: None  # reports progress
    target_config: Any = None  # the target's configuration, to check a head before any weights are read


@dataclass(frozen=True, slots=True)
class Services:
    """What the engine lends a drafter, to be read and not changed."""

    pool: PagePool  # the target's pages, which a cache of its own uses too
    page_table: Callable[[str], PageTable]  # by request id
    sampling: SamplingTable  # each request's sampling parameters and noise
    max_rows: int  # most rows of one pass
    cache_pages: int  # pages that its own cache must have
    taps: TapView | None = None  # the target's hidden states that it asked for, by cache slot

    def hidden(self, slots: Tensor) -> Tensor:  # [N] -> [N, F]
        """The target's hidden states in these cache slots."""
        assert self.taps is not None, "the drafter's `taps` are empty"
        return self.taps.at(slots)


@dataclass(frozen=True, slots=True)
class DraftRound:
    """A step on the device, in static tensors that a captured graph reads."""

    state: LaneState  # the state of every request; read-only
    lanes: Tensor  # [B] int64: the requests of this step, padded with the trash lane
    depth: int  # length of chains, levels of trees
    keys: int  # upper limit of the keys that a row sees
    features: Features  # sampling features that some of the requests use
    nodes: int = 0  # of each tree, if the drafter makes trees
    recent: int = RECENT  # most last tokens that a request may need to reread
    q: Tensor | None = None
    """[B, K, V] fp32, to be filled with the distribution of each guess; None: not needed."""


@dataclass(frozen=True, slots=True)
class DeviceTree:
    """Trees of K nodes each, parents before their children.

    A request with a smaller budget gets the first nodes, so every prefix must be a tree, the best of its size.
    """

    tokens: Tensor  # [B, K] int64
    parents: Tensor  # [B, K] int64, -1 is the root


class Drafter(ABC):
    """Anything that guesses. Only `name` and `propose` are required."""

    name: ClassVar[str]
    needs: ClassVar[Needs] = Needs()
    default_draft_tokens: ClassVar[int] = 5
    planned_draft_tokens: ClassVar[int] = 0  # upper limit under a planner, if above the default
    max_positions: int | None = None  # longest context that it can draft in; None: any
    weights_bytes: int = 0  # memory of its own weights
    remark: str = ""  # a note to users about how it was opened

    def call(self, name: str) -> None:
        """Use the name that the user wrote, such as eagle3, instead of the class's."""
        vars(self)["name"] = name  # mypy knows `name` as the class's own

    @classmethod  # noqa: B027
    def check(cls, opening: Opening) -> None:
        """Raise for what cannot be opened, as far as that shows before weights are read."""

    @classmethod
    def open(cls, opening: Opening, target: Runner) -> Drafter:
        """Build the drafter for this target, and load its weights if it has any."""
        return cls()

    def page_bytes(self, page_size: int) -> int:
        """Memory of its own cache for each page of the target's."""
        return 0

    def workspace_bytes(self, requests: int) -> int:
        """Further memory for `requests` requests at a time."""
        return 0

    def held_bytes(self) -> int:
        """Host memory that it uses now. Called from any thread."""
        return 0

    def attach(self, services: Services) -> None:  # noqa: B027
        """The engine is built. Called once, before any request."""

    def start(self, request: DraftRequest) -> None:  # noqa: B027 - most drafters need not know
        """A request was admitted. Its prompt is known, and computed in the following steps."""

    def observe(self, verdicts: Sequence[Verdict]) -> None:  # noqa: B027
        """The step is over. Called for steps without a draft too."""

    def stop(self, request_id: str) -> None:  # noqa: B027
        """The request ended or will be recomputed: forget it. May come without a `start`."""


class HostDrafter(Drafter):
    """Guesses in plain Python. If it is late or raises, its request loses the draft and nothing else."""

    bounded: ClassVar[bool] = False
    """True if `propose` cannot hang: the engine calls it directly, without a thread and a deadline."""
    source: ClassVar[str] = ""
    """The source of its guesses, for the explanations of plans: "follows the prediction"; "text": copied, and the
    explanation says from where; "": nothing to say."""
    costly: ClassVar[bool] = False
    """True if guesses take noticeable time: the planner then limits their number beforehand."""

    whole: ClassVar[bool] = False
    """True if it learns from all nodes of its trees: the planner takes a tree whole or not at all, by what such trees
    gained before. Nodes keep their numbers; if pages are short, the last ones are missing."""

    least_chance: float = 0.0
    """Set before every `propose`: less likely guesses are useless in this step. A drafter may ignore it."""

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        """One tree for each request, of at most `budget[i]` nodes; an empty tree is plain decoding. Must not block."""

    def promise(self, request_id: str) -> Sequence[float] | None:
        """For each node of the tree just proposed, the estimated probability that its whole path is accepted.

        The planner cuts the tree where it would not pay. None: unknown.
        """
        return None


class DeviceDrafter(Drafter):
    """Guesses on the target's device, in static tensors, without synchronizing with the host."""

    taps: Taps = Taps()  # the target's hidden states that it needs in `Services.taps`
    makes_trees: bool = False  # `draft` returns a `DeviceTree` of `round.nodes`, not chains
    depth: int = 0  # most levels of a tree; chains are limited by `most_nodes`
    grows: bool = False  # its trees grow level by level, and each takes time: the plan sets the number of levels
    most_nodes: int = MAX_NODES  # most guesses for one request
    reads_ahead: int = 1  # an entry of its own cache depends on this number of tokens after its position
    rereads: int = 2  # last tokens that a draft reads again, which lets it be behind by this number
    fewer_rereads: tuple[int, ...] = ()  # smaller numbers that suffice if `DraftRound.recent` is no larger

    def most_at(self, levels: int) -> int:
        """Most nodes of a tree with `levels` levels."""
        return self.most_nodes

    def reaches(self, requests: int) -> int:
        """Last tokens that a draft for `requests` requests can read: `rereads`, or more if that is cheap."""
        return self.rereads

    def unread(self, committed: int) -> int:
        """Last tokens that it must read after a step of its own guesses that committed `committed` at most.

        By default 2: its last guess and the target's own token were not read.
        """
        return 2

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Requests were forked: copy these pages of its own cache, if it has one."""

    def clear_pages(self, pages: Sequence[int]) -> None:
        """A request produced non-finite numbers and frees these pages: clear them in its own cache.

        Their next owner masks old entries, but 0 times NaN is NaN.
        """

    def resume(self, request_id: str, known: int) -> None:
        """The first `known` tokens of a request are already in its own cache, from one with the same beginning.

        Called after `start`, if steps are not queued.
        """

    def has_read(self, request_id: str) -> int:
        """Tokens of a request in its own cache, from which others may resume; used if steps are not queued."""
        return 0

    def read(self, batch: PassBatch) -> None:
        """The target computes these prompt tokens now. Called if steps are queued, before any `draft`."""

    def capture_prompts(self, trash_slot: int, pool: Any) -> None:
        """From now on `read` may be captured in graphs with this memory; `trash_slot` is for padding."""

    def catch_up(self, requests: Sequence[DraftRequest], known: Sequence[int]) -> None:
        """Steps went by without a draft: read these requests' tokens from `known` on, all but the last two."""

    def draft(self, round: DraftRound) -> Tensor | DeviceTree:  # [B, depth] int64, or trees of `round.nodes`
        """Guess for each request, without looking at values: on a GPU this is captured in a graph.

        Writes only its own cache: the entries of the last tokens that it `reaches`, and behind them. It may be called
        twice for the same position, and for requests that have ended: the guesses may depend on nothing but `round`
        and that cache.
        """
        raise NotImplementedError(f"drafter {self.name!r}: cannot draft in queued steps")

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Draft:
        """One row of the draft for each request. Writes only its own cache, behind the committed length."""

    def propose_trees(self, requests: Sequence[DraftRequest], budget: Sequence[int], levels: int) -> Draft:
        """The same with trees of at most `levels` levels. Only a drafter whose trees grow needs to override it."""
        return self.propose(requests, budget)
