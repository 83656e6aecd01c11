"""The command line on a stand-in engine: what it prints, where, with which exit code, and what it refuses."""

from __future__ import annotations

import io
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

import slipstream
from fake_llm import FakeLLM, Ran, Run
from slipstream.bench import memory
from slipstream.bench.run import EngineRunner
from slipstream.cli import loading, models, options
from slipstream.cli.flags import flagged, naming_memory_flags
from slipstream.cli.main import app, main
from slipstream.cli.measuring import StopOnInterrupt
from slipstream.cli.show import rate_line, speculation_json
from slipstream.core.errors import CapacityError, DownloadError, InvalidRequest, ModelNotFound, SlipstreamError
from slipstream.core.outputs import DrafterStats, RequestOutput, SpeculationStats
from slipstream.core.params import SETTINGS, SamplingParams


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()

    def open_llm(common: options.Common, drafters: Any, on_fetch: Any, on_load: Any, **more: Any) -> FakeLLM:
        fake.made_with = {"common": common, "drafters": tuple(drafters), **more}
        return fake

    monkeypatch.setattr(loading, "open_llm", open_llm)
    return fake


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*arguments: str, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return Ran(ended.value.code if isinstance(ended.value.code, int) else 0, captured.out, captured.err)

    return call


def test_generate_streams_text_to_stdout_and_the_summary_to_stderr(run: Run, llm: FakeLLM) -> None:
    done = run("generate", "Hi", "--system", "Be kind.")
    assert (done.code, done.out) == (0, "Hello to you\n")
    assert "4 tokens · 2.0 tok/s · 2.00 tokens per round · 2 of 3 guesses stood (ngram)" in done.err
    assert llm.chats == [[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]]
    assert llm.closed
    prompt, params = llm.asked[0]
    assert isinstance(prompt, list)
    assert params.greedy
    assert params.max_tokens == 256
    assert llm.made_with["drafters"] == ("auto",)


def test_generate_json_is_one_object(run: Run, llm: FakeLLM) -> None:
    done = run("generate", "Hi", "--json", "--logprobs", "1", "--seed", "7")
    assert done.out.count("\n") == 1
    assert done.json == {
        "model": "default",
        "seed": 7,
        "text": "Hello to you\n",
        "token_ids": [0, 1, 2, 3],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        "timing": {"queued_s": 0.0, "first_token_s": 0.5, "total_s": 2.0, "tokens_per_s": 2.0},
        "speculation": {
            "rounds": 2,
            "drafted": 3,
            "accepted": 2,
            "alpha": 0.6667,
            "tau": 2.0,
            "expected_gain": None,
            "measured_gain": None,
            "why": "on: 2 of 3 guesses stood, 2.00 tokens a pass",
            "plan": {},
            "by_drafter": {"ngram": {"drafts": 2, "drafted": 3, "accepted": 2, "failures": 0, "declined": 0}},
            "time_s": {"draft": 0.1, "verify": 0.2, "host": 0.3},
        },
        "logprobs": done.json["logprobs"],
    }
    assert done.json["logprobs"][1] == {
        "token_id": 1,
        "token": " to",
        "logprob": -0.5,
        "rank": 1,
        "top": [
            {"token_id": 1, "token": " to", "logprob": -0.5, "rank": 1},
            {"token_id": 99, "token": "?", "logprob": -2.0, "rank": 2},
        ],
    }


def test_generate_several_answers(run: Run, llm: FakeLLM) -> None:
    done = run("generate", "Hi", "--json", "--n", "3", "--temperature", "0.8")
    assert [choice["index"] for choice in done.json["choices"]] == [0, 1, 2]
    assert done.json["usage"]["completion_tokens"] == 12
    assert isinstance(done.json["seed"], int), "a drawn seed is shown, so that the answer can be had again"
    assert llm.asked[0][1].seed == done.json["seed"]
    assert "--- answer 2 of 3\nHello to you" in run("generate", "Hi", "--n", "3").out


