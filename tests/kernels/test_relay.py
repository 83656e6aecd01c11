"""All layers in one launch, here a launch for each stage: as layer by layer, whatever the pass is like."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from interpreted import DEVICE
from relay_scenes import SMALL, Scene
from slipstream.kernels.relay import RelayShape, key_runs_of, takes

TINY = RelayShape(width=96, heads=6, kv_heads=2, head_dim=32, inner=96)
"""As small as it can be with every product in runs: the interpreter takes long for a program."""
ONE: dict[str, Any] = {"layers": 1, "contexts": (3,), "rows": (1,)}

PASSES: dict[str, dict[str, Any]] = {
    "one row": {"contexts": (37,), "rows": (1,)},
    "the first token": {"contexts": (0,), "rows": (1,)},
    "two rows of one request": {"contexts": (16,), "rows": (2,)},
    "two requests": {"contexts": (5, 130), "rows": (1, 1)},
    "a row that is nobody's": {"contexts": (21,), "rows": (1,), "padding": 1},
    "a context in three runs": {"contexts": (1030,), "rows": (2,)},
    "room for runs that are not there": {"contexts": (9,), "rows": (1,), "most_keys": 2048},
    "a row behind a full run": {"contexts": (512,), "rows": (1,)},
    "rows on the border of runs": {"contexts": (511,), "rows": (2,)},
    "requests on the border of runs": {"contexts": (511, 1023), "rows": (1, 1)},
}
SHAPES = {
    "whole tiles": replace(TINY, width=192, inner=256),
    "a head for each": replace(TINY, heads=3, kv_heads=3, head_dim=64),
    "many to a head": replace(TINY, heads=20, kv_heads=1, head_dim=16),
    "odd heads": replace(TINY, heads=4, kv_heads=2, head_dim=40),
}


@pytest.mark.parametrize("name", PASSES)
def test_as_layer_by_layer(name: str) -> None:
    scene = Scene(TINY, layers=2, **PASSES[name])
    x, delta = scene.by_layers()
    kept = scene.caches()
    scene.forget()
    ours, our_delta = scene.relayed(staged=True)
    torch.testing.assert_close(ours, x, rtol=0, atol=1e-2)
    torch.testing.assert_close(our_delta.sum(0), delta.sum(0), rtol=0, atol=1e-2)
    for ours, theirs in zip(scene.caches(), kept, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2)


@pytest.mark.parametrize("name", SHAPES)
def test_other_heads(name: str) -> None:
    scene = Scene(SHAPES[name], layers=2, contexts=(19,), rows=(2,), turned=0.5)
    x, delta = scene.by_layers()
    scene.forget()
    ours, our_delta = scene.relayed(staged=True)
    torch.testing.assert_close(ours, x, rtol=0, atol=1e-2)
    torch.testing.assert_close(our_delta.sum(0), delta.sum(0), rtol=0, atol=1e-2)


def test_a_context_that_is_longer_than_was_said_is_not_waited_for() -> None:
    """It comes out wrong, as it would by any kernel, but it comes."""
    scene = Scene(TINY, layers=1, contexts=(600,), rows=(1,), most_keys=512)
    x, _ = scene.relayed(staged=True)
    assert x.isfinite().all()


def test_nothing_is_left_undone_where_a_row_is_nobodys() -> None:
    """Its numbers are of no use, but they must be numbers: the next kernels read them."""
    scene = Scene(TINY, layers=2, contexts=(21,), rows=(1,), padding=1)
    scene.used += 1
    x, delta = scene.relayed(staged=True)
    assert x.isfinite().all()
    assert delta.isfinite().all()


def test_not_a_number_is_handed_on() -> None:
    """It must not look like a place that was never written: the next one would wait for ever."""
    scene = Scene(TINY, layers=2, contexts=(21,), rows=(1,))
    scene.x[0, 5] = torch.tensor(-1, dtype=torch.int16).view(torch.float16).item()  # all bits set
    x, delta = scene.relayed(staged=True)
    assert x.isnan().all()
    assert delta.isnan().all()


def test_which_models_fit() -> None:
    assert SMALL.fits(DEVICE)
    assert not replace(SMALL, width=4096, heads=32, kv_heads=8, head_dim=128, inner=11008).fits(DEVICE)  # too large
    assert not replace(SMALL, head_dim=32, heads=18).fits(DEVICE)  # two threads would look at one number
    assert not replace(SMALL, width=960, heads=15, kv_heads=5, inner=2560).fits(DEVICE)  # two tiles find no room
    assert not replace(SMALL, width=640, heads=10, kv_heads=2, inner=2560).fits(DEVICE)  # nor filled up to 1,024
    assert not replace(SMALL, inner=1537).fits(DEVICE)  # two numbers share a word


def test_which_passes_it_takes() -> None:
    assert takes(SMALL, 2, Scene(SMALL, layers=1, contexts=(3, 9), rows=(1, 1)).layout)
    one = Scene(SMALL, **ONE).layout
    assert not takes(SMALL, 3, one)
    assert not takes(SMALL, 1, replace(one, ancestors=torch.zeros(1, 1, dtype=torch.int32)))
    assert takes(SMALL, 1, replace(one, max_keys=8192))
    assert not takes(SMALL, 1, replace(one, max_keys=8193))


@pytest.mark.parametrize(("keys", "runs"), [(1, 1), (512, 1), (513, 4), (2048, 4), (2049, 8)])
def test_runs_of_keys(keys: int, runs: int) -> None:
    assert key_runs_of(keys) == runs


COMPILED = {
    "default": (SMALL, 1, 4, "bfloat16"),
    "two rows": (SMALL, 2, 1, "float16"),
    "wide heads": (replace(SMALL, heads=5, kv_heads=1, head_dim=128), 1, 1, "bfloat16"),
    "odd heads": (replace(SMALL, heads=6, kv_heads=2, head_dim=96), 2, 4, "bfloat16"),
}
"""Shape, rows, runs of keys, numbers."""

COMPILE = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from slipstream.kernels import relay
from slipstream.kernels.relay import RelayShape

GIVEN = {"x", "x_out", "cos", "sin"}
WIDE = {"table", "positions", "places", "slots"}
HALF = {"attended", "act"}
NAMES = relay._relay_kernel.arg_names
NUMBERS = {"scale": "fp32", "input_eps": "fp32", "post_eps": "fp32"}

def compiled(shape, rows, runs, dtype):
    dtype = getattr(torch, dtype)
    constants = relay.constants_of(shape, rows, runs, rotary=64, page=16, slots=4096, dtype=dtype, staged=False)
    given = "*bf16" if dtype is torch.bfloat16 else "*fp16"
    def kind(name):
        plain = name.removesuffix("_ptr")
        return given if plain in GIVEN else "*i64" if plain in WIDE else "*i16" if plain in HALF else "*i32"
    signature = {
        name: "constexpr" if name in constants else kind(name) if name.endswith("_ptr") else NUMBERS.get(name, "i32")
        for name in NAMES
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(NAMES) if name.endswith("_ptr")}
    found = triton.compile(
        ASTSource(relay._relay_kernel, signature, constants, aligned), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "launch_cooperative_grid": True},
    )
    return found.metadata.shared, found.asm["ttgir"]

print(json.dumps({name: compiled(*case) for name, case in CASES.items()}))
"""


