"""Drafts from everything said before: in this request, and in the tenant's earlier answers.

Agents, editors and pipelines ask for nearly the same again and again, and get nearly the same answers. The drafter
counts what followed the latest tokens in these texts; the draft is a tree of the most frequent continuations. See
docs/drafters/suffix.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import unpack_from
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from slipstream.core.draft import MAX_NODES, ROOT, Tree, chain_parents
from slipstream.core.errors import ConfigError
from slipstream.core.params import SamplingParams
from slipstream.core.verdict import Verdict
from slipstream.drafters.base import DraftRequest, HostDrafter, Needs, Opening
from slipstream.drafters.promise import PromiseTable
from slipstream.drafters.suffix.compiling import is_kept
from slipstream.drafters.suffix.index import LONGEST, take_out
from slipstream.drafters.suffix.store import SuffixIndex, SuffixStore
from slipstream.drafters.suffix.tree import FIELDS, STATES, draft_round

if TYPE_CHECKING:
    from slipstream.models.runner import Runner

# Initial probability of a token: by its origin (near the last copy, elsewhere in its text, in past outputs) and the
# number of agreeing tokens before it, times a factor for the votes.
_BY_LENGTH = (
    (0.20, 0.70, 0.80, 0.85, 0.87, 0.90, 0.92, 0.94, 0.96, 0.97),
    (0.05, 0.45, 0.65, 0.77, 0.82, 0.87, 0.91, 0.94, 0.96, 0.98),
    (0.03, 0.10, 0.25, 0.40, 0.45, 0.50, 0.60, 0.75, 0.85, 0.95),
)
_BY_VOTES = (1.0, 0.97, 0.7, 0.45, 0.25, 0.08)
_PRIORS = [chance * votes for chances in _BY_LENGTH for chance in chances for votes in _BY_VOTES]
assert len(_PRIORS) == STATES

_NOTHING = Tree()
_EMPTY = SuffixIndex()


@dataclass(slots=True)
class _Text:
    """The drafter's state of one request."""

    request: DraftRequest
    tenant: str
    before: int  # length of the index's text before the request's tokens: a -1, and each material text with a -1
    answer: int  # beginning of the part of the answer that the store lacks
    index: SuffixIndex
    tree: Tree = _NOTHING
    states: Sequence[int] = ()