def test_generate_passes_every_option_on(run: Run, llm: FakeLLM, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("print(1)\n")
    arguments = (
        "generate - --raw --model org/name --drafter ngram --drafter model:small --draft-tokens 4 --verifier rejection "
        "--temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 3 --max-tokens 9 --stop END --stop ### "
        "--presence-penalty 1 --frequency-penalty 0.5 --repetition-penalty 1.1 --dtype bfloat16 --device cpu "
        f"--memory 1GiB --max-model-len 100 --trust-remote-code --prediction {tmp_path / 'old.py'}"
    )
    assert run(*arguments.split(), stdin="some text").code == 0
    prompt, params = llm.asked[0]
    assert prompt == "some text"
    assert replace(params, output_kind="cumulative") == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=3,
        max_tokens=9,
        stop=("END", "###"),
        presence_penalty=1,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        prediction="print(1)\n",
        speculation=slipstream.SpeculationParams(draft_tokens=4, verifier="rejection"),
    )
    common = llm.made_with["common"]
    assert llm.made_with["drafters"] == ("ngram", "model:small")
    assert (common.model, common.dtype, common.device) == ("org/name", "bfloat16", "cpu")
    assert (common.engine, common.trust_remote_code) == (
        {"memory": "1GiB", "max_model_len": 100, "draft_tokens": 4},
        True,
    )


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_each_setting_with_a_placeholder_is_an_option(command: str) -> None:
    commands: Any = get_command(app)
    known = {name: one for one in commands.commands[command].params for name in one.opts}
    for name, setting in SETTINGS.items():
        if setting.metavar:
            option = known[f"--{name.replace('_', '-')}"]
            assert option.help.startswith(setting.help) or (command, name) == ("bench", "temperature")


def test_generate_an_answer_of_a_form(run: Run, llm: FakeLLM, tmp_path: Path) -> None:
    schema = '{"type": "object"}'
    (tmp_path / "schema.json").write_text(schema)
    assert run("generate", "Hi", "--json-schema", str(tmp_path / "schema.json")).code == 0
    assert run("generate", "Hi", "--regex", "a+").code == 0
    assert [params.structured_outputs for _, params in llm.asked] == [
        slipstream.StructuredOutputsParams(json=schema),
        slipstream.StructuredOutputsParams(regex="a+"),
    ]


def test_drafts_can_be_forced(run: Run, llm: FakeLLM) -> None:
    run("generate", "Hi", "--planner", "fixed")
    assert llm.made_with["common"].planner_or("adaptive") == "fixed"
    run("generate", "Hi")
    assert llm.made_with["common"].planner_or("adaptive") == "adaptive"
    done = run("generate", "Hi", "--planner", "often")
    assert (done.code, done.err) == (2, "error: --planner often: must be one of adaptive, fixed\n")


@pytest.mark.parametrize(("declined", "rounds"), [(1, "1 round;"), (31, "31 rounds;")])
def test_nothing_drafted_says_why(declined: int, rounds: str) -> None:
    stats = SpeculationStats(rounds=40, emitted=40, by_drafter={"eagle": DrafterStats(declined=declined)})
    line = rate_line(40, 10.0, stats)
    assert "nothing drafted: guesses of eagle were not expected to pay" in line
    assert rounds in line
    assert "--min-gain says what is enough, --planner fixed" in line
    assert rate_line(40, 10.0, SpeculationStats(rounds=40, emitted=40)).endswith("nothing drafted")
    limited = SpeculationStats(rounds=40, emitted=40, plan={"suffix": "off: the request asked for 0 draft tokens"})
    assert rate_line(40, 10.0, limited).endswith("nothing drafted: the request asked for 0 draft tokens")


def test_the_json_says_what_was_decided_and_what_was_gained() -> None:
    stats = SpeculationStats(4, 10, 8, 6, expected_gain=1.81111, measured_gain=1.7, plan={"ngram": "ngram 5: 1.30x"})
    told = speculation_json(stats)
    assert told["why"] == "ngram 5: 1.30x; 6 of 8 guesses stood, 2.50 tokens a pass"
    assert (told["plan"], told["expected_gain"], told["measured_gain"]) == (stats.plan, 1.8111, 1.7)
    unmeasured = speculation_json(SpeculationStats())
    assert (unmeasured["expected_gain"], unmeasured["measured_gain"]) == (None, None)


