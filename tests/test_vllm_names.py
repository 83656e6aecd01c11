"""vLLM's habits: every name of its command line, its `LLM`, its `SamplingParams` and its `speculative_config`."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from slipstream import LLM, SamplingParams
from slipstream.cli import serve
from slipstream.cli.main import app, main
from slipstream.core.errors import ConfigError, InvalidRequest
from slipstream.core.vllm_names import ENGINE, SAMPLING, SERVER, SPECULATION, Row, from_vllm, from_vllm_flags

PEOPLE_USE = [
    "--max-model-len",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--gpu-memory-utilization",
    "--dtype",
    "--served-model-name",
    "--api-key",
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--seed",
    "--tensor-parallel-size",
    "--quantization",
    "--enable-lora",
    "--reasoning-parser",
    "--tool-call-parser",
    "--enable-auto-tool-choice",
    "--chat-template",
    "--trust-remote-code",
    "--generation-config",
    "--disable-log-requests",
    "--kv-cache-dtype",
    "--swap-space",
    "--enforce-eager",
    "--host",
    "--port",
    "--pipeline-parallel-size",
    "--speculative-config",
    "--revision",
    "--tokenizer",
    "--load-format",
    "--download-dir",
    "--block-size",
    "--disable-log-stats",
    "--uvicorn-log-level",
    "--limit-mm-per-prompt",
    "--lora-modules",
    "--max-loras",
    "--hf-overrides",
    "--rope-scaling",
    "--override-generation-config",
    "--guided-decoding-backend",
    "--response-role",
    "--root-path",
    "--ssl-keyfile",
]
SPECULATION_KEYS = [
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "disable_by_batch_size",
    "draft_tensor_parallel_size",
    "max_model_len",
    "quantization",
    "revision",
]
EXAMPLES: Mapping[str, Any] = {
    "max_model_len": "4k",
    "kv_cache_memory_bytes": "1G",
    "gpu_memory_utilization": 0.5,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "port": 0,
    "num_speculative_tokens": 3,
    "speculative_config": '{"method": "ngram"}',
    "tool_call_parser": "hermes",
    "dtype": "half",
}
"""Values that are right where it matters; others are `x`, which no row takes for what happens anyway."""


def shown(row: Row, name: str) -> tuple[list[str], Any]:
    """One use of a row: on the command line, and as a value."""
    flag = f"--{name.replace('_', '-')}"
    if row.values == 0:
        on = "true" not in row.accepted
        return [flag if on else f"--no-{flag[2:]}"], on
    value = EXAMPLES.get(name, "x")
    return [flag, str(value)], value


def test_the_table_has_what_people_use() -> None:
    assert {flag[2:].replace("-", "_") for flag in PEOPLE_USE} <= ENGINE.keys() | SERVER.keys()
    assert set(SPECULATION_KEYS) <= SPECULATION.keys()


@pytest.fixture(scope="module")
def known() -> set[str]:
    """What `slipstream serve` takes itself."""
    command: Any = get_command(app)
    return {opt for one in command.commands["serve"].params for opt in (*one.opts, *one.secondary_opts)}


@pytest.mark.parametrize("name", sorted({**SERVER, **ENGINE}))
def test_each_option_of_vllm_serve(name: str, known: set[str]) -> None:
    """Passed on under a name that `slipstream serve` has, answered in one line, or refused in one."""
    row, said = {**SERVER, **ENGINE}[name], list[str]()
    words, _ = shown(row, name)
    if row.refused:
        with pytest.raises(ConfigError) as refused:
            from_vllm_flags(words, said.append)
        assert str(refused.value) == f"{' '.join(words)}: {row.hint}"
    elif row.to is None:
        assert from_vllm_flags(["MODEL", *words, "--host", "h"], said.append) == ["MODEL", "--host=h"]
        assert said == [f"{' '.join(words)} has no effect: {row.hint}"]
    else:
        (passed,) = from_vllm_flags(words, said.append)
        assert passed.partition("=")[0] in known
        assert said == []
    for fine in row.accepted if row.values else ():
        assert from_vllm_flags([words[0], fine], print) == [], "what happens anyway passes in silence"


@pytest.mark.parametrize("name", sorted(ENGINE))
def test_each_argument_of_vllms_llm(name: str) -> None:
    row = ENGINE[name]
    _, value = shown(row, name)
    told: list[str] = []
    if row.refused:
        with pytest.raises(ConfigError, match=f"^{name}="):
            row.taken(name, value, f"{name}={value!r}", told.append)
        return
    found = row.taken(name, value, f"{name}={value!r}", told.append)
    assert set(found) <= set(inspect.signature(LLM.__init__).parameters)
    assert bool(found) is (row.to is not None)
    assert bool(told) is (row.to is None)


@pytest.mark.parametrize("name", sorted(SPECULATION))
def test_each_key_of_a_speculative_config(name: str) -> None:
    row, said = SPECULATION[name], list[str]()
    config = {"method": "ngram", name: EXAMPLES.get(name, "x")} if name != "method" else {"method": "suffix"}
    if row.refused:
        with pytest.raises(ConfigError, match=f"^speculative_config: {name}='x': "):
            from_vllm(config, said.append)
        return
    named = from_vllm(config, said.append)
    assert named.drafter == ("suffix" if name == "method" else "ngram")
    assert said == (
        [] if row.to is not None else [f"speculative_config: {name}={config[name]!r} has no effect: {row.hint}"]
    )


@pytest.mark.parametrize(
    ("config", "drafter"),
    [
        ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": None}, "ngram"),
        ({"model": "[ngram]"}, "ngram"),
        ({"model": "some/small", "draft_tensor_parallel_size": 1}, "model:some/small"),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}, "eagle3:yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        ({"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}, "eagle:yuhuili/EAGLE-LLaMA3-Instruct-8B"),
        ({"method": "qwen3_next_mtp"}, "mtp"),
        ({"method": "suffix", "num_speculative_tokens": "5", "revision": "main"}, "suffix"),
    ],
)
def test_speculative_configs_as_people_write_them(config: dict[str, Any], drafter: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_vllm(config).drafter == drafter
        assert from_vllm(config).draft_tokens == (5 if "num_speculative_tokens" in config else None)


@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_each_argument_of_vllms_sampling_params(name: str) -> None:
    row, some, nothing = SAMPLING[name], dict[str, Any]({name: "x"}), dict[str, Any]({name: None})
    if row.refused:
        with pytest.raises(InvalidRequest, match=f"^{name}='x': "):
            SamplingParams(**some)
    else:
        with pytest.warns(UserWarning, match=f"^{name}='x' has no effect: "):
            assert SamplingParams(**some, seed=1) == SamplingParams(seed=1)
    assert SamplingParams(**nothing, top_k=3) == SamplingParams(top_k=3)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `slipstream serve` would have opened its engine and its server with."""
    found: dict[str, Any] = {"tokenizer": SimpleNamespace()}

    @contextmanager
    def hosted(common: Any, drafters: Any, **more: Any) -> Iterator[Any]:
        found.update(common=common, drafters=drafters, **more)
        yield SimpleNamespace(tokenizer=found["tokenizer"], expect_forms=lambda: None)

    def http_server(llm: Any, settings: Any) -> Any:
        found["settings"] = settings
        return SimpleNamespace(url="http://here", serve_forever=lambda: None)

    monkeypatch.setattr(serve, "hosted", hosted)
    monkeypatch.setattr("slipstream.serve.server.HttpServer", http_server)
    monkeypatch.setattr("slipstream.serve.telemetry.log_to_stderr", lambda form: None)
    return found


