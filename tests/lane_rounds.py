"""Random decoding rounds on lanes, and the kernels of a round held against their twins: on any device.

A round is plain data, so that a reference in Python can read it; everything that must not matter (the trash lane,
padding of drafts, what the outputs held before) is garbage on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from hypothesis import strategies as st
from torch import Tensor

from slipstream.core.draft import MAX_NODES, ROOT, Draft, Tree
from slipstream.kernels.gpu import accept as accepting
from slipstream.kernels.gpu import rows as packing
from slipstream.kernels.gpu.accept import PathMoves, VerdictTable
from slipstream.kernels.gpu.rows import RECENT, LaneState, PassRows

CPU = torch.device("cpu")
"""Where kernels run here: for real, or by Triton's interpreter (see conftest.py)."""

GARBAGE = -99
FRAME = 16  # guard numbers on either side of an output, which must stay untouched


@dataclass(frozen=True)
class Lane:
    last: int
    previous: int
    length: int
    generated: int
    pages: tuple[int, ...]
    recent: tuple[int, ...] = tuple(range(-RECENT, 0))


@dataclass(frozen=True)
class Round:
    """Lanes, the requests of one round, and what the target chooses at each of their rows."""

    lanes: tuple[Lane, ...]  # [S]: without the trash lane
    requests: tuple[int, ...]  # [B]: lanes; S is padding
    trees: tuple[Tree, ...]  # [B]
    choices: tuple[tuple[int, ...], ...]  # [B], each of 1 + nodes: at the root, then at each node
    width: int  # K
    rows: int  # N
    is_tree: bool
    page_size: int
    num_pages: int  # of the cache; one more is the trash page

    @property
    def trash(self) -> int:
        return len(self.lanes)

    @property
    def trash_slot(self) -> int:
        return self.num_pages * self.page_size

    def brings(self, request: int) -> int:
        return 0 if self.requests[request] == self.trash else 1 + len(self.trees[request])

    def slot(self, request: int, row: int) -> int:
        lane = self.lanes[self.requests[request]]
        place = lane.length + row
        return lane.pages[place // self.page_size] * self.page_size + place % self.page_size

    def state(self, device: torch.device) -> LaneState:
        reach = len(self.lanes[0].pages)
        unused = Lane(GARBAGE, GARBAGE, 1 << 40, GARBAGE, (GARBAGE,) * reach)
        lanes = (*self.lanes, unused)
        return LaneState(
            last=torch.tensor([lane.last for lane in lanes], device=device),
            previous=torch.tensor([lane.previous for lane in lanes], device=device),
            length=torch.tensor([lane.length for lane in lanes], device=device),
            generated=torch.tensor([lane.generated for lane in lanes], device=device),
            pages=torch.tensor([lane.pages for lane in lanes], dtype=torch.int32, device=device),
            recent=torch.tensor([lane.recent for lane in lanes], device=device),
        )

    def lane_of(self, device: torch.device) -> Tensor:
        return torch.tensor(self.requests, device=device)

    def draft(self, device: torch.device) -> Draft:
        shape = (len(self.trees), self.width)
        spare = [self.width - len(tree) for tree in self.trees]
        tokens = [[*tree.tokens, *([-1] * n)] for tree, n in zip(self.trees, spare, strict=True)]
        parents = [[*tree.parents, *([77] * n)] for tree, n in zip(self.trees, spare, strict=True)]
        return Draft(
            torch.tensor(tokens, dtype=torch.int64, device=device).view(shape),
            torch.tensor(parents, dtype=torch.int64, device=device).view(shape),
            torch.tensor([len(tree) for tree in self.trees], device=device),
            not self.is_tree,
        )

    def chosen(self, device: torch.device) -> Tensor:
        """[N]; padding rows choose anything."""
        real = [c for b, choices in enumerate(self.choices) for c in choices[: self.brings(b)]]
        return torch.tensor([*real, *([1] * (self.rows - len(real)))], device=device)


def random_tree(random: Random, nodes: int, vocab: int, *, chain: bool, distinct: bool) -> Tree:
    """Bushy or deep; `distinct`: no token twice under one parent, as drafters promise."""
    spread = 1 if chain else random.randint(1, MAX_NODES)
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(nodes):
        parent = max(ROOT, len(tokens) - random.randint(1, spread))
        token = random.randrange(vocab)
        if not distinct or (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return Tree(tuple(tokens), tuple(parents))


def random_choices(random: Random, tree: Tree, vocab: int) -> tuple[int, ...]:
    """Mostly right along one path, or deep ones would be rare; now and then unusable."""
    choices = [random.randrange(vocab) for _ in range(1 + len(tree))]
    if len(tree) and random.random() < 0.8:
        node = random.randrange(len(tree))
        while node != ROOT:
            choices[1 + tree.parents[node]] = tree.tokens[node]
            node = tree.parents[node]
    if random.random() < 0.3:
        choices[random.randrange(len(choices))] = -1
    return tuple(choices)


def random_round(random: Random, requests: int, width: int, *, is_tree: bool, distinct: bool) -> Round:
    page_size = random.choice([1, 3, 4, 16])
    spare_lanes, reach = random.randint(0, 2), 40 + (width + page_size) // page_size
    num_pages = (requests + spare_lanes) * reach
    pages = random.sample(range(num_pages), num_pages)  # pages of all lanes differ
    lanes = tuple(
        Lane(
            last=random.randrange(1000),
            previous=random.randrange(1000),
            length=random.randrange(40 * page_size),
            generated=random.randrange(50),
            pages=tuple(pages[i * reach : (i + 1) * reach]),
        )
        for i in range(requests + spare_lanes)
    )
    own = random.sample(range(len(lanes)), requests)
    padded = tuple(len(lanes) if random.random() < 0.2 else lane for lane in own)
    vocab = random.randint(1, 4)
    trees = tuple(
        Tree()
        if lane == len(lanes)
        else random_tree(random, random.randint(0, width), vocab, chain=not is_tree, distinct=distinct)
        for lane in padded
    )
    choices = tuple(random_choices(random, tree, vocab) for tree in trees)
    used = sum(1 + len(tree) for tree, lane in zip(trees, padded, strict=True) if lane != len(lanes))
    rows = max(1, used + random.choice([0, 0, 1, 7, 100]))
    return Round(lanes, padded, trees, choices, width, rows, is_tree, page_size, num_pages)


def rounds(*, is_tree: bool, distinct: bool = False, max_requests: int = 5) -> st.SearchStrategy[Round]:
    return st.builds(
        lambda seed, requests, width: random_round(
            Random(seed), requests, width, is_tree=is_tree, distinct=distinct or not is_tree
        ),
        seed=st.integers(0, 2**32 - 1),
        requests=st.integers(1, max_requests),
        width=st.sampled_from([0, 1, 2, 3, 4, 7, 8, 15, 31, MAX_NODES]),
    )


class Framed:
    """Output tensors that begin as garbage, with a frame on either side of each that must come out untouched."""

    def __init__(self) -> None:
        self.frames: list[Tensor] = []

    def put(self, like: Tensor) -> Tensor:
        whole = torch.full((like.numel() + 2 * FRAME,), GARBAGE, dtype=like.dtype, device=like.device)
        self.frames += [whole[:FRAME], whole[-FRAME:]]
        return whole[FRAME:-FRAME].view(like.shape)

    def rows(self, round_: Round, device: torch.device) -> PassRows:
        rows = PassRows.empty(len(round_.requests), round_.width, round_.rows, tree=round_.is_tree, device=device)
        fields = {name: getattr(rows, name) for name in PassRows.__dataclass_fields__}
        return replace(rows, **{name: self.put(t) for name, t in fields.items() if t is not None})

    def told(self, round_: Round, device: torch.device) -> VerdictTable:
        return VerdictTable(self.put(VerdictTable.empty(len(round_.requests), round_.width, device).table))

    def moves(self, round_: Round, device: torch.device) -> PathMoves | None:
        none = PathMoves.empty(len(round_.requests), round_.width, device)
        return PathMoves(self.put(none.src), self.put(none.dst)) if round_.is_tree else None

    def check(self) -> None:
        assert all(bool((frame == GARBAGE).all()) for frame in self.frames)


@dataclass(frozen=True)
class Outcome:
    """What acceptance left behind."""

    told: VerdictTable
    moves: PathMoves | None
    state: LaneState


def packed(round_: Round, device: torch.device = CPU, *, kernel: bool = False) -> PassRows:
    """The rows of a round, by the twin or by the kernel."""
    framed = Framed()
    state, out = round_.state(device), framed.rows(round_, device)
    lay_out = packing._launch_pack if kernel else packing._twin_pack
    lay_out(state, round_.lane_of(device), round_.draft(device), out, round_.page_size, round_.trash_slot)
    framed.check()
    assert_same(_fields(state), _fields(round_.state(device)))
    return out


def accepted(round_: Round, device: torch.device = CPU, *, kernel: bool = False) -> Outcome:
    """The verdicts on a round, by the twin or by the kernel; its rows are laid out by the twin."""
    framed = Framed()
    state, told, moves = round_.state(device), framed.told(round_, device), framed.moves(round_, device)
    follow = accepting._launch_accept if kernel else accepting._twin_accept
    follow(round_.chosen(device), round_.draft(device), packed(round_, device), state, told, moves)
    framed.check()
    return Outcome(told, moves, state)


def compare_packing(round_: Round, device: torch.device) -> None:
    assert_same(_fields(packed(round_, device, kernel=True)), _fields(packed(round_)))


def compare_acceptance(round_: Round, device: torch.device) -> None:
    ours, twin = accepted(round_, device, kernel=True), accepted(round_)
    assert_same([ours.told.table], [twin.told.table])
    assert_same(_fields(ours.moves), _fields(twin.moves))
    assert_same(*([t[: round_.trash] for t in _fields(outcome.state)] for outcome in (ours, twin)))


def compare_compaction(round_: Round, device: torch.device, dtype: torch.dtype, heads: int, dim: int) -> None:
    moves = accepted(round_).moves
    assert moves is not None
    planes = numbered_planes(round_.trash_slot + 1, dtype, heads, dim)
    ours = planes.to(device, copy=True)
    accepting._launch_compact(ours, moves.src.to(device), moves.dst.to(device))
    accepting._twin_compact(planes, moves.src, moves.dst)
    assert_same([ours], [planes])


def numbered_planes(slots: int, dtype: torch.dtype, heads: int, dim: int, layers: int = 2) -> Tensor:
    """[L, slots, heads, dim] of numbers that tell layer, slot and place apart."""
    shape = (layers, slots, heads, dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def assert_same(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.cpu(), b.cpu())


def _fields(of: PassRows | PathMoves | LaneState | None) -> list[Tensor]:
    if of is None:
        return []
    return [t for t in (getattr(of, name) for name in type(of).__dataclass_fields__) if t is not None]