class SuffixDrafter(HostDrafter):
    """Follows the longest matches of the latest tokens and takes their most frequent continuations.

    min_match: fewest agreeing tokens to draft from; 0 also guesses without agreement.
    min_chance: lowest probability of a node's whole path.
    candidates: most places counted in the request's own text, and in past outputs.
    store_tokens: tokens of past outputs to keep, over all tenants; 0: none.
    """

    name: ClassVar[str] = "suffix"
    needs: ClassVar[Needs] = Needs(material=True)
    bounded: ClassVar[bool] = True
    source: ClassVar[str] = "text"
    default_draft_tokens: ClassVar[int] = 32

    def __init__(
        self,
        min_match: int = 0,
        min_chance: float = 0.002,
        candidates: int = 16,
        store_tokens: int = 1_000_000,
    ) -> None:
        if not 0 <= min_match <= LONGEST:
            raise ConfigError(f"min_match={min_match}: must be 0 to {LONGEST}")
        if not 0 < min_chance <= 1:
            raise ConfigError(f"min_chance={min_chance}: must be above 0, at most 1")
        if not 1 <= candidates <= 1024:
            raise ConfigError(f"candidates={candidates}: must be 1 to 1024")
        self.store = SuffixStore(store_tokens)
        self._min_match = min_match
        self._min_chance = min_chance
        self._candidates = candidates
        self._texts: dict[str, _Text] = {}
        self._table = PromiseTable(_PRIORS)
        self._chances: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None
        self._warm_up()

    @classmethod
    def open(cls, opening: Opening, target: Runner) -> SuffixDrafter:
        if not is_kept(draft_round.__name__):
            opening.say("compiling the suffix drafter (once): some seconds")
        return cls()

    def held_bytes(self) -> int:
        return self.store.nbytes + sum([text.index.data.nbytes for text in list(self._texts.values())])

    def start(self, request: DraftRequest) -> None:
        self.stop(request.id)
        text = self._texts[request.id] = self._new(request)
        text.index.append(list(request.tokens))

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        texts: list[_Text] = []
        jobs: list[int] = []
        fresh: list[int] = []
        tenants: dict[str, SuffixIndex] = {}
        for request, nodes in zip(requests, budget, strict=True):
            tokens = request.tokens
            text = self._texts.get(request.id)
            if text is None or text.index.length > text.before + len(tokens):  # never started, or the text shrank
                text = self._texts[request.id] = self._new(request)
            index = text.index
            known, length = index.length, text.before + len(tokens)
            if (shared := tenants.get(text.tenant)) is None:
                shared = tenants[text.tenant] = self.store.index(text.tenant) or _EMPTY
            if known < length:
                if length > index.room:
                    index.reserve(length)
                fresh += tokens[known - text.before :]
                index.length = length
            jobs += (index.address, index.size, shared.address, shared.size, length - known, nodes)
            texts.append(text)
        return self._draft(texts, jobs, fresh)

    def promise(self, request_id: str) -> Sequence[float] | None:
        text = self._texts.get(request_id)
        if text is None or not text.tree.tokens:
            return []
        if text.tree.is_chain:
            return self._table.along(request_id, text.states)
        chances = {state: self._table.chance(request_id, state) for state in set(text.states)}
        along: list[float] = []
        for state, parent in zip(text.states, text.tree.parents, strict=True):
            along.append(chances[state] if parent == ROOT else along[parent] * chances[state])
        return along

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            text = self._texts.get(verdict.request_id)
            if text and text.tree.tokens:
                self._learn(verdict.request_id, text, verdict.tokens)
                text.tree = _NOTHING
                self._chances = None

    def stop(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        self._table.forget(request_id)
        if text:
            self.store.insert(text.tenant, list(text.request.tokens[text.answer :]))

    def _new(self, request: DraftRequest) -> _Text:
        # A request that begins with part of its answer was preempted before; that part is in the store already.
        answer = max(request.prompt_length, len(request.tokens))
        before = [token for text in request.material for token in (*text, -1)]
        index = SuffixIndex(len(before) + 2 * len(request.tokens))
        index.append(before)
        return _Text(request, request.params.speculation.tenant, index.length, answer, index)

    def _draft(self, texts: Sequence[_Text], jobs: Sequence[int], fresh: Sequence[int]) -> list[Tree]:
        table = np.frombuffer(array("q", jobs), np.int64).reshape(-1, FIELDS)  # [B, FIELDS]
        nodes = np.empty((3, len(texts) * MAX_NODES), np.int32)  # tokens, parents, states
        results = np.empty((3, len(texts)), np.int64)
        if self._chances is None:
            self._chances = np.array(self._table.shared)
        rules = self._min_match, max(self._min_chance, self.least_chance), self._candidates, self._chances
        total = draft_round(table, np.array(fresh, np.int32), *rules, nodes, results)
        tokens, parents, states = (unpack_from(f"{total}i", row.data) for row in nodes)  # 4 times faster than `tolist`
        use = self.store.use
        trees: list[Tree] = []
        end = 0
        for text, count, is_chain, source in zip(texts, *results.tolist(), strict=True):
            tree = _NOTHING
            if count:
                begin, end = end, end + count
                tree = Tree(tokens[begin:end], chain_parents(count) if is_chain else parents[begin:end])
                text.states = states[begin:end]
                if source >= 0:
                    use(text.tenant, source)
            text.tree = tree
            trees.append(tree)
        return trees

    def _learn(self, request_id: str, text: _Text, emitted: Sequence[int]) -> None:
        """Every child of an accepted node is an observation: it was the next token, or not."""
        tree, states = text.tree, text.states
        if tree.is_chain:
            self._table.learn(request_id, states, tree.tokens, emitted)
            return
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        at = ROOT
        for token in emitted:
            right = ROOT
            for node in children.get(at, ()):
                self._table.learn(request_id, (states[node],), (tree.tokens[node],), (token,))
                if tree.tokens[node] == token:
                    right = node
            if right == ROOT:
                return
            at = right

    def _warm_up(self) -> None:
        """Compile or load the code now instead of during the first request."""
        request = DraftRequest("", [1, 2, 3, 1, 2], 5, SamplingParams(), slot=0)
        self.start(request)
        self.propose([request], [2])
        take_out(self._texts[""].index.data, 1, 2)
        self.stop("")
