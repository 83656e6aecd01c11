"""Errors about a drafter's weights: they name the drafter, since its user may not have thought of a model at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.core.errors import ConfigError, DrafterError, ModelNotFound

WAYS = (
    "Give NAME:PATH with the folder or the Hugging Face hub id of weights for this drafter (of a smaller model for "
    "model:PATH); `slipstream train` makes some"
)


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Let what is wrong with a drafter begin with the option that named it, such as drafter='eagle3:heads'."""
    try:
        yield
    except (ConfigError, DrafterError, ModelNotFound) as error:
        if not str(error).startswith(option):
            error.args = (f"{option}: {error}",)
        raise