def test_remarks_about_the_model_and_its_drafter_come_first(run: Run, llm: FakeLLM) -> None:
    llm.remarks = ("small has another vocabulary than the target: ids are mapped",)
    for done in (run("generate", "Hi"), run("generate", "Hi", "--json"), run("chat", stdin="Hi\n")):
        assert done.err.startswith("small has another vocabulary than the target: ids are mapped\n")


def test_no_speculation_loads_no_drafter(run: Run, llm: FakeLLM) -> None:
    done = run("generate", "Hi", "--no-speculation")
    assert llm.made_with["drafters"] == ()
    assert not llm.asked[0][1].speculation.enabled
    assert "1.00 tokens per round · nothing drafted" in done.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelNotFound("model 'x': no such\nfolder"), 2),
        (DownloadError("the hub\ncannot be reached"), 1),
        (InvalidRequest("the prompt is too long"), 1),
    ],
)
def test_errors_are_one_line_with_an_exit_code(run: Run, llm: FakeLLM, error: SlipstreamError, code: int) -> None:
    llm.fail = error
    done = run("generate", "Hi")
    assert (done.code, done.out) == (code, "")
    assert done.err == f"error: {' '.join(str(error).split())}\n"


def test_an_answer_that_failed_exits_1(run: Run, llm: FakeLLM) -> None:
    llm.error = "the model gave NaN"
    done = run("generate", "Hi", "--json")
    assert done.code == 1
    assert done.json["error"] == "the model gave NaN"
    assert done.err == "error: the model gave NaN\n"


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_error_itself(llm: FakeLLM, place: str) -> None:
    llm.fail = ModelNotFound("no such folder")
    with pytest.raises(ModelNotFound):
        main(["--debug", "generate", "Hi"] if place == "before" else ["generate", "Hi", "--debug"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("generate Hi --temperature -1", "--temperature -1.0: must be 0 to 1e+06"),
        ("generate Hi --raw --system x", "--raw"),
        ("generate Hi --logprobs 2", "add --json"),
        ("generate \t", "PROMPT is empty: say what to ask"),
        ("generate Hi --json-schema no/such/file", "--json-schema no/such/file: there is no file"),
        ("generate Hi --json-schema x --regex y", "an answer has one form"),
        ("bench --peers nobody", "--peers nobody: unknown; must be transformers"),
        (
            "bench --peers transformers --presence-penalty 1",
            "--presence-penalty with --peers: transformers does not get",
        ),
        ("audit --temperature 0 --presence-penalty 1", "--presence-penalty with --temperature 0: greedy is audited"),
        ("bench --drafter ngram --category poetry", "poetry: not in these prompts; they have chat, code"),
        (
            "generate Hi --drafter draft --model .",
            "drafter 'draft' without a path: weights that come with Slipstream are",
        ),
        ("generate Hi --material x --drafter ngram", "--material x: only suffix drafts from it; add --drafter suffix"),
        ("generate Hi --drafter prediction", "there is no prediction to follow; give `generate` one with --prediction"),
        ("serve --drafter prediction", "--drafter prediction: a request brings its own"),
        ("generate Hi --prediction x --no-speculation", "--prediction x with --no-speculation: nothing would guess"),
        ("bench --drafter model:a --drafter model:b", "drafter 'model' is given twice: give each once"),
        ("bench --json no/such/folder/x.json", "there is no folder"),
    ],
)
def test_bad_options_exit_2_before_anything_loads(run: Run, llm: FakeLLM, arguments: str, said: str) -> None:
    done = run(*arguments.split(" "))
    assert done.code == 2
    assert said in " ".join(done.err.split())
    assert done.out == ""
    assert llm.made_with == {}


@pytest.mark.parametrize("command", ["generate Hi --json", "bench --limit 1"])
def test_ctrl_c_says_so(run: Run, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def interrupted(*_: Any, **__: Any) -> list[RequestOutput]:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "generate", interrupted)
    done = run(*command.split())
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")
    assert llm.closed


def test_ctrl_c_stops_with_130_and_aborts_the_request(run: Run, llm: FakeLLM) -> None:
    llm.interrupt_at = 3
    done = run("generate", "Hi")
    assert (done.code, done.out, done.err) == (130, "Hello to\n", "interrupted\n")
    assert llm.aborted == 1
    assert llm.closed


