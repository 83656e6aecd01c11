"""What the repository promises: commands and links of its pages exist, and it sets itself up."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import typer.main

from bench_scripts import clients
from slipstream.cli.main import app

ROOT = Path(__file__).parent.parent


BENCH = ROOT / "tools"
sys.path.append(str(BENCH))


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(BENCH.glob("*.py"))]


_FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)


_INDENTED = re.compile(r"(?:^ {4,}.*\n)+", re.MULTILINE)


_GOES_ON = re.compile(r"\\\n\s*|\n\s+(?=\[?--)")  # a line that begins with an option belongs to the one before


_SCRIPT = re.compile(r"(?:python +)?tools/(\w+)\.py\b(.*)")


_COMMAND = re.compile(r"(?:\S*/)?slipstream ([a-z]+)\b(.*)")


class Written(NamedTuple):
    program: str  # a script's path, or a command of slipstream
    options: tuple[str, ...]


def written(text: str) -> Iterator[Written]:
    """The commands in blocks, one a line, and between backticks."""
    rest = _FENCED.sub("", text)
    blocks = [*_FENCED.findall(text), *_INDENTED.findall(rest)]
    lines = [line.strip() for block in blocks for line in _GOES_ON.sub(" ", block).splitlines()]
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]
    for part in (part.strip() for line in lines for part in line.split("&&")):
        if script := _SCRIPT.match(part):
            yield Written(f"tools/{script[1]}.py", _options(script[2]))
        elif command := _COMMAND.match(part):
            yield Written(command[1], _options(command[2]))


def _options(words: str) -> tuple[str, ...]:
    """Those in brackets too; what comes behind a remark or is said to another program is left out."""
    own = re.split(r"\s#\s|\s\|\s", words.replace("[", " ").replace("]", " "))[0]
    try:
        parts = shlex.split(own)
    except ValueError:  # an apostrophe
        parts = own.split()
    return tuple(part.partition("=")[0] for part in parts if re.match(r"--[a-z]", part))


class Asked(Exception):
    """A script is about to read its options."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """By program, its options. A script is begun and stopped where it reads them."""

    def ask(self: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise Asked(self)

    commands: Any = typer.main.get_command(app)
    found = {
        name: {"--help", *(option for given in command.params for option in (*given.opts, *given.secondary_opts))}
        for name, command in commands.commands.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", ask)
        for script in sorted(BENCH.glob("*.py")):
            if "\ndef main(" in script.read_text(encoding="utf-8"):
                with pytest.raises(Asked) as asked:
                    import_module(script.stem).main()
                found[f"tools/{script.name}"] = set(asked.value.parser._option_string_actions)
    return found


def test_what_is_written_is_found() -> None:
    text = """
Run `python tools/one.py --a 1 [--b=2
--c 'x --y']` and `slipstream two`, not `--three`.

    python tools/four.py A --d FILE      # --e
                         [--f] && slipstream five --g | other --h

```bash
.venv/bin/slipstream six "isn't it" \\
    --i
```
"""
    assert set(written(text)) == {
        Written("tools/one.py", ("--a", "--b", "--c")),
        Written("two", ()),
        Written("tools/four.py", ("--d",)),
        Written("five", ("--g",)),
        Written("six", ("--i",)),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_known(page: Path, known: dict[str, set[str]]) -> None:
    for command in written(page.read_text(encoding="utf-8")):
        if command.program in known:
            assert not set(command.options) - known[command.program], command
        else:
            assert not command.options, f"{command}: there is no such command"


DOCUMENTS = [page for page in PAGES if page.suffix == ".md"]


_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


_SOURCE = re.compile(r"`((?:\w+/)+\w+\.py)`")


_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in _LINK.findall(text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
            if anchor:
                assert anchor[1:] in _anchors(page.parent / target), f"{target}{anchor}"
    for name in _SOURCE.findall(text):
        if (name.partition("/")[0]) != "path":
            assert (ROOT / name).exists() or (ROOT / "src" / "slipstream" / name).exists(), name


_NAMED = re.compile(r"`((?:\w+/)+\w+\.py):([\w.]+)`")


def test_functions_that_the_architecture_names_exist() -> None:
    """In the form `file.py:Class.method`, below src/slipstream."""
    named = _NAMED.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    for file, name in named:
        place: ast.AST = ast.parse((ROOT / "src" / "slipstream" / file).read_text(encoding="utf-8"))
        for part in name.split("."):
            found = [one for one in ast.iter_child_nodes(place) if part in _defined(one)]
            assert found, f"{file}:{name}"
            place = found[0]


def _defined(node: ast.AST) -> list[str]:
    """The names that a statement defines."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [getattr(node, "name", ""), *[one.id for one in targets if isinstance(one, ast.Name)]]


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = _HEADING.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_result_is_read_by_a_page() -> None:
    texts = "".join(page.read_text(encoding="utf-8") for page in DOCUMENTS)
    assert [file.name for file in (ROOT / "docs" / "results").iterdir() if file.name not in texts] == []


def test_no_page_installs_from_a_package_index() -> None:
    """Slipstream is on none: it installs from a clone or from a wheel."""
    texts = [*PAGES, *(ROOT / "src").rglob("*.py")]
    assert [path for path in texts if "install 'slipstream-llm" in path.read_text(encoding="utf-8")] == []


def test_pages_and_scripts_name_commands(known: dict[str, set[str]]) -> None:
    """Or nothing was looked at."""
    named = {command.program for page in PAGES for command in written(page.read_text(encoding="utf-8"))}
    assert {name for name in known if "/" in name} <= named, "every script says how it is called"
    assert named >= {"generate", "chat", "serve", "models", "bench", "audit", "train", "tune", "explain"}


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
