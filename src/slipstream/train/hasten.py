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
    """A function that is compiled at its first call, for the sizes of that call. Takes seconds, once."""

    def __init__(self, function: Callable[Given, Found]) -> None:
        self._plain = function
        self._fast: Any = torch.compile(function, dynamic=False)

    def __call__(self, *args: Given.args, **named: Given.kwargs) -> Found:
        if self._fast is not None:
            try:
                found: Found = self._fast(*args, **named)
                return found
            except (TorchDynamoException, InductorError):  # there is no compiler, or it fails
                self._fast = None
        return self._plain(*args, **named)