def test_chat_keeps_history_and_runs_commands(run: Run, llm: FakeLLM) -> None:
    lines = ["Hi", "Again", "/reset", "New", "/speculation off", "More", "/stats", "/nonsense", "/exit", "never"]
    done = run("chat", "--system", "S", stdin="\n".join(lines))
    assert done.code == 0
    assert done.out == "Hello to you\n" * 4
    history = [[message["content"] for message in chat] for chat in llm.chats]
    said = "Hello to you\n"
    assert history == [["S", "Hi"], ["S", "Hi", said, "Again"], ["S", "New"], ["S", "New", said, "More"]]
    assert [params.speculation.enabled for _, params in llm.asked] == [True, True, True, False]
    assert "4 answers · 16 tokens · 2.0 tok/s · 1.60 tokens per round" in done.err
    assert "/nonsense: not a command" in done.err
    assert llm.closed


def test_chat_ctrl_c_stops_the_answer_not_the_program(run: Run, llm: FakeLLM) -> None:
    llm.interrupt_at = 3
    done = run("chat", stdin="Hi\nGo on\n")
    assert done.code == 0
    assert done.out == "Hello to\nHello to you\n"
    assert [message["content"] for message in llm.chats[1]] == ["Hi", "Hello to", "Go on"]
    assert llm.aborted == 1


def test_chat_goes_on_after_a_request_that_failed(run: Run, llm: FakeLLM) -> None:
    llm.fail = InvalidRequest("too long")
    done = run("chat", stdin="Hi\nAgain\n")
    assert done.code == 0
    assert done.err.count("error: too long") == 2
    assert llm.chats[1] == [{"role": "user", "content": "Again"}]


def test_chat_forgets_the_oldest_turns_when_the_context_is_full(run: Run, llm: FakeLLM) -> None:
    llm.max_model_len = 45  # ten tokens a message, five for the answer
    done = run("chat", "--max-tokens", "5", stdin="one\ntwo\nthree\n")
    assert [message["content"] for message in llm.chats[-1]] == ["two", "Hello to you\n", "three"]
    assert "its oldest turn is dropped" in done.err


def test_chat_json_is_one_line_an_answer(run: Run, llm: FakeLLM) -> None:
    done = run("chat", "--json", stdin="Hi\nAgain\n")
    assert [json.loads(line)["text"] for line in done.out.splitlines()] == ["Hello to you\n"] * 2


def test_models_lists_what_is_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    there = SimpleNamespace(
        name="default", path=Path("m"), model_type="llama", parameters=134_515_008, bytes=3 * 2**29, dtype="float32"
    )
    monkeypatch.setattr(models, "find_models", lambda: [there])
    done = run("models", "--json")
    assert json.loads(done.out) == [
        {
            "name": "default",
            "path": "m",
            "model_type": "llama",
            "parameters": 134515008,
            "bytes": 1610612736,
            "dtype": "float32",
        }
    ]
    shown = run("models").out
    assert "135M" in shown
    assert "1.5 GiB" in shown
    assert "org/name" in shown
    monkeypatch.setattr(models, "find_models", list)
    assert "No models on this machine yet." in run("models").out


def test_bench_prints_tables_and_keeps_json(run: Run, llm: FakeLLM, tmp_path: Path) -> None:
    kept = tmp_path / "bench.json"
    done = run("bench", "--limit", "3", "--max-tokens", "8", "--json", str(kept))
    assert done.code == 0
    result = json.loads(kept.read_text())
    assert len(result.pop("samples")) == 6
    assert "{" not in done.out
    assert run("bench", "--limit", "3", "--max-tokens", "8", "--json", "-").json.keys() == result.keys()
    first, second = done.out.split("By task")
    assert [line.split()[0] for line in first.splitlines()[5:7]] == ["plain", "auto"], "what is looked for comes first"
    assert "code_editing" in second
    assert result["modes"] == ["plain", "auto"]
    (cell,) = result["cells"]
    assert list(cell["categories"]) == ["chat", "code", "code_editing"]
    assert (cell["temperature"], cell["concurrency"], cell["prompts"], result["prompts"]) == (0, 1, 3, 3)
    assert result["settings"]["max_tokens"] == 8
    assert cell["all"]["auto"]["tokens"] == 12
    assert cell["all"]["auto"]["same_tokens"] == cell["all"]["auto"]["compared"] == 3
    assert cell["all"]["auto"]["tau"] == 2.0
    assert cell["differences"] == []
    assert not result["interrupted"]
    assert result["memory"]["weights_bytes"] == 2**20
    assert result["prefill"]["tokens_per_s"]["plain"] == pytest.approx(result["prefill"]["prompt_tokens"] / 0.5)
    assert {"cpu", "cores", "gpu"} <= set(result["hardware"])
    assert {"slipstream", "torch", "transformers", "python"} <= set(result["versions"])
    assert llm.made_with["max_num_seqs"] == 1
    assert {p.speculation.drafter for _, p in llm.asked} == {None, "auto"}