@pytest.fixture(scope="module")
def machine_code() -> dict[str, tuple[int, str]]:
    """By case: shared memory, and what the GPU's compiler gets. A process that does not interpret makes all of them."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = COMPILE.replace("CASES", repr(COMPILED))
    done = subprocess.run([sys.executable, "-c", script], env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", COMPILED)
def test_every_thread_looks_for_itself(machine_code: dict[str, tuple[int, str]], name: str) -> None:
    """As it is compiled, no number that is waited for is looked at by two threads, who might not see the same.

    And it takes no more shared memory than was foreseen.
    """
    shape, (shared, code) = COMPILED[name][0], machine_code[name]
    assert shape.fits(DEVICE)
    assert shared <= shape.shared_bytes
    blocked = r"^(#\w+) = #ttg.blocked<\{sizePerThread = \[(.*?)\], threadsPerWarp = \[(.*?)\], warpsPerCTA = \[(.*?)\]"
    found = re.findall(blocked, code, re.M)
    layouts = {name: [list(map(int, part.split(","))) for part in parts] for name, *parts in found}
    looks = re.findall(r"tt\.load [^\n]*isVolatile = true[^\n]*", code)
    shapes = [re.search(r"tensor<([\dx]+)x!tt.ptr<\w+>, (#\w+)>", look) for look in looks]
    tensors = [(list(map(int, found[1].split("x"))), layouts[found[2]]) for found in shapes if found]
    assert len(tensors) > 40
    for size, (each, threads, warps) in tensors:
        assert all(e * t * w <= s for s, e, t, w in zip(size, each, threads, warps, strict=True)), (size, each, threads)
