"""The cache folder, and how folders get there as a whole or not at all.

Downloads and conversions take minutes, can be interrupted, and can be started by two processes at once. So every folder
in the cache is built beside its place under a lock and moved there by one rename.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.core.errors import DownloadError

Progress = Callable[[str], None]
"""Called with one short line about the work that begins."""


def cache_folder() -> Path:
    """`$SLIPSTREAM_CACHE`, else `$XDG_CACHE_HOME/slipstream`, else `~/.cache/slipstream`."""
    if own := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "slipstream"
    return Path.home() / ".cache" / "slipstream"


def models_folder() -> Path:
    """The folder of converted models, one folder each. Names that start with a dot are under construction."""
    return cache_folder() / "models"


def build_once(folder: Path, build: Callable[[Path], Path]) -> Path:
    """Return `folder`, which must lie in the cache; build it first if it does not exist.

    `build(work)` may use the folder `work` and returns the folder inside it that becomes `folder`. After a failure
    nothing of it remains. Other processes that want the same folder wait.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock") as alone:
            if folder.is_dir():  # another process built it
                return folder
            if alone:  # left by a process that died
                for stale in folder.parent.glob(f".{folder.name}.work-*"):
                    shutil.rmtree(stale, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.work-", dir=folder.parent))
            try:
                _move(build(work), folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise DownloadError(
            f"cannot write to the cache {folder.parent}: {error}. Make room there, or set SLIPSTREAM_CACHE to a folder "
            "that you may write to"
        ) from error
    return folder


def _move(built: Path, folder: Path) -> None:
    # without the sync, a power cut could keep the name and lose the data
    for file in built.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    try:
        built.rename(folder)
    except OSError:
        if not folder.is_dir():  # without locks another process may have been faster
            raise


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """Hold `file`'s lock. Yields False on systems without such locks: there the last rename wins."""
    if sys.platform == "win32":
        yield False
    else:
        import fcntl

        with file.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)  # released by the system when the process ends
            yield True
