"""Addresses as pointers, and bits as numbers, for compiled code: what numba leaves out and loops over tensors need."""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.extending import intrinsic


def inner(**options: Any) -> Any:
    """Marks a function that only compiled code calls: ways in from Python would take as long to compile as the rest."""
    return njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        target = types.CPointer(kind)

        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(target))

        return target(types.int64), generate

    return pointer


floats = _pointer_to(types.float32)
"""The fp32 numbers at an address."""
integers = _pointer_to(types.int64)
"""The int64 numbers at an address."""
bytes_at = _pointer_to(types.uint8)
"""The bytes at an address."""


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    """The fp32 number whose bits are this int32."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@intrinsic
def anything(typing: Any, address: Any) -> Any:
    """A pointer to no type in particular: what `carray` takes."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate
