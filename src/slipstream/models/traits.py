"""What makes one layer's attention differ from another's: known once, the same in every pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import UnsupportedModel

_NEAR = 1_000_000
"""Most keys that a mask's rule is asked about one by one."""


@dataclass(frozen=True, slots=True)
class AttentionTraits:
    """What a layer's attention is beside its query, key and value: the same in every pass."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Stands where transformers would put a mask: what the mask would have said, not made."""

    window: int | None
    may_look: Callable[[Any, Any, Any, Any], Any]  # batch, head, query position, key position -> bool

    def check(self, name: str) -> None:
        """Raise `UnsupportedModel` unless the rule is causal order within the window, far beyond the window too."""
        far = 3 * (self.window or 8192)
        zero = torch.zeros((), dtype=torch.int64)
        for at in (0, far // 2, far):
            query = torch.tensor(at)
            key = torch.arange(far + 2) if far < _NEAR else self._ends(at, far)  # [L]
            wanted = key <= query if self.window is None else (key <= query) & (key > query - self.window)
            try:
                same = torch.equal(torch.as_tensor(self.may_look(zero, zero, query, key)).expand(key.shape), wanted)
            except (IndexError, RuntimeError, TypeError):  # the rule looks something up about the tokens
                same = False
            if not same:
                raise UnsupportedModel(
                    f"{name} masks its attention in a way that Slipstream does not know: neither causal order nor a "
                    "sliding window. Run it with transformers instead"
                )

    def _ends(self, *places: int) -> Tensor:
        """Keys about these places and where their windows begin: all keys of a long window would take gigabytes."""
        ends = [0, *places, *(place - (self.window or 0) for place in places)]
        return torch.cat([torch.arange(max(0, end - _NEAR // 8), max(0, end) + 2) for end in ends])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A model that computes with its mask itself (Bloom) does not leave its attention to us."""
        raise UnsupportedModel("it uses its attention mask outside of transformers' attention interface")

    def __getattr__(self, name: str) -> Any:
        return self.__torch_function__(name, ())
