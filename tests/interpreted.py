"""Kernels under Triton's interpreter, and masks of bits written plainly. Not a test file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


FLOATS = (torch.float32, torch.float16) + ((torch.bfloat16,) if torch.cuda.is_available() else ())
"""What kernels are right with: the interpreter's products of bf16 are wrong, and it cuts off instead of rounding."""


_patch_tensor = interpreter._patch_lang_tensor


def _patch_index_too(tensor: Any, *rest: Any) -> None:
    """Triton 3.6 makes a loop's bound an int in a way that numpy 2.4 refuses: its scalars are arrays of one number."""
    _patch_tensor(tensor, *rest)
    tensor.__index__ = lambda self: int(self.handle.data.item())


interpreter._patch_lang_tensor = _patch_index_too


_patch_lang, _launch = interpreter._patch_lang, interpreter.GridExecutor.__call__


_patched: set[Any] = set()


def _patch_once(function: Any) -> Any:
    """The language is patched anew by every call of a function of a kernel, which costs a third of the time."""
    if function in _patched:
        return None
    _patched.add(function)
    return _patch_lang(function)


def _launch_unpatched(self: Any, *args: Any, **options: Any) -> None:
    """What a launch patched is undone at its end."""
    _patched.clear()
    _launch(self, *args, **options)


interpreter._patch_lang = _patch_once


interpreter.GridExecutor.__call__ = _launch_unpatched


def _with_bool_masks(method: str, at: int) -> None:
    """Triton 3.9 takes only masks of bools, but where a scalar takes part in one it makes integers of them itself."""
    original = getattr(interpreter.InterpreterBuilder, method)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        mask = args[at]
        known = mask.data.astype(bool) if isinstance(mask, interpreter.TensorHandle) else mask  # of a descriptor
        as_bool = interpreter.TensorHandle(known, interpreter.tl.int1)
        return original(self, *args[:at], as_bool, *args[at + 1 :], **options)

    setattr(interpreter.InterpreterBuilder, method, call)


_with_bool_masks("create_masked_load", 1)
_with_bool_masks("create_masked_store", 2)


def as_bits(allowed: Tensor) -> Tensor:
    """[R, W] int32 of bools [R, V]: bit t % 32 of word t // 32 is token t's; what is behind the last token is 0."""
    rows = []
    for row in allowed.tolist():
        words = [0] * -(-len(row) // 32)
        for token, may in enumerate(row):
            words[token // 32] |= int(may) << (token % 32)
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32).to(allowed.device)
