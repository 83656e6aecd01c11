"""The kernels of a pass on a GPU in bf16: right, and each row to the bit the same whoever else is in the pass."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_scenes import Part, Scene, tree
from slipstream.kernels.gpu.jit import recording
from slipstream.kernels.gpu.layout import RowLayout
from slipstream.kernels.gpu.norms import add_norm, add_norm_twin
from slipstream.kernels.gpu.paged import SPLIT_KEYS, attend, prepare
from slipstream.kernels.gpu.rotary_write import rotary_write, rotary_write_twin
from slipstream.kernels.gpu.row_linear import Tile, row_linear, row_linear_twin, splits_of
from slipstream.kernels.linear import narrowed

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ROWS = (1, 7, 16, 17, 32, 33, 64, 128, 200)
MOST = max(ROWS)
WEIGHTS = [(576, 576), (960, 576), (576, 1536), (4608, 3584), (4096, 11008), (2048, 2048), (33, 40), (49152, 576)]
HEADS = [(9, 3, 64), (32, 8, 128), (8, 4, 256), (4, 2, 80), (4, 2, 8)]  # of queries, of keys, their size
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=CUDA) * scale).to(dtype)


def summed(runs: Tensor) -> Tensor:
    """In the order in which the next kernel adds them up."""
    total = runs[0].clone()
    for run in runs[1:]:
        total += run
    return total


class TestProducts:
    @staticmethod
    def operands(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, a weight and a bias large enough that the order in which it is added shows."""
        x, weight = numbers(MOST, k, dtype=dtype), numbers(n, k, dtype=dtype, seed=1, scale=k**-0.5)
        return x, weight, numbers(n, dtype=dtype, seed=2, scale=5.0)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("n", "k"), WEIGHTS)
    @pytest.mark.parametrize("rows", [1, 16, 64, 200])
    def test_right(self, n: int, k: int, dtype: torch.dtype, rows: int) -> None:
        x, weight, bias = self.operands(n, k, dtype)
        exact = x[:rows].double() @ weight.double().T + bias.double()
        runs = row_linear(x[:rows], weight, bias, splits=splits_of(n, k), partial=True)
        torch.testing.assert_close(summed(runs).double(), exact, rtol=1e-3, atol=1e-3)  # bf16 only where it is given
        logits = row_linear(x[:rows], weight, bias, out_dtype=torch.float32)
        torch.testing.assert_close(logits.double(), exact, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize(("n", "k"), [(576, 1536), (4608, 3584), (2048, 2048)])
    @pytest.mark.parametrize("rows", [1, 17, 40, 64, 128, 200])
    @pytest.mark.parametrize("gated", [False, True])
    def test_in_a_graph_the_same_bits(self, n: int, k: int, rows: int, gated: bool) -> None:
        """There the weights come by other loads, and in other tiles."""
        x, weight = numbers(rows, k, dtype=torch.bfloat16), numbers(2 * n, k, dtype=torch.bfloat16, seed=1)
        options: dict[str, Any] = {"gated": True} if gated else {"splits": splits_of(2 * n, k), "partial": True}
        eager = row_linear(x, weight, **options, overlap=True).clone()
        graph = torch.cuda.CUDAGraph()
        with recording():
            assert torch.equal(row_linear(x, weight, **options, overlap=True), eager)
            with torch.cuda.graph(graph):
                found = row_linear(x, weight, **options, overlap=True)
        graph.replay()
        assert torch.equal(found, eager)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("n", "k"), [(1536, 576), (3072, 1024), (33, 40)])
    def test_gated(self, n: int, k: int, dtype: torch.dtype) -> None:
        x, weight = numbers(33, k, dtype=dtype), numbers(2 * n, k, dtype=dtype, seed=1, scale=k**-0.5)
        gate, up = (x.double() @ weight.double().T).to(dtype).double().chunk(2, dim=-1)
        close = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}[dtype]
        ours = row_linear(x, weight, gated=True).double()
        torch.testing.assert_close(ours, F.silu(gate) * up, rtol=close, atol=close)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("n", "k"), WEIGHTS)
    @pytest.mark.parametrize("with_bias", [False, True])
    def test_a_row_is_the_same_among_any_number(self, n: int, k: int, dtype: torch.dtype, with_bias: bool) -> None:
        x, weight, bias = self.operands(n, k, dtype)
        given = bias if with_bias else None
        splits = splits_of(n, k)
        runs = {m: summed(row_linear(x[:m], weight, given, splits=splits, partial=True)) for m in ROWS}
        logits = {m: row_linear(x[:m], weight, given, out_dtype=torch.float32) for m in ROWS}
        for m in ROWS:
            assert torch.equal(runs[m], runs[MOST][:m]), m
            assert torch.equal(logits[m], logits[MOST][:m]), m

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("n", "k"), [(1536, 576), (11008, 4096), (33, 40)])
    def test_so_are_gated_ones(self, n: int, k: int, dtype: torch.dtype) -> None:
        x, weight = numbers(MOST, k, dtype=dtype), numbers(2 * n, k, dtype=dtype, seed=1, scale=k**-0.5)
        whole = row_linear(x, weight, gated=True)
        for m in ROWS:
            assert torch.equal(row_linear(x[:m], weight, gated=True), whole[:m]), m

    def test_the_place_in_the_pass_does_not_matter(self) -> None:
        x, weight, bias = self.operands(4608, 3584, torch.bfloat16)
        order = torch.randperm(MOST, generator=torch.Generator().manual_seed(3)).to(CUDA)
        straight = row_linear(x, weight, bias, out_dtype=torch.float32)
        assert torch.equal(row_linear(x[order], weight, bias, out_dtype=torch.float32), straight[order])
        for m in (1, 5, 60):
            alone = row_linear(x[order[:m]], weight, bias, out_dtype=torch.float32)
            assert torch.equal(alone, straight[order[:m]])

    @pytest.mark.parametrize("rows", [72, 128, 200, 256])
    @pytest.mark.parametrize("narrow", [False, True])
    def test_every_tile_gives_the_same_bits(self, rows: int, narrow: bool) -> None:
        """Whichever was chosen: narrower and higher ones, with runs summed at once or by others."""
        n, k = 4608, 4096
        x, weight = numbers(rows, k, dtype=torch.bfloat16), numbers(n, k, dtype=torch.bfloat16, seed=1)
        codes, scale = narrowed(weight) if narrow else (weight, None)
        splits = splits_of(n, k)
        assert splits > 1
        wanted = summed(row_linear(x, codes, scale=scale, splits=splits, partial=True))
        for block_m, block_n in ((64, 128), (128, 64), (128, 128), (256, 64)):
            for whole in (False, True):
                for tma in (False, True):
                    tile = Tile(
                        block_m, block_n, 64, 3, 8, tma=tma, flip=tma and not narrow, whole=whole, beside=whole
                    )  # fmt: skip
                    runs = row_linear(x, codes, scale=scale, splits=splits, partial=True, tile=tile)
                    assert runs.shape[0] == (1 if whole else splits)
                    assert torch.equal(summed(runs), wanted), tile

    @pytest.mark.parametrize("rows", [1, 16, 33, 64, 120])
    def test_beginning_early_changes_nothing(self, rows: int) -> None:
        """Chained as in a pass: each kernel may start while the one before it runs."""
        x, weight, bias = self.operands(2048, 2048, torch.bfloat16)
        outs = []
        for overlap in (False, True):
            y = x[:rows].clone()
            for _ in range(8):
                runs = row_linear(y, weight, bias, splits=splits_of(2048, 2048), partial=True, overlap=overlap)
                y = add_norm(y, runs, bias, 1e-5, overlap=overlap)
            outs.append(y)
        assert torch.equal(*outs)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("n", "k"), [(576, 576), (4608, 3584), (4096, 11008), (49152, 576)])
    @pytest.mark.parametrize("rows", [1, 8, 16, 64, 200])
    def test_weights_in_eight_bits(self, n: int, k: int, dtype: torch.dtype, rows: int) -> None:
        """Right, whole and by runs, and gated as the plain weight that the codes stand for."""
        x, weight, bias = self.operands(n, k, dtype)
        codes, scale = narrowed(weight)
        exact = x[:rows].double() @ (codes.double() * scale.double()[:, None]).T + bias.double()
        runs = row_linear(x[:rows], codes, bias, scale=scale, splits=splits_of(n, k), partial=True)
        torch.testing.assert_close(summed(runs).double(), exact, rtol=1e-3, atol=1e-3)
        logits = row_linear(x[:rows], codes, bias, scale=scale, out_dtype=torch.float32, overlap=True)
        torch.testing.assert_close(logits.double(), exact, rtol=1e-3, atol=1e-3)
        gated = row_linear(x[:rows], codes, None, scale=scale, gated=True)
        twin = row_linear_twin(x[:rows], codes, None, scale=scale, gated=True)
        torch.testing.assert_close(gated, twin, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 1536, 3584, 4096])
def test_norms(dtype: torch.dtype, width: int) -> None:
    x, delta = numbers(MOST, width, dtype=dtype), numbers(3, MOST, width, seed=1)
    weight = numbers(width, dtype=dtype, seed=2)
    whole, twin = x.clone(), x.clone()
    out, expected = add_norm(whole, delta, weight, 1e-5), add_norm_twin(twin, delta, weight, 1e-5)
    assert torch.equal(whole, twin)
    close = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(out, expected, rtol=close, atol=close)
    for m in ROWS:
        part = x[:m].clone()
        assert torch.equal(add_norm(part, delta[:, :m].contiguous(), weight, 1e-5), out[:m])
        assert torch.equal(part, whole[:m])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (32, 8, 128), (28, 4, 128), (4, 2, 8)])
@pytest.mark.parametrize("norms", [False, True])
def test_rotary_and_cache_write(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, norms: bool) -> None:
    qkv = numbers(2, MOST, (heads + 2 * kv_heads) * dim)
    angles = numbers(512, dim // 2, seed=1).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.arange(MOST, device=CUDA) * 2
    slots = torch.randperm(MOST + 5, generator=torch.Generator().manual_seed(2))[:MOST].to(CUDA)
    weights = (numbers(dim, dtype=dtype, seed=3), numbers(dim, dtype=dtype, seed=4)) if norms else (None, None)
    caches = [torch.zeros(2, MOST + 5, kv_heads, dim, dtype=dtype, device=CUDA) for _ in range(3)]

    def given(rows: int, cache: Tensor) -> Any:
        rows_of = (qkv[:, :rows].contiguous(), cos, sin, positions[:rows], slots[:rows])
        return (*rows_of, *weights, cache[0], cache[1], heads, 1e-6)

    whole = rotary_write(*given(MOST, caches[0]))
    expected = rotary_write_twin(*given(MOST, caches[1]))
    close = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(whole, expected, rtol=close, atol=close)
    torch.testing.assert_close(caches[0], caches[1], rtol=close, atol=close)
    for rows in ROWS:
        own = caches[2].zero_()
        assert torch.equal(rotary_write(*given(rows, own)), whole[:rows])
        assert torch.equal(own[:, slots[:rows]], caches[0][:, slots[:rows]])


class TestAttention:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
    @pytest.mark.parametrize("wide", [False, True])
    def test_right(self, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, wide: bool) -> None:
        trees = () if wide else (tree(700, 64, 1, 5), tree(37, 20, 2, 20))  # prompts are chains
        parts = (Part(0, 60), *trees, Part(1300, 1), Part(500, 14))
        scene = Scene(*parts, heads=heads, kv_heads=kv_heads, dim=dim, page=16, dtype=dtype)
        scene.check(wide=wide)
        scene.check(wide=wide, window=300, softcap=20.0, sinks=numbers(heads, dtype=dtype, seed=5))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("dim", [64, 128])
    def test_one_program_adds_up_runs_as_many_do(
        self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dim: int
    ) -> None:
        parts = (Part(0, 3), tree(700, 40, 1, 5), Part(1300, 1), Part(SPLIT_KEYS - 2, 5), Part(5000, 2))
        scene = Scene(*parts, heads=8, kv_heads=2, dim=dim, page=16, dtype=dtype)
        many = scene.kernel()
        monkeypatch.setattr("slipstream.kernels.gpu.paged._MANY_PROGRAMS", 1)
        monkeypatch.setattr("slipstream.kernels.gpu.paged._MOST_RUNS", 1)
        assert torch.equal(scene.kernel(), many)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("dim", [64, 128, 256])
    @pytest.mark.parametrize("prefix", [0, 61, SPLIT_KEYS - 3, 2 * SPLIT_KEYS + 100])
    def test_a_row_is_the_same_in_every_role(self, dtype: torch.dtype, dim: int, prefix: int) -> None:
        """In a chain, as a chain of a tree's pass, as the root of a plain step."""
        rows = 9
        scene = Scene(Part(prefix, rows), heads=8, kv_heads=2, dim=dim, page=16, dtype=dtype, padding=0)
        most = 4 * SPLIT_KEYS
        chain = scene.kernel(scene.layout(max_keys=most))
        assert torch.equal(scene.kernel(scene.layout(as_tree=True, max_keys=most)), chain)
        assert torch.equal(scene.kernel(scene.layout()), chain)  # a graph's larger bound changes nothing
        for row in range(rows):
            assert torch.equal(self.step(scene, row, most), chain[row])

    @staticmethod
    def step(scene: Scene, row: int, most: int) -> Tensor:
        """The row as a plain step: everything before it is in the cache."""
        whole = scene.layout(max_keys=most)
        alone: RowLayout = replace(
            whole,
            positions=whole.positions[row : row + 1],
            slots=whole.slots[row : row + 1],
            starts=torch.tensor([0, 1], dtype=torch.int32, device=CUDA),
            lanes=whole.lanes[:1],
            lengths=whole.lengths + row,
        )
        query = scene.query[row : row + 1].contiguous()
        return attend(query, scene.keys, scene.values, alone, scaling=scene.scaling)[0]

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
    @pytest.mark.parametrize("as_tree", [False, True])
    def test_begun_before_its_input_is_there(
        self, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, as_tree: bool
    ) -> None:
        """Behind a kernel that writes its queries and the newest keys late, with the next one crowding in."""
        rows, prefix = 3, SPLIT_KEYS + 70
        scene = Scene(Part(prefix, rows), heads=heads, kv_heads=kv_heads, dim=dim, page=16, dtype=dtype, padding=0)
        layout = scene.layout(as_tree=as_tree)
        qkv = numbers(1, rows, (heads + 2 * kv_heads) * dim, seed=4)
        cos, sin = (numbers(prefix + rows, dim, dtype=dtype, seed=seed) for seed in (5, 6))
        given = (qkv, cos, sin, layout.positions, layout.slots, None, None)
        prepare(layout, heads, scene.keys)
        found = []
        for overlap in (False, True, True):
            keys, values = scene.keys.clone(), scene.values.clone()
            torch.cuda.synchronize()
            query = rotary_write(*given, keys, values, heads, overlap=overlap)
            found.append(attend(query, keys, values, layout, scaling=scene.scaling, overlap=overlap))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("prefix", [5, SPLIT_KEYS - 2])
    def test_a_branch_is_what_its_path_would_be_as_a_chain(self, dtype: torch.dtype, prefix: int) -> None:
        dice = Random(prefix)
        part = tree(prefix, 40, 7, 12)
        bushy = Scene(part, heads=8, kv_heads=2, dim=64, page=16, dtype=dtype, padding=0)
        out = bushy.kernel()
        for row in dice.sample(range(40), 12):
            path = part.above(row)
            chain = Scene(Part(prefix, len(path)), heads=8, kv_heads=2, dim=64, page=16, dtype=dtype, padding=0)
            chain.query = bushy.query[path].contiguous()
            theirs = [bushy.slot(0, at) for at in range(prefix)] + [bushy.slot(0, prefix + r) for r in path]
            ours = [chain.slot(0, at) for at in range(prefix + len(path))]
            chain.keys[ours], chain.values[ours] = bushy.keys[theirs], bushy.values[theirs]
            assert torch.equal(chain.kernel(), out[path])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_company_changes_nothing(self, dtype: torch.dtype) -> None:
        """The first request's rows beside others, longer and shorter, drawn into tiles and counters with them."""
        parts = (tree(600, 12, 3, 4), Part(1500, 3), Part(0, 50), tree(5, 64, 4, 9), Part(511, 1))
        together = Scene(*parts, heads=8, kv_heads=2, dim=128, page=16, dtype=dtype)
        among = together.kernel(together.layout(max_keys=4 * SPLIT_KEYS))
        alone = Scene(parts[0], heads=8, kv_heads=2, dim=128, page=16, dtype=dtype, padding=0)
        alone.query = together.query[:12].contiguous()
        theirs = [together.slot(0, at) for at in range(612)]
        ours = [alone.slot(0, at) for at in range(612)]
        alone.keys[ours], alone.values[ours] = together.keys[theirs], together.values[theirs]
        assert torch.equal(alone.kernel(), among[:12])
        for _ in range(20):  # whichever program comes last adds up
            assert torch.equal(together.kernel(together.layout(max_keys=4 * SPLIT_KEYS)), among)
