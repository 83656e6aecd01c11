"""Compiles kernels for an H200 on machines that have none: Triton brings all it takes. Run as a program of its own,
since the tests' own process interprets kernels. Its last line is JSON: what each kernel needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.kernels.gpu.grow_tree import _PART, _RANKED, _grow_kernel, _tree_kernel
from slipstream.kernels.gpu.row_linear import Tile, _linear_kernel, splits_of

HOPPER = GPUTarget("cuda", 90, 32)
WIDTH = 8
NUMBERS = ("last_place", "each", "most", "size", "step", "before", "nodes")
HEAD = {"qkv": (12288, 8192), "o": (4096, 4096), "gate_up": (11008, 4096), "down": (4096, 11008), "lm": (32000, 4096)}
"""The products of a head for a target of 7B: outputs and inputs."""


def compiled(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """types: of what is not constant; pointers are aligned."""
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    given = {places[name]: value for name, value in constants.items()}
    aligned = {places[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind.startswith("*")}
    made = triton.compile(ASTSource(kernel, signature, given, aligned), target=HOPPER, options=options)
    ptx = made.asm["ptx"]
    return {
        "shared": made.metadata.shared,
        "spills": ".local" in ptx,
        "slow_casts": ptx.count("cvt.bf16.f16"),
        "products": ptx.count("wgmma.mma_async"),
    }


def narrow_product(name: str, rows: int) -> dict[str, Any]:
    (n, k), gated, partial = HEAD[name], name == "gate_up", name not in ("gate_up", "lm")
    splits = splits_of(n, k) if partial else 1
    tile = Tile.of(rows, n, k, splits=splits, gated=gated, size=2, narrow=True)
    weight, out = "*fp8e4nv", "*fp32" if partial or name == "lm" else "*bf16"
    types = {"x_ptr": "*bf16", "w_ptr": weight, "raw_ptr": weight, "scale_ptr": "*fp32", "out_ptr": out}
    constants = {
        "bias_ptr": None, "K": k, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "SPLITS": splits, "WHOLE": tile.whole, "GATED": gated, "PARTIAL": partial, "HAS_BIAS": False, "NARROW": True,
        "PRECISION": "tf32", "KIND": tl.bfloat16, "TMA": False, "FLIP": False, "BESIDE": tile.beside, "OVERLAP": True,
        "FETCH": tile.block_k, "EARLY": False,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": True, "enable_fp_fusion": False}
    return compiled(_linear_kernel, types | {"M": "i32", "N": "i32"}, constants, **options)


def tree_kernels() -> dict[str, Any]:
    types = dict.fromkeys((*_grow_kernel.arg_names, *_tree_kernel.arg_names), "*i64") | dict.fromkeys(NUMBERS, "i32")
    types |= dict.fromkeys(("offered_scores", "scores", "above_scores", "out_scores"), "*fp32")
    types |= dict.fromkeys(("above_ancestors", "out_ancestors"), "*i32")
    found = {}
    for first, deeper, line in ((True, True, 1), (False, True, 16), (False, False, 1)):
        block = WIDTH if first else WIDTH**2
        constants = {"WIDTH": WIDTH, "FIRST": first, "DEEPER": deeper, "BLOCK": block, "BEAM": WIDTH, "LINE": line}
        name = f"grow {first} {deeper}"
        found[name] = compiled(_grow_kernel, types, constants | {"OVERLAP": True}, num_warps=1, launch_pdl=True)
    constants = {"RANKED": _RANKED, "PART": _PART, "OVERLAP": True}
    return found | {"tree": compiled(_tree_kernel, types, constants, num_warps=4, launch_pdl=True)}


if __name__ == "__main__":
    products = {f"{name} {rows}": narrow_product(name, rows) for name, rows in (
        ("qkv", 8), ("o", 32), ("gate_up", 8), ("gate_up", 64), ("down", 64), ("lm", 88), ("qkv", 704)
    )}  # fmt: skip
    print(json.dumps({"products": products, "trees": tree_kernels()}))
