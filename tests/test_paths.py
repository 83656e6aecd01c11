"""The cache: where it is, and folders that appear whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slipstream.core.errors import DownloadError
from slipstream.models import paths
from slipstream.models.paths import build_once, cache_folder


def remains(folder: Path) -> list[str]:
    """What is left there, but for locks."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "slipstream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "slipstream"


def test_build_once_builds_once_for_all_who_ask(tmp_path: Path) -> None:
    builds, both_ready = [], threading.Barrier(2)

    def build(work: Path) -> Path:
        builds.append(work)
        (work / "model").mkdir()
        (work / "model" / "file").write_text("whole")
        return work / "model"

    def ask() -> None:
        both_ready.wait()
        build_once(tmp_path / "m", build)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert (tmp_path / "m" / "file").read_text() == "whole"
    assert remains(tmp_path) == ["m"]


def test_a_killed_build_leaves_nothing_visible_and_is_cleaned_up(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "m"
    program = (
        "import os, sys, pathlib; from slipstream.models.paths import build_once\n"
        "def build(work): (work / 'half').write_text('x'); os._exit(9)\n"
        "build_once(pathlib.Path(sys.argv[1]), build)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(paths.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", program, str(folder)], env=environment, check=False).returncode == 9
    assert not folder.exists()
    assert [name for name in remains(folder.parent) if name.startswith(".m.work-")]

    def build(work: Path) -> Path:
        (work / "model").mkdir()
        return work / "model"

    build_once(folder, build)
    assert remains(folder.parent) == ["m"]


def test_an_unwritable_cache_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match="SLIPSTREAM_CACHE"):
        build_once(tmp_path / "file" / "m", lambda work: work)
