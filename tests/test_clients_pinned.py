"""`make clients` installs the versions that docs/clients.md was written with."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench_scripts import clients


@pytest.mark.parametrize("name", list(clients.CLIENTS))
def test_each_client_has_one_version(name: str) -> None:
    environment, package, _ = clients.CLIENTS[name]
    pins = Path(str(clients.__file__)).with_name(f"clients-{environment}.txt").read_text()
    (pinned,) = re.findall(rf"^{re.escape(package)}==(\S+)$", pins, re.MULTILINE)
    table = (clients.ROOT / "docs" / "clients.md").read_text()
    assert f"| {name} {pinned} |" in table


def test_installed_by_their_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[Any], **_: Any) -> None:
        asked.append([str(word) for word in command])
        (tmp_path / "openai2").mkdir(exist_ok=True)

    monkeypatch.setattr(clients, "HOME", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        clients.python_of("openai2")
    _, install = asked
    assert install[install.index("--constraint") + 1].endswith("clients-openai2.txt")
    assert "litellm" in install