def broken_off(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C comes after so many answers."""
    answers, answer = itertools.count(), EngineRunner.answer

    def counted(*arguments: Any) -> Any:
        if next(answers) >= after:
            raise KeyboardInterrupt
        return answer(*arguments)

    monkeypatch.setattr(EngineRunner, "answer", counted)


def test_bench_ended_by_ctrl_c_tells_of_what_was_measured(
    run: Run, llm: FakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(monkeypatch, 2 + 2 * 2 + 1)  # to warm up, and in both modes for two prompts of three
    kept = tmp_path / "bench.json"
    done = run("bench", "--limit", "3", "--max-tokens", "8", "--startup", "--json", str(kept))
    assert done.code == 130
    whole = json.loads(kept.read_text())
    assert whole["interrupted"]
    (cell,) = whole["cells"]
    assert whole["prompts"] == cell["all"]["auto"]["prompts"] == cell["all"]["plain"]["prompts"] == 2
    assert whole["prefill"] is None
    assert "stopping: the results so far follow" in done.err
    assert "5 of 6 measurements were made, 2 of 3 prompts in all modes" in done.err
    assert len(whole["samples"]) == 4
    assert llm.closed


def test_a_second_ctrl_c_ends_all() -> None:
    stopping = StopOnInterrupt(lambda: True)
    with stopping:
        raise KeyboardInterrupt
    assert stopping.happened
    with pytest.raises(KeyboardInterrupt), stopping:
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), StopOnInterrupt(list):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="else"), StopOnInterrupt(lambda: True):
        raise ValueError("else")


def test_bench_ended_before_anything_can_be_compared_has_nothing_to_tell(
    run: Run, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(monkeypatch, 3)
    done = run("bench", "--limit", "3")
    assert (done.code, done.out) == (130, "")


@pytest.mark.parametrize(("load", "warned"), [(1000.0, True), (0.0, False)])
def test_bench_warns_of_a_busy_machine(
    run: Run, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, load: float, warned: bool
) -> None:
    monkeypatch.setattr(memory, "load_average", lambda: load)
    done = run("bench", "--limit", "1", "--drafter", "none", "--json", "-")
    assert ("warning: the machine was busy" in done.out) is warned
    assert done.json["hardware"]["busy"] is warned


def test_bench_concurrency_runs_a_category_together(run: Run, llm: FakeLLM) -> None:
    done = run("bench", "--category", "math", "--concurrency", "4", "--drafter", "none", "--json", "-")
    assert llm.made_with["max_num_seqs"] == 4
    assert done.json["modes"] == ["plain"]
    (cell,) = done.json["cells"]
    assert (cell["prompts"], cell["all"]["plain"]["prompts"]) == (6, 8), "the last batch is filled up"


def test_bench_goes_through_lists_of_temperatures_and_concurrency(run: Run, llm: FakeLLM) -> None:
    words = "--category math --limit 2 --max-tokens 8 --concurrency 1,4 -t 0,1 --seed 5 --json -"
    done = run("bench", *words.split())
    assert llm.made_with["max_num_seqs"] == 4
    cells = done.json["cells"]
    assert [(cell["temperature"], cell["concurrency"]) for cell in cells] == [(0, 1), (0, 4), (1, 1), (1, 4)]
    assert [cell["all"]["plain"]["prompts"] for cell in cells] == [2, 4, 2, 4]
    assert (done.json["prompts"], done.json["settings"]["concurrency"]) == (2, [1, 4])
    assert "auto: times plain, by task" in done.out
    assert all(len(line) <= 80 for line in done.out.partition("in all:")[0].splitlines())
    sampled = [params for _, params in llm.asked if params.temperature == 1][-8:]
    assert [params.seed for params in sampled] == [5, 6, 7, 8] * 2
    tenants = [params.speculation.tenant for _, params in llm.asked if params.speculation.drafter][-4:]
    assert tenants == [tenants[0], tenants[0], f"{tenants[0]}, copy 1", f"{tenants[0]}, copy 1"]


def test_material_goes_along_with_the_request(run: Run, llm: FakeLLM, tmp_path: Path) -> None:
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for file in files:
        file.write_text(f"in {file.stem}")
    asked = " ".join(f"--material {file}" for file in files)
    for drafter in ("--drafter ngram+suffix", "--drafter auto", ""):
        assert run(*f"generate Hi {drafter} {asked}".split()).code == 0
        assert llm.asked[-1][1].speculation.material == ("in one", "in two")


def refused(capsys: pytest.CaptureFixture[str], words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    return err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("explain --min-gain 0", "--min-gain 0: must be 1 or more, such as 1.1"),
        ("chat --min-gain abc", "--min-gain abc: must be a number, 1 or more, such as 1.1"),
        ("bench --top-k x", "--top-k x: must be a whole number, such as 40"),
        ("bench --repeats 1.5", "--repeats 1.5: must be a whole number, 1 or more, such as 3"),
        ("serve --port 99999", "--port 99999: must be 0 to 65535"),
        ("generate Hi -t warm", "--temperature warm: must be a number"),
    ],
)
def test_numbers_are_refused_as_the_library_does_it(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    assert refused(capsys, words) == f"error: {said}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "generate Hi --max-draft-memory lots",
            "--max-draft-memory lots: must be a part such as 0.2 or 20%, or a size",
        ),
        ("generate Hi --presence-penalty 9", "--presence-penalty 9.0: must be"),
        ("tune --drafters model:/nope", "--drafters model:/nope: '/nope': no such folder"),
    ],
)
def test_the_option_is_named_that_was_written(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_messages_of_no_key_stay_as_they_are() -> None:
    assert flagged("a prompt is empty: it must not be") == "a prompt is empty: it must not be"
    assert flagged("structured_outputs.json='x': must be JSON") == "structured_outputs.json='x': must be JSON"


def test_what_is_no_number_is_said_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Missing argument 'PROMPT'" in refused(capsys, "generate")
    assert "No such option" in refused(capsys, "bench --no-such")


@pytest.mark.parametrize("words", ["generate Hi"])
def test_nobody_stands_alone(capsys: pytest.CaptureFixture[str], words: str) -> None:
    said = "error: --drafter: drafter 'none': cannot be combined with other drafters; give it alone or leave it out\n"
    assert refused(capsys, f"{words} --drafter suffix --drafter none") == said


def test_where_memory_is_too_little_options_are_named(tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "Hi", "--model", str(tiny_target), "--memory", "20000", "--max-model-len", "256"]
    with pytest.raises(SystemExit):
        main(words)
    said = capsys.readouterr().err
    assert "error: --memory 20,000 bytes: a context of 256 tokens needs" in said
    assert "; give --memory " in said
    assert "memory=" not in said


def test_both_bounds_of_memory_are_named() -> None:
    with (
        pytest.raises(CapacityError, match=r"^--max-draft-memory 20: drafters keep much; --max-model-len 8 would do$"),
        naming_memory_flags(),
    ):
        raise CapacityError("max_draft_memory=20: drafters keep much; max_model_len=8 would do")


def test_what_a_page_takes_is_known_when_the_model_is_loaded(
    tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "Hi", "--model", str(tiny_target), "--memory", "2MiB", "--max-draft-memory", "4096"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "error: --max-draft-memory 4096: must be at least the bytes of a page, " in capsys.readouterr().err


def test_what_is_drawn_is_svg(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "tune --plot x.png")
    assert said == "error: --plot x.png: is drawn as SVG; name it x.svg\n"
