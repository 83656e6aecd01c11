"""The interpreter as the kernels need it: their loops have bounds that are known only inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from triton.runtime import interpreter


@pytest.fixture(autouse=True, scope="session")
def _loops_with_bounds_of_their_own() -> Iterator[None]:
    """Triton 3.6 makes a bound an int in a way that numpy 2.4 refuses: its scalars are arrays of one number."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_index_too(tensor: Any, *rest: Any) -> None:
        patch_tensor(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patch_index_too)
        yield