def test_a_command_line_of_vllms(
    opened: dict[str, Any], capsys: pytest.CaptureFixture[str], tiny_target: Path, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *("serve", str(tiny_target), "--max_num_seqs", "4", "--max-model-len", "8k", "--dtype", "float"),
                *("--gpu-memory-utilization", "0.85", "--swap-space=4", "-tp", "1", "--enable-auto-tool-choice"),
                *("--max-num-batched-tokens", "1k", "--chat-template", str(template), "--enforce-eager"),
                *("--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "5"),
                *("--no-enable-prefix-caching", "--tool-call-parser", "hermes", "--api-key", "k1", "k2"),
                *("--served-model-name", "a", "b", "--seed", "-1"),
            ]
        )
    assert ended.value.code in (0, None)
    common, settings = opened["common"], opened["settings"]
    assert common.model == str(tiny_target)
    assert (common.dtype, common.drafter) == ("float32", ["ngram"])
    assert common.engine == {
        "max_model_len": 8000,
        "memory": "85%",
        "graphs": False,
        "prefix_caching": False,
        "draft_tokens": 5,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1000,
    }
    assert (settings.models, settings.tool_format, len(settings.keys)) == (("a", "b"), "hermes", 2)
    assert opened["tokenizer"].chat_template == "{{ messages }}"
    noted = capsys.readouterr().err
    assert "--swap-space 4 has no effect" in noted
    assert "--seed -1 has no effect" in noted
    assert noted.count("has no effect") == 2


