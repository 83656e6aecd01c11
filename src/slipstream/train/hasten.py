"""Functions that a GPU runs half as long when torch compiles them, and as they are where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

Given = ParamSpec("Given")
Found = TypeVar("Found")


class Hastened(Generic[Given, Found]):
    """A function that is compiled when it is called with tensors of one size: that takes seconds, once.

    size: the first of what it is given begins with these dimensions. With others it runs as it is: a compilation for
    each would never pay. None: all calls have one size.
    """

    def __init__(self, function: Callable[Given, Found], size: tuple[int, ...] | None = None) -> None:
        self._plain, self._size = function, size
        self._fast: Any = torch.compile(function, dynamic=False)

    def __call__(self, *args: Given.args, **named: Given.kwargs) -> Found:
        if self._fast is not None and self._fits(args):
            try:
                found: Found = self._fast(*args, **named)
                return found
            except (TorchDynamoException, InductorError):  # there is no compiler, or it fails
                self._fast = None
        return self._plain(*args, **named)

    def _fits(self, args: tuple[Any, ...]) -> bool:
        return self._size is None or tuple(args[0].shape[: len(self._size)]) == self._size
