"""Compiled where that works, as it was written where not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import InternalTorchDynamoError

from slipstream.train.hasten import Hastened


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_the_compiled_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda x: function(x) + 1)
    assert Hastened(double)(torch.tensor(3)).item() == 7


def test_only_calls_of_its_size_are_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda x: function(x) + 1)
    fast = Hastened(double, (2, 3))
    assert fast(torch.ones(2, 3, 5)).max() == 3
    assert fast(torch.ones(2, 4, 5)).max() == 2


def test_where_compiling_fails_it_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def compile(function: Callable[[Tensor], Tensor], **options: object) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            tries.append(x)
            raise InternalTorchDynamoError("no compiler")

        return run

    monkeypatch.setattr(torch, "compile", compile)
    fast = Hastened(double)
    assert [fast(torch.tensor(x)).item() for x in (1, 2, 3)] == [2, 4, 6]
    assert len(tries) == 1


def test_what_the_function_itself_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: Tensor) -> Tensor:
        raise ValueError("of its own")

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with pytest.raises(ValueError, match="of its own"):
        Hastened(broken)(torch.tensor(1))