@pytest.mark.parametrize(
    ("words", "variables", "keys"),
    [
        ("", {"VLLM_API_KEY": "a=b="}, ["a=b="]),
        ("--api-key given", {"VLLM_API_KEY": "vllms"}, ["given"]),
        ("", {"VLLM_API_KEY": "one", "SLIPSTREAM_API_KEY": "two,ann=three"}, ["one", "two", "three"]),
        ("--api-key one --api-key one", {"SLIPSTREAM_API_KEY": "one"}, ["one"]),
    ],
)
def test_api_keys_also_come_from_variables_and_count_once(
    opened: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tiny_target: Path,
    words: str,
    variables: dict[str, str],
    keys: list[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["serve", str(tiny_target), *words.split()])
    assert [key.digest for key in opened["settings"].keys] == [hashlib.sha256(key.encode()).digest() for key in keys]


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        ("MODEL --api-key a b", "MODEL --api-key=a --api-key=b"),
        ("--api-key a b --model m", "--api-key=a --api-key=b --model m"),
        ("--api-key a MODEL", "--api-key=a MODEL"),
        ("--port 1 --unknown x", "--port=1 --unknown x"),
        ("MODEL --revision main --tokenizer-revision=main", "MODEL"),
        ("MODEL --tokenizer MODEL", "MODEL"),
        ("--tokenizer=m --model m", "--model m"),
    ],
)
def test_command_lines_become_ours(words: str, passed: str) -> None:
    """A model is never taken for a key, and what asks for what happens anyway passes in silence."""
    told: list[str] = []
    assert (from_vllm_flags(words.split(), told.append), told) == (passed.split(), [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-O3", "-O 3"),
        ("-O.level=3", '--compilation-config {"level": 3}'),
        ("-cc.mode 3 -cc.cudagraph-mode FULL", '--compilation-config {"mode": 3, "cudagraph_mode": "FULL"}'),
    ],
)
def test_levels_of_compilation_have_no_effect(words: str, said: str) -> None:
    told: list[str] = []
    assert from_vllm_flags(["MODEL", *words.split()], told.append) == ["MODEL"]
    assert told == [f"{said} has no effect: kernels are chosen for the device"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("somewhere --model elsewhere", "somewhere --model elsewhere: both name the model; give one of them"),
        ("--memory 2GiB --gpu-memory-utilization 0.9", "is vLLM's name of --memory; give one of them"),
        ("one --tokenizer another", "--tokenizer another: a model comes with its tokenizer"),
        ("--revision v2", "--revision v2: take a copy of that revision"),
        ("--gpu-memory-utilization 2", "must be a part above 0 and up to 1, such as 0.9"),
        ("--max-model-len long", "--max-model-len long: must be a number of tokens such as 8192 or 8k"),
        ("-tp 2", "-tp 2: a model runs on one device"),
        ("--chat-template no/such/file", "--chat-template no/such/file: there is no file"),
    ],
)
def test_what_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words.split()])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_library_takes_vllms_arguments(open_llm: Callable[..., LLM], tiny_target: Path) -> None:
    with pytest.warns(UserWarning, match="swap_space=4 has no effect: "):
        llm = open_llm(
            swap_space=4, enforce_eager=True, max_model_len="auto", tensor_parallel_size=1, tokenizer=tiny_target
        )
    assert llm.engine.config.graphs is False
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: a model runs on one device"):
        open_llm(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="gpu_memory_utilization is vLLM's name of memory: give one of them"):
        open_llm(memory="64MiB", gpu_memory_utilization=0.5)
    with pytest.raises(ConfigError, match="is vLLM's name of memory: give one of them"):
        open_llm(memory=None, gpu_memory_utilization=0.5, kv_cache_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match="tokenizer='another': a model comes with its tokenizer"):
        open_llm(tokenizer="another")
    with pytest.raises(TypeError, match="drafer"):
        open_llm(drafer="ngram")


def test_memory_as_a_part(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.memory.available_bytes", lambda device: 2_000_000)
    plans = [open_llm(memory=None, gpu_memory_utilization=part).memory_plan for part in (0.5, 0.8)]
    assert [plan.cache_bytes + plan.workspace_bytes for plan in plans] <= [1_000_000, 1_600_000]
    assert plans[0].num_pages < plans[1].num_pages
