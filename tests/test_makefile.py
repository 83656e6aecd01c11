"""Setting up: which torch is installed, by machine and by the indexes that pip reaches."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_INDEX = "https://download.pytorch.org/whl/cpu"
_PYTHON = """#!/bin/sh
# Every Python of the set-up, base and environment: writes down what pip is asked for.
echo "$@" >> "$LOG"
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"index versions"*) [ "$PIP_EXTRA_INDEX_URL" = "$INDEX" ] && exit "$UNREACHED" ;;
esac
"""


@pytest.mark.parametrize(
    ("machine", "gpu", "reached", "cpu_index"),
    [
        ("Linux x86_64", False, True, True),
        ("Linux x86_64", False, False, False),
        ("Linux x86_64", True, True, False),
        ("Linux aarch64", False, True, True),
        ("Darwin arm64", False, True, False),
    ],
)
def test_torch_for_cpus_where_there_is_no_gpu(
    tmp_path: Path, machine: str, gpu: bool, reached: bool, cpu_index: bool
) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    made = {"python3.11": _PYTHON, "uname": f"#!/bin/sh\necho {machine.split()[0]}\n"}
    for name, text in {**made, **({"nvidia-smi": "#!/bin/sh\n"} if gpu else {})}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for name in ("mkdir", "cp", "touch", "sh", "bash", "env"):
        if (found := shutil.which(name)) is not None:
            (programs / name).symlink_to(found)
    log = tmp_path / "log"
    known = {"PATH": str(programs), "LOG": str(log), "INDEX": _INDEX, "UNREACHED": "0" if reached else "1"}
    make = shutil.which("make")
    assert make is not None
    done = subprocess.run([make, ".venv/.base"], cwd=tmp_path, env=known, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (install,) = [line for line in log.read_text().splitlines() if line.endswith(" torch") and "install" in line]
    assert (f"--extra-index-url {_INDEX}" in install) is cpu_index
    assert ("for CPUs" in done.stdout) is (cpu_index or machine.startswith("Darwin"))
