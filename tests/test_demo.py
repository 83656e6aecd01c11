"""The demo: both ways in turn, told honestly, and ended by whatever goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from slipstream.bench import demo
from slipstream.core.errors import ModelNotFound
from slipstream.core.outputs import CompletionOutput, RequestOutput, SpeculationStats, Timing
from slipstream.core.params import SamplingParams
from slipstream.plan.types import Curve, MeasuredCosts

DEAR = MeasuredCosts(Curve((1, 2, 4), (0.010, 0.022, 0.030)))


@dataclass
class DemoLLM:
    """Four tokens a second plainly, sixteen with speculation."""

    tokens_with: tuple[int, ...] = (1, 2, 3, 4, 5)
    text: str = "class Rectangle"
    drafted_s: float = 1.25
    costs: MeasuredCosts | None = None
    tenants: list[str] = field(default_factory=list)

    def generate(self, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
        drafts = params.speculation.enabled
        self.tenants.append(params.speculation.tenant)
        tokens = list(self.tokens_with) if drafts else [1, 2, 3, 4, 5]
        timing = Timing(0.0, 1.0, self.drafted_s if drafts else 2.0)
        stats = SpeculationStats(rounds=2, emitted=5) if drafts else SpeculationStats(rounds=5, emitted=5)
        answer = CompletionOutput(0, self.text, tokens, timing=timing, speculation=stats)
        return [RequestOutput("0", None, [1, 2, 3], [answer], True)]

    def __enter__(self) -> DemoLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("tokens", "code", "said"), [((1, 2, 3, 4, 5), 0, "yes"), ((1, 2, 9, 4, 5), 1, "NO")])
def test_demo_compares_and_exits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tokens: tuple[int, ...], code: int, said: str
) -> None:
    monkeypatch.setattr(demo, "load", lambda model, progress: DemoLLM(tokens))
    assert demo.main([]) == code
    out = capsys.readouterr().out
    assert f"same tokens: {said}" in out
    assert "4.0 tok/s" in out
    assert "16.0 tok/s" in out
    assert "4.00x" in out
    assert "tau 2.50" in out


@pytest.mark.parametrize(("text", "said"), [(demo.CODE, "right answer: yes"), ("class Rectangle", "right answer: no")])
def test_demo_says_whether_the_answer_is_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    monkeypatch.setattr(demo, "load", lambda model, progress: DemoLLM(text=text))
    assert demo.main([]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_the_default_model_gets_the_demo_right() -> None:
    with demo.load("default", lambda line: None) as llm:
        params = SamplingParams(temperature=0, max_tokens=256, stop="```")
        assert llm.generate([demo.PROMPT], params)[0].outputs[0].text.strip() == demo.CODE.strip()


def test_nobody_remembers_the_demos_answers() -> None:
    llm = DemoLLM()
    demo.compare(cast(Any, llm), 5)
    assert len(set(llm.tenants)) == len(llm.tenants) == 2 * (demo.ROUNDS + 1)


@pytest.mark.parametrize(
    ("drafted_s", "costs", "said"),
    [
        (1.25, DEAR, "so guessing pays well here"),
        (2.0, DEAR, "hardly paid here: rows are dear on this machine: a pass over two takes 2.2 times as long"),
        (2.0, None, "hardly paid here: to check several tokens takes this machine about as long as to say them"),
    ],
)
def test_demo_says_why_guessing_did_not_pay(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    drafted_s: float,
    costs: MeasuredCosts | None,
    said: str,
) -> None:
    monkeypatch.setattr(demo, "load", lambda model, progress: DemoLLM(drafted_s=drafted_s, costs=costs))
    assert demo.main([]) == 0
    assert said in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_demo_says_what_it_does_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(model: str, progress: Callable[[str], None]) -> DemoLLM:
        progress("downloading [it] (93 MB)")
        return DemoLLM()

    monkeypatch.setattr(demo, "load", load)
    assert demo.main([]) == 0
    assert capsys.readouterr().err == "downloading [it] (93 MB)\nanswering, with and without speculation\n"


def test_demo_can_be_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def load(model: str, progress: Callable[[str], None]) -> DemoLLM:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "load", load)
    assert demo.main([]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_demo_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def load(model: str, progress: object) -> DemoLLM:
        raise ModelNotFound("no network")

    monkeypatch.setattr(demo, "load", load)
    assert demo.main([]) == 1
    assert capsys.readouterr().err.strip() == "error: no network"
