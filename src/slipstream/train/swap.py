"""A folder that is replaced as a whole: whenever a run is killed, the old one or the new one is there, and complete."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path


def beside(folder: Path) -> Path:
    """Where the next `folder` is written, empty."""
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return work


def swap_in(folder: Path) -> None:
    """Put what was written `beside` in the place of `folder`, which is kept until that is done."""
    recover(folder)  # so that what is removed next is not the only one
    old = _old(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    folder.with_name(f".{folder.name}.part").rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Where a run was killed between the two renames of `swap_in`, undo the first. Before `folder` is read."""
    if not folder.exists() and _old(folder).exists():
        with suppress(FileNotFoundError):  # another rank was quicker
            _old(folder).rename(folder)


def remove(folder: Path) -> None:
    """Away with it, and with what a killed run left beside."""
    for stale in (_old(folder), folder):
        shutil.rmtree(stale, ignore_errors=True)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
