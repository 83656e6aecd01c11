"""The audit: it passes what is right, finds what is wrong, and says what it could not look at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from conftest import save_model, tiny_llama
from fake_llm import Ran, Run
from slipstream import LLM, SamplingParams
from slipstream.audit import equality, report
from slipstream.audit.distribution import Fit
from slipstream.audit.probe import PROBE, Probe
from slipstream.audit.report import Audit, Check, Outcome
from slipstream.audit.run import AuditConfig, audit, settings
from slipstream.audit.stage import AuditPrompt
from slipstream.cli.main import main
from slipstream.core.draft import Draft
from slipstream.core.verdict import Verdicts
from slipstream.engine import eager
from slipstream.kv.cache import Moves, compaction
from slipstream.sampling.choose import choose
from slipstream.verify import rejection
from slipstream.verify.exact import verify_exact

TEXTS = ("abcabcabcabc", "one two one two one two", "x", "to be or not to be, that is")


CONFIG = AuditConfig(("ngram",), settings(14, seed=5), at_once=3, samples=0, transformers=False)


GREEDY = replace(CONFIG, settings=CONFIG.settings[:1])


class Audited:
    """A tiny engine with its probe."""

    def __init__(self, model: Path, drafter: str = "ngram", **options: Any) -> None:
        self.probe = Probe()
        self.llm = LLM(
            model,
            **{
                "device": "cpu",
                "drafter": [drafter, self.probe],
                "planner": "fixed",
                "max_num_seqs": 4,
                "memory": "64MiB",
                **options,
            },
        )
        self.prompts = [AuditPrompt(text, tuple(self.llm.tokenizer.encode(text))) for text in TEXTS]

    def audit(self, config: AuditConfig = GREEDY, prompts: int | None = None) -> Audit:
        return audit(self.llm, self.probe, self.prompts[:prompts], config)


@pytest.fixture(scope="module")
def audited(tiny_target: Path) -> Iterator[Audited]:
    tiny = Audited(tiny_target)
    yield tiny
    tiny.llm.close()


def outcomes(result: Audit, kind: str, drafter: str | None) -> set[Outcome]:
    return {check.outcome for check in result.checks if check.kind == kind and check.drafter == drafter}


def test_what_was_not_audited_is_not_called_lossless() -> None:
    assert not Audit((), (), "").passed(), "nothing was tested"
    nothing = Audit((), ("mine",), "")
    assert not nothing.passed()
    assert nothing.verdict.startswith("Not shown: mine guessed nothing")


def test_a_whole_engine_passes_every_check(audited: Audited) -> None:
    result = audited.audit(replace(CONFIG, transformers=True))
    assert result.passed(strict=True)
    assert not result.lossless
    assert result.verdict.startswith("No difference in what was tested. Not tested: ")
    assert result.verdict.endswith("rejection sampling (left out (--samples 0)).")
    tested = tuple(check for check in result.checks if not check.untested)
    assert replace(result, checks=tested).verdict == "Lossless: every check passed."
    titles = [check.title for check in result.checks]
    for setting in ("greedy", "T=1", "T=1, top-p 0.9"):
        assert f"{setting} · plain, 3 at once" in titles
        for drafter in ("ngram", PROBE):
            assert {f"{setting} · {drafter}, alone", f"{setting} · {drafter}, 3 at once"} <= set(titles)
    assert sum("cache against a fresh prompt" in title for title in titles) == 2
    assert sum("cache against transformers" in title for title in titles) == 1
    for check in result.checks:
        assert check.same == check.compared
        if check.drafter == PROBE:  # it is accepted and rejected, in each check
            assert 0 < check.accepted < check.drafted
        if check.kind == "cache":
            assert 0 < check.figures["largest_error_of_allowed"] < 1


def test_a_check_that_cannot_be_made_is_not_passed(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.audit.run.fits_twice", lambda _: False)
    result = audited.audit(replace(GREEDY, transformers=True))
    assert not result.passed()
    assert result.verdict.startswith("Not shown: no bug was found, ")
    assert [check.title for check in result.missing] == ["cache against transformers"]


def test_rounds_that_are_queued_pass_as_well(tiny_target: Path) -> None:
    tiny = Audited(tiny_target, rounds="queued")
    try:
        assert tiny.audit(CONFIG).passed(strict=True)
    finally:
        tiny.llm.close()


def one_too_many(draft: Draft, choices: Tensor) -> Verdicts:
    """On a chain, also takes the node behind the last right one."""
    verdicts = verify_exact(draft, choices)
    if not draft.width or not draft.is_chain:
        return verdicts
    more = (verdicts.accepted + 1).minimum(draft.counts)[:, None]  # [B, 1]
    node = torch.arange(draft.width)
    tokens = torch.zeros_like(choices)
    tokens[:, : draft.width] = draft.tokens
    tokens = tokens.scatter(1, more, choices.gather(1, more))
    return Verdicts(torch.where(node < more, node, 0), more[:, 0], tokens)


def test_a_verifier_that_accepts_too_much_is_a_bug(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "verify_exact", one_too_many)
    result = audited.audit()
    assert not result.passed()
    assert result.verdict.startswith("NOT lossless")
    assert outcomes(result, "equality", PROBE) == {Outcome.BUG}
    assert outcomes(result, "equality", None) == {Outcome.PASS}
    worst = max(result.bugs, key=lambda finding: finding.excess)
    assert worst.margin is not None
    assert worst.allowed is not None
    assert worst.margin > 1000 * worst.allowed
    assert worst.expected is not None
    assert worst.got is not None
    assert worst.expected != worst.got
    assert worst.position is not None
    assert f"prompt {worst.prompt}, token {worst.position}" in report.describe(worst)
    monkeypatch.undo()
    assert audited.audit().passed(strict=True)


def test_a_cache_that_is_not_compacted_is_a_bug(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    def stay(*given: Tensor) -> Moves:
        moves = compaction(*given)
        return Moves(moves.src, moves.src)

    monkeypatch.setattr(eager, "compaction", stay)
    result = audited.audit()
    assert outcomes(result, "cache", PROBE) == {Outcome.BUG}
    check = next(c for c in result.checks if c.kind == "cache" and c.drafter == PROBE)
    assert check.figures["largest_error_of_allowed"] > 100


def noisy(size: float) -> Callable[..., Tensor]:
    """Choices by logits that are a little off, in rounds with drafts."""

    def chosen(logits: Tensor, rows: Any, *rest: Any, **more: Any) -> Tensor:
        if logits.shape[0] > 1:
            generator = torch.Generator().manual_seed(int(rows.positions.sum()))
            logits = logits + (torch.rand(logits.shape, generator=generator) * 2 - 1) * size
        return choose(logits, rows, *rest, **more)

    return chosen


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    """A model that cannot tell a token from its neighbour: all its choices are ties, which the lower id wins."""
    folder = save_model(tmp_path_factory.mktemp("models") / "twins", tiny_llama(tie_word_embeddings=False))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        head = model.get_output_embeddings().weight  # [V, H]
        head[1::2] = head[0::2]
    model.save_pretrained(folder)
    tiny = Audited(folder)
    yield tiny
    tiny.llm.close()


def test_noise_as_small_as_rounding_is_a_near_tie(twins: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    assert twins.audit().passed(strict=True)
    monkeypatch.setattr(eager, "choose", noisy(3e-6))
    result = twins.audit()
    assert outcomes(result, "equality", PROBE) == {Outcome.NEAR_TIE}
    assert len(result.near_ties) > 3
    assert not result.bugs
    assert result.passed()
    assert not result.passed(strict=True)
    assert f"but for rounding: {len(result.near_ties)} near-ties, no bug. Not tested: " in result.verdict
    for finding in result.near_ties:
        assert finding.margin is not None
        assert finding.allowed is not None
        assert finding.margin <= finding.allowed


def test_many_near_ties_are_no_bug(twins: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    twins.audit()
    monkeypatch.setattr(eager, "choose", noisy(3e-6))
    monkeypatch.setattr(equality, "MAX_FINDINGS", 1)
    result = twins.audit()
    assert max(len(check.findings) for check in result.checks) > 1
    assert result.passed()


def test_larger_noise_is_a_bug(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "choose", noisy(3.0))
    assert audited.audit().bugs


class Silent(Probe):
    """Knows the answer and says nothing."""

    def tell(self, *_: Any) -> None:
        pass


def test_a_drafter_that_guesses_nothing_proves_nothing(tiny_target: Path) -> None:
    silent = Silent()
    with LLM(tiny_target, device="cpu", drafter=[silent], planner="fixed", memory="64MiB") as llm:
        prompts = [AuditPrompt("x", (5, 6, 7))]
        result = audit(llm, silent, prompts, replace(GREEDY, drafters=(PROBE,)))
    assert outcomes(result, "equality", PROBE) == {Outcome.NOT_TESTED}
    assert not result.passed()
    assert "probe guessed nothing" in result.verdict


def test_an_answer_that_ends_elsewhere_is_a_bug(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*given: Any, **more: Any) -> Any:
        outputs = generate(*given, **more)
        for output in outputs:
            if output.outputs[0].speculation.drafted:
                del output.outputs[0].token_ids[-1]
        return outputs

    generate = audited.llm.generate
    monkeypatch.setattr(audited.llm, "generate", cut)
    result = audited.audit()
    assert any("ends sooner" in finding.why for finding in result.bugs)


def test_a_request_that_fails_is_a_bug(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(draft: Draft, choices: Tensor) -> Verdicts:
        if draft.width:
            raise RuntimeError("lost")
        return verify_exact(draft, choices)

    monkeypatch.setattr(eager, "verify_exact", fail)
    result = audited.audit()
    assert any("The request failed: the engine failed: RuntimeError: lost" in f.why for f in result.bugs)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room")])
def test_ctrl_c_or_an_error_keeps_what_is_known(
    audited: Audited, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    asked = 0

    def interrupted(*given: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 8:  # four for the reference, two for the plain batch, then the second of the n-gram drafter's
            raise error
        return generate(*given, **more)

    generate = audited.llm.generate
    monkeypatch.setattr(audited.llm, "generate", interrupted)
    result = audited.audit()
    assert (result.interrupted, result.broken) == ((True, False) if not error.args else (False, True))
    assert result.notes[-1].startswith(
        "Interrupted in stage 3" if not error.args else "MemoryError (no room) in stage 3"
    )
    assert not result.passed()
    assert [check.outcome for check in result.checks[:2]] == [Outcome.PASS, Outcome.STOPPED]
    assert result.checks[1].compared == 1
    assert {check.untested for check in result.checks[2:]} >= {"stopped before it began"}
    assert "no bug was found in the part that was done" in result.verdict


ABOUT = {"model": "tiny", "command": ["slipstream", "audit"], "versions": {"torch": "2", "python": None}}


def test_the_reports_say_the_same(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "verify_exact", one_too_many)
    result = audited.audit()
    told = json.loads(json.dumps(report.to_json(result, ABOUT)))
    text = report.to_markdown(result, ABOUT)
    assert told["verdict"] in text
    assert told["rounding"] in text
    assert (told["lossless"], told["model"], told["bugs"]) == (False, "tiny", len(result.bugs))
    assert {check["outcome"] for check in told["checks"]} == {check.outcome for check in result.checks}
    for check in result.checks:
        assert f"| {check.title} | {report.MARKS[check.outcome]}" in text
    first = next(f for check in told["checks"] for f in check["findings"] if f["got"])
    assert {"prompt", "position", "expected", "got", "margin", "allowed", "why", "outcome"} <= set(first)
    assert text.count("* **BUG**") == min(report.SHOWN, len(result.bugs))


def test_an_empty_check_is_not_tested() -> None:
    assert Check("cache", "x", None, compared=0, same=0).outcome is Outcome.NOT_TESTED


def test_own_sampling_replaces_ours() -> None:
    own = SamplingParams(temperature=0.7, top_k=5, min_p=0.1, seed=3, max_tokens=9)
    assert [setting.name for setting in settings(9, 3, own)] == ["greedy", "T=0.7, top-k 5, min-p 0.1"]


OWN = SamplingParams(temperature=0.4, seed=5, max_tokens=14)  # sharp enough that answers share their beginnings


SAMPLED = replace(CONFIG, drafters=("model",), settings=settings(14, 5, OWN), samples=384)


@pytest.fixture(scope="module")
def rejecting(tiny_target: Path, tiny_draft: Path) -> Iterator[Audited]:
    tiny = Audited(tiny_target, f"model:{tiny_draft}", max_num_seqs=8)
    yield tiny
    tiny.llm.close()


def by_title(result: Audit) -> dict[str, Outcome]:
    return {check.title: check.outcome for check in result.checks if check.kind == "distribution"}


RULES = ["rejection sampling, the rule on a chain", "rejection sampling, the rule on a tree"]


DRAWN = ["rejection sampling · model", f"rejection sampling · {PROBE}"]


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_right_rules_pass(tiny_target: Path, tiny_draft: Path, rounds: str) -> None:
    rejecting = Audited(tiny_target, f"model:{tiny_draft}", max_num_seqs=8, rounds=rounds)
    try:
        result = rejecting.audit(SAMPLED, prompts=2)
    finally:
        rejecting.llm.close()
    assert by_title(result) == dict.fromkeys(RULES + DRAWN, Outcome.PASS)
    assert result.passed()
    for check in result.checks:
        if check.kind == "distribution":
            assert check.drafted > check.accepted > 0
            assert check.compared > 500


def test_a_biased_rule_is_a_bug(rejecting: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(u: Tensor, chance: Tensor, odds: Tensor) -> Tensor:
        return u.double() * odds * 0.8 < chance

    monkeypatch.setattr(rejection, "_passes", lenient)
    result = rejecting.audit(replace(SAMPLED, samples=1), prompts=2)
    assert [by_title(result)[title] for title in RULES] == [Outcome.BUG] * 2
    assert not result.passed()


def test_an_engine_that_believes_drafts_is_a_bug(rejecting: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    def believing(
        choices: Tensor, logits: Tensor, rows: Any, row_of: Tensor, draft: Any, *rest: Any, **more: Any
    ) -> Tensor:
        """Accepts the first guess of every request with rejection sampling."""
        found = choices.clone()
        if draft.width:
            found[:, 0] = torch.where(draft.counts > 0, draft.tokens[:, 0], found[:, 0])
        return found

    monkeypatch.setattr(eager, "mixed_choices", believing)
    result = rejecting.audit(SAMPLED, prompts=2)
    assert by_title(result)[DRAWN[1]] is Outcome.BUG
    assert "do not have the model's distribution" in result.bugs[0].why


P = torch.tensor([0.5, 0.25, 0.2, 0.04, 0.01, 0.0])


def drawn(p: Tensor, count: int = 3000) -> Tensor:
    picked = torch.multinomial(p, count, replacement=True, generator=torch.Generator().manual_seed(3))
    return picked.bincount(minlength=len(p))


def test_a_fit_believes_what_was_drawn_and_nothing_else() -> None:
    fit = Fit()
    fit.add(drawn(P), P)
    assert 0.01 < fit.p_value < 1
    assert (fit.draws, fit.freedom, fit.impossible) == (3000, 4, 0)
    other = Fit()
    other.add(drawn(torch.tensor([0.42, 0.33, 0.2, 0.04, 0.01, 0.0])), P)
    assert other.p_value < 1e-10


def test_a_fit_forgives_what_slack_explains() -> None:
    p = torch.tensor([0.53, 0.22, 0.2, 0.04, 0.01, 0.0])
    strict, lax = Fit(), Fit(slack=0.2)
    strict.add(drawn(p), P)
    lax.add(drawn(p), P)
    assert strict.p_value < 0.01 < lax.p_value


def test_what_cannot_be_drawn_must_not_be() -> None:
    fit = Fit()
    fit.add(torch.tensor([500, 250, 200, 40, 10, 1]), P)
    assert fit.p_value == 0


def test_no_draws_tell_nothing() -> None:
    fit = Fit()
    fit.add(torch.tensor([1, 1, 0, 0, 0, 0]), P)
    assert (fit.freedom, fit.p_value) == (0, 1.0)


PROMPTS = [{"prompt": "abcabcabc"}, {"id": "two", "turns": ["one two one two", "never"]}]


@pytest.fixture
def run(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(prompt) for prompt in PROMPTS))

    def call(*arguments: str) -> Ran:
        small = ("--device", "cpu", "--memory", "64MiB")
        quick = ("--max-tokens", "8", "--concurrency", "2", "--samples", "64", "--no-transformers")
        with pytest.raises(SystemExit) as ended:
            main(["audit", "--model", str(tiny_target), "--prompts", str(prompts), *small, *quick, *arguments])
        captured = capsys.readouterr()
        return Ran(ended.value.code if isinstance(ended.value.code, int) else 0, captured.out, captured.err)

    return call


def test_a_lossless_engine_exits_0_and_writes_both_reports(run: Run, tmp_path: Path, tiny_draft: Path) -> None:
    drafters = ("--drafter", "ngram", "--drafter", f"draft:{tiny_draft}")
    done = run(*drafters, "--top-k", "20", "--max-tokens", "40", "--out", str(tmp_path / "new" / "folder"))
    assert done.code == 0, done.out
    told = done.json
    assert told == json.loads((tmp_path / "new" / "folder" / "audit.json").read_text())
    assert (told["passed"], told["lossless"]) == (True, False), "transformers was left out"
    assert told["not_tested"]["cache against transformers"] == "left out (--no-transformers)"
    assert "Lossless" not in told["verdict"]
    assert told["drafters"] == ["ngram", f"draft:{tiny_draft}"]
    assert told["settings"]["prompts"] == 2
    assert {"cpu", "cores", "gpu"} <= set(told["hardware"])
    assert {"slipstream", "torch", "transformers", "python"} <= set(told["versions"])
    titles = [check["title"] for check in told["checks"]]
    for title in ("greedy · ngram, alone", "greedy · draft, 2 at once", "T=1, top-k 20 · draft, alone"):
        assert title in titles
    assert next(c for c in told["checks"] if c["title"] == "greedy · draft, alone")["drafted"] > 0
    text = (tmp_path / "new" / "folder" / "audit.md").read_text()
    assert told["verdict"] in text
    assert told["verdict"] in done.out
    assert "greedy · draft, 2 at once: pass" in done.err


def test_a_bug_exits_1(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "verify_exact", one_too_many)
    done = run("--markdown", str(tmp_path / "x.md"), "--json", str(tmp_path / "x.json"), "--drafter", "none")
    assert done.code == 1
    assert "NOT lossless" in done.out
    assert "NOT lossless" in (tmp_path / "x.md").read_text()
    assert json.loads((tmp_path / "x.json").read_text())["lossless"] is False
    assert "greedy · probe, alone: bug" in done.err


def test_ctrl_c_writes_what_is_known_and_exits_130(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def interrupted(self: LLM, *given: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 5:
            raise KeyboardInterrupt
        return generate(self, *given, **more)

    generate = LLM.generate
    monkeypatch.setattr(LLM, "generate", interrupted)
    done = run("--json", str(tmp_path / "x.json"))
    assert done.code == 130
    told = json.loads((tmp_path / "x.json").read_text())
    assert told["interrupted"] is True
    assert [check["outcome"] for check in told["checks"]][:3] == ["pass", "stopped", "not tested"]
    assert any("Interrupted in stage 3 of " in note for note in told["notes"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--no-speculation", "--no-speculation: an audit is about speculation"),
        ("--verifier rejection", "--verifier rejection: an audit checks both verifiers by itself"),
        ("--json no/such/folder/x.json", "there is no folder"),
        ("--out prompts.jsonl/below", "cannot be made"),
        ("--limit 0", "--limit 0: must be 1 or more"),
        ("--drafter bogus", "drafter 'bogus' is unknown"),
        ("--concurrency 0", "--concurrency"),
        ("--top-p 3", "--top-p 3.0: must be above 0"),
        ("--prompts nowhere.jsonl", "--prompts nowhere.jsonl: there is no file"),
    ],
)
def test_bad_options_exit_2(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments.split())
    assert done.code == 2
    assert said in " ".join(done.err.split())
    assert done.out == ""


def test_prompts_that_do_not_fit_are_left_out_and_counted(run: Run) -> None:
    done = run("--drafter", "none", "--max-model-len", "24")
    assert done.json["settings"]["prompts"] == 1
    assert done.json["settings"]["skipped_prompts"] == 1
    assert run("--max-model-len", "16").code == 1


def test_temperature_0_samples_nothing(run: Run) -> None:
    done = run("--temperature", "0", "--top-p", "0.9", "--drafter", "none")
    assert done.code == 0, done.out
    titles = [check["title"] for check in done.json["checks"]]
    assert any(title.startswith("greedy") for title in titles)
    assert not [title for title in titles if "T=" in title or "rejection" in title]
    assert done.json["not_tested"]["sampled answers"] == "left out (--temperature 0)"


@pytest.mark.parametrize(
    ("arguments", "code", "title", "why"),
    [
        ("--samples 0", 0, "rejection sampling", "left out (--samples 0)"),
        ("--concurrency 1", 0, "answers in a batch", "left out (--concurrency 1)"),
        ("--limit 1", 1, "answers in a batch", "there was one prompt only; give more (--limit, --prompts)"),
        ("--samples 8", 1, "rejection sampling · probe", "no 40 answers share a beginning"),
    ],
)
def test_a_check_that_is_not_made_is_not_tested(run: Run, arguments: str, code: int, title: str, why: str) -> None:
    """What an option leaves out is named; what was asked for and could not be made fails the audit as well."""
    done = run("--drafter", "none", "--temperature", "1", *arguments.split())
    assert done.code == code, done.out
    assert done.json["not_tested"][title].startswith(why)
    assert f"{title} ({why}" in done.json["verdict"]
    assert done.json["verdict"].startswith("No difference in what was tested." if code == 0 else "Not shown")


def test_as_many_answers_are_drawn_as_were_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    generate = LLM.generate

    def counting(self: LLM, prompts: Any, params: Any = None, **more: Any) -> Any:
        drawn.extend(p.n for p in params if p.speculation.verifier == "rejection")
        return generate(self, prompts, params, **more)

    monkeypatch.setattr(LLM, "generate", counting)
    assert run("--samples", "7", "--concurrency", "3", "--drafter", "none").code == 1
    assert drawn == [3, 3, 1], "of the probe, three at a time: too few to test"
