"""How commands start: help and refusals before torch is imported, what is said meanwhile, and readers that leave."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from fake_llm import FakeLLM
from slipstream import LLM
from slipstream.cli import loading, options
from slipstream.cli.main import main
from slipstream.core.errors import ConfigError
from slipstream.drafters import drafter_names


def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import sys\nfrom slipstream.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as e: print('code', e.code or 0)\n"
        "print('heavy', sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    for arguments in (
        ["--help"],
        ["generate", "--help"],
        ["chat", "--help"],
        ["serve", "--help"],
        ["bench", "--help"],
        ["audit", "--help"],
        ["train", "--help"],
        ["--version"],
    ):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert "code 0" in done.stdout
        assert "heavy []" in done.stdout, arguments


def test_an_interruption_before_the_commands_are_there_is_one_word() -> None:
    code = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'slipstream.cli.main': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from slipstream.cli.entry import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("code", [130, 1, 0])
def test_an_interrupted_command_leaves_without_waiting_for_anybody_and_closes_before(code: int) -> None:
    """What holds Python up when it goes away stands for threads that C++ would abort for."""
    script = (
        "import atexit, os, sys, types\n"
        "class Held:\n"
        "    def __del__(self): os.write(1, b'held up\\n')\n"
        "def run():\n"
        "    atexit.register(print, 'closed')\n"
        f"    sys.exit({code})\n"
        "sys.modules['slipstream.cli.main'] = types.SimpleNamespace(main=run)\n"
        "held = Held()\n"
        "from slipstream.cli.entry import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout.splitlines() == ["closed"] + ["held up"] * (code != 130)


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_interruption_that_a_library_made_something_else_of_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interrupted: bool
) -> None:
    def run(**_: Any) -> None:
        try:
            raise KeyboardInterrupt if interrupted else ValueError
        except BaseException as error:
            raise ModuleNotFoundError("Could not import module 'X'") from error

    monkeypatch.setattr("slipstream.cli.main.app", run)
    with pytest.raises(SystemExit if interrupted else ModuleNotFoundError) as ended:
        main([])
    if interrupted:
        assert isinstance(ended.value, SystemExit)
        assert ended.value.code == 130
        assert capsys.readouterr().err == "interrupted\n"


def test_bad_values_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """In one fresh process, each as a user would meet it: torch and transformers take seconds to import."""
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "broken.gguf").write_text("no GGUF either")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.json").write_text("{")
    (tmp_path / "bad.json").write_text('{"properties": {"a": {"not": {}}}}')
    (tmp_path / "no-keys").write_text("# nobody yet\n")
    (tmp_path / "bad-keys").write_text("ann=good\nbob=a secret\n")
    expected = {
        "generate Hi --drafter bogus": (2, "drafter 'bogus' is unknown"),
        "generate Hi --memory lots": (2, "error: --memory lots: must be a part such as 0.2 or 20%, or a size such"),
        "chat --dtype int8": (
            2,
            "error: --dtype int8: must be auto or one of float32, fp32, bfloat16, bf16, float16, fp16",
        ),
        "generate Hi --device cuda:x": (2, "error: --device cuda:x: must be auto, cpu, cuda or cuda:N"),
        "serve --temperature 1": (2, "--temperature: not for serve"),
        "serve --speculative-config {": (2, "is not JSON"),
        "serve --tool-call-parser bogus": (2, "error: --tool-call-parser bogus: must be one of auto, hermes, llama3"),
        "serve --request-timeout -1": (2, "error: --request-timeout -1.0: must be above 0"),
        'serve --speculative-config {"method":"eagle3","model":"/nope"}': (
            2,
            """error: --speculative-config {"method":"eagle3","model":"/nope"}: --drafter eagle3:/nope: '/nope': no""",
        ),
        "generate Hi --regex a{": (2, "error: --regex a{: at character 1 it has a brace"),
        "generate Hi --json-schema bad.json": (2, "error: --json-schema bad.json: at #/properties/a: 'not' cannot be"),
        "generate Hi --json-schema torn.json": (2, "error: --json-schema torn.json is no JSON: Expecting"),
        "serve --api-key =": (2, "API key: must be printable ASCII"),
        "serve --api-keys no-keys": (2, "error: --api-keys no-keys: has no key"),
        "serve --api-keys bad-keys": (2, "error: --api-keys bad-keys: line 2: API key: must be printable ASCII"),
        "train eagle3": (2, "--out: name the folder of the run"),
        "train medusa --out o": (2, "there is nothing to learn from"),
        "generate Hi --model /nope": (2, "'/nope': no such folder or file"),
        "bench --drafter model:/nope": (
            2,
            "error: --drafter model:/nope: '/nope': no such folder or file. Give NAME:PATH",
        ),
        "generate Hi --drafter eagle4": (
            2,
            "error: --drafter: drafter 'eagle4' is unknown: must be one of auto, draft",
        ),
        "chat --model notes.txt": (2, "notes.txt: a file, but not a .gguf one"),
        "bench --model broken.gguf": (2, "broken.gguf: not a GGUF file"),
        "generate Hi --model org/name": (2, "'org/name': no such folder or file here"),  # after asking the (unset) hub
    }
    code = (
        "import json, sys\nfrom slipstream.cli.main import main\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    try: main(line.split())\n"
        "    except SystemExit as e: print('code', e.code or 0, file=sys.stderr)\n"
        "sys.exit(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(list(expected))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = [part for part in re.split(r"code (\d)\n", done.stderr) if part]
    said = zip(errors[1::2], errors[::2], strict=True)
    for (arguments, (code_wanted, message)), (got, text) in zip(expected.items(), said, strict=True):
        assert message in " ".join(text.split()), arguments
        assert int(got) == code_wanted, arguments


def test_help_shows_what_to_give_and_nothing_odd(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main([*arguments, "--help"])
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "200")
    for command in ("generate", "chat", "bench", "audit", "models", ""):
        text = shown(*command.split())
        assert "<" not in text.replace("<=", ""), command
        assert "--debug" in text
    text = " ".join(shown("generate").replace("│", " ").split())  # lines break wherever they like
    for taught in ("none: no drafts", "such as 512MiB", "cuda:1", "such as 0.9", "Give it where other programs need"):
        assert taught in text
    assert [name for name in drafter_names() if f"{name}:" not in text.replace(":PATH", ":")] == []


@pytest.mark.parametrize("command", ["generate", "serve", "train", "tune"])
def test_help_is_readable_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 80
    texts = [line[26:] for line in lines if line.startswith("  ") and line[24:26] == "  "]
    assert len(texts) > 10
    assert sorted(map(len, texts))[len(texts) // 2] > 30, "lines of a few words are no text"
    for line in lines:
        if line.startswith("  -"):
            assert not line.rstrip().endswith("-"), "a name is never broken"


def test_a_reader_that_leaves_is_no_error() -> None:
    """As `| head` does: quiet, whether it leaves in the middle of a stream or before the JSON."""
    code = (
        "import sys, fake_llm\nfrom slipstream.cli import loading\nfrom slipstream.cli.main import main\n"
        "loading.open_llm = lambda *_, **__: fake_llm.FakeLLM()\n"
        "fake_llm.WORDS[:] = ['x' * 100_000] * 4\n"
        "main(sys.argv[1:])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))}
    for arguments in (["generate", "Hi"], ["generate", "Hi", "--json"]):
        command = [sys.executable, "-c", code, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.read(1)
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 1


def test_what_is_fetched_is_said_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: dict[str, Any] = {}

    def resolve(name: str, progress: Any, *, trust_remote_code: bool, ways: str) -> Path:
        progress(f"fetching {name}, code {trust_remote_code}")
        return tmp_path / name

    class Engine(FakeLLM):
        def __init__(self, model: str, **settings: Any) -> None:
            super().__init__()
            made.update(settings, model=model)

    monkeypatch.setattr(loading, "resolve", resolve)
    monkeypatch.setattr("slipstream.engine.llm.LLM", Engine)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: made.update(asked=count))
    common = options.Common(model="default", drafter=["model:org/small"], trust_remote_code=True, threads=3)
    with loading.loaded(common, common.drafters):
        pass
    assert capsys.readouterr().err == "fetching default, code True\nfetching org/small, code True\n"
    assert (made["model"], made["drafter"]) == (str(tmp_path / "default"), [f"model:{tmp_path / 'org/small'}"])
    assert made["asked"] == 3


def test_what_takes_long_at_a_first_start_is_said_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Engine(FakeLLM):
        def __init__(self, model: str, **settings: Any) -> None:
            super().__init__()
            for done in ("loading small", "compiling for this CPU (once)", "capturing a round of 4 requests"):
                settings["on_progress"](done)

    monkeypatch.setattr(loading, "resolve", lambda *_, **__: tmp_path)
    monkeypatch.setattr("slipstream.engine.llm.LLM", Engine)
    with loading.loaded(options.Common(), ()):
        pass
    assert capsys.readouterr().err == "compiling for this CPU (once)\n"


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "slipstream", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"slipstream {slipstream.__version__}\n"


def test_help_lists_only_what_is_taken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for refused in ("--temperature", "--top-p", "--top-k", "--min-p", "--seed", "--max-tokens", "--verifier"):
        assert f"{refused} " not in text, refused
    for taken in ("--drafter", "--planner", "--enable-prefix-caching", "--no-enable-prefix-caching", "--max-queue"):
        assert taken in text, taken


@pytest.mark.parametrize(
    ("asked", "usual", "wanted"), [(None, {}, None), (None, {"prefix_caching": False}, False), (True, {}, True)]
)
def test_prefix_caching_by_vllms_name(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, usual: dict[str, bool], wanted: bool | None
) -> None:
    """bench is without it unless it is asked for."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(loading, "resolve", lambda *_, **__: Path("somewhere"))
    monkeypatch.setattr("slipstream.engine.llm.LLM", lambda model, **settings: made.update(settings))
    loading.open_llm(
        options.Common(engine={} if asked is None else {"prefix_caching": asked}), (), print, None, **usual
    )
    assert made.get("prefix_caching") is wanted
    loading.open_llm(options.Common(engine={"prefix_caching": True}), (), print, None, prefix_caching=False)
    assert made["prefix_caching"] is True


def test_prefix_caching_in_the_library(open_llm: Callable[..., LLM]) -> None:
    assert open_llm(enable_prefix_caching=False).engine.config.prefix_caching is False
    assert open_llm(enable_prefix_caching=True).engine.config.prefix_caching is True
    with pytest.raises(ConfigError, match="give one of them"):
        open_llm(prefix_caching=False, enable_prefix_caching=True)
