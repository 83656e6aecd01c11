"""Answers of a given form under speculation: always valid, and the tokens of plain decoding, whoever drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from conftest import save_model, tiny_llama
from medusa_checkpoints import tiny_medusa
from queueing import Echo
from scripted import Answers, Bushy
from slipstream import LLM, CompletionOutput, SamplingParams, SpeculationParams, StructuredOutputsParams
from structured_scenes import SCHEMAS, Nonsense, Unlawful

MOST = 400


DRAFTERS = (
    "grammar",
    "ngram",
    "unlawful",
    "nonsense",
    "bushy",
    "model",
    "echo",
    "medusa",
    "lookahead",
    "ngram+model",
)


@dataclass(frozen=True)
class Case:
    name: str
    prompt: list[int]
    params: SamplingParams


def cases(temperature: float) -> list[Case]:
    """Every schema; some may have white space wherever JSON does."""
    listed = []
    for number, (name, schema) in enumerate(SCHEMAS.items()):
        form = StructuredOutputsParams(json=schema, disable_any_whitespace=number % 12 != 0)
        seed = number + round(1000 * temperature)
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=MOST, structured_outputs=form)
        listed.append(Case(name, [5, 6, number % 250, 7], params))
    return listed


@dataclass(frozen=True)
class Bench:
    llm: LLM
    cases: list[Case]
    plain: list[CompletionOutput]

    def speculate(self, drafter: str) -> list[CompletionOutput]:
        asked = SpeculationParams(drafter=drafter)
        return answers(self.llm, [replace(c, params=replace(c.params, speculation=asked)) for c in self.cases])


def answers(llm: LLM, asked: Sequence[Case]) -> list[CompletionOutput]:
    outputs = llm.generate([case.prompt for case in asked], [case.params for case in asked])
    return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("structured") / "target", tiny_llama(max_position_embeddings=1024))


@pytest.fixture(scope="module", params=["eager", "queued"])
def engine(
    request: pytest.FixtureRequest, target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, Answers]]:
    known = Answers()
    heads = tiny_medusa(tmp_path_factory.mktemp("heads"))
    drafters: list[Any] = ["ngram", "suffix", "lookahead", f"model:{tiny_draft}", f"medusa:{heads}", Echo()]
    drafters += [Unlawful(known), Nonsense(known), Bushy(known)]
    with LLM(target, device="cpu", drafter=drafters, rounds=request.param, planner="fixed", memory="64MiB") as llm:
        yield llm, known
        assert llm.engine.pool.free_pages == llm.engine.pool.num_pages


@pytest.fixture(scope="module")
def bench(engine: tuple[LLM, Answers]) -> Bench:
    llm, known = engine
    listed = [*cases(0.0), *cases(1.0)]
    off = SpeculationParams(enabled=False)
    plain = answers(llm, [replace(case, params=replace(case.params, speculation=off)) for case in listed])
    for case, answer in zip(listed, plain, strict=True):
        known.tell(case.prompt, case.params.seed, answer.token_ids)
    return Bench(llm, listed, plain)


def test_every_answer_is_valid_and_there_are_many_kinds(bench: Bench) -> None:
    assert len(SCHEMAS) >= 30
    for case, answer in zip(bench.cases, bench.plain, strict=True):
        assert answer.error is None
        assert answer.finish_reason == "stop", (case.name, answer.text)
        jsonschema.validate(json.loads(answer.text), SCHEMAS[case.name])
    assert sum(answer.speculation.drafted for answer in bench.plain) == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_same_tokens_whoever_drafts(bench: Bench, drafter: str) -> None:
    got = bench.speculate(drafter)
    for case, expected, answer in zip(bench.cases, bench.plain, got, strict=True):
        assert answer.token_ids == expected.token_ids, case.name
        assert answer.text == expected.text
        assert answer.finish_reason == "stop"
    forced = [answer.speculation.by_drafter.get("grammar") for answer in got]
    assert sum(one.accepted for one in forced if one) > 100
    # one token a byte: the text is certain, and so are its tokens
    assert all(one.accepted == one.drafted and not one.failures for one in forced if one)
    rounds = sum(answer.speculation.rounds for answer in got)
    assert rounds < 0.8 * sum(len(answer.token_ids) for answer in got)


def test_what_is_against_the_grammar_is_not_verified(bench: Bench) -> None:
    """Nearly all of this drafter's guesses are cut before the pass: hardly any row is spent on them."""
    got = bench.speculate("nonsense")
    theirs = [answer.speculation.by_drafter.get("nonsense") for answer in got]
    rounds = sum(answer.speculation.rounds for answer in got)
    assert sum(one.drafted for one in theirs if one) < 0.5 * rounds


@pytest.fixture
def llm(engine: tuple[LLM, Answers]) -> LLM:
    return engine[0]


def tagged(schema: str, **format: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": SCHEMAS[schema]}
    tags = [{"type": "tag", "begin": f"k{name}(", "content": content, "end": ")"} for name in ("go", "stop")]
    return {"structural_tag": {"type": "structural_tag", "format": {"tags": tags, **format}}}


FORMS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"regex": r"[a-c]{2,5}(x|y+)\d"}, lambda text: True),
    ({"regex": "^(GET|POST) /[a-z]{1,8}( HTTP/1\\.[01])?$"}, lambda text: True),
    (
        {"choice": ["red", "green", "greenish", 'de "luxe"\n']},
        lambda t: t in ("red", "green", "greenish", 'de "luxe"\n'),
    ),
    (
        {"grammar": 'root ::= "a" [0-9]{1,3} "é" tail\ntail ::= "" | "-" root'},
        lambda t: t.count("a") == t.count("é") > 0,
    ),
    (
        tagged("flat", type="tags_with_separator", separator="; ", at_least_one=True, stop_after_first=True),
        lambda t: re.fullmatch(r'k(go|stop)\({"name": "[^"\x00-\x1f]*", "age": \d+}\)', t) is not None,
    ),
]


@pytest.mark.parametrize(("form", "right"), FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_forms(llm: LLM, form: dict[str, Any], right: Callable[[str], bool], temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=200, structured_outputs=StructuredOutputsParams(**form)
    )
    off = replace(params, speculation=SpeculationParams(enabled=False))
    plain, drafted = (llm.generate([[9, 8, 7]], p)[0].outputs[0] for p in (off, params))
    assert drafted.token_ids == plain.token_ids
    assert plain.finish_reason == "stop"
    assert right(plain.text), plain.text
    if "regex" in form:
        assert re.fullmatch(form["regex"], plain.text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_free_text_goes_on_until_a_call_begins_and_then_its_schema_holds(llm: LLM, temperature: float) -> None:
    form = StructuredOutputsParams(
        **tagged("any of objects", type="triggered_tags", triggers=["k"], stop_after_first=True)
    )
    (trigger,) = llm.tokenizer.encode("k", add_special_tokens=False)
    said = set()
    for seed in range(4):
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=400, logit_bias={trigger: 3.0}, structured_outputs=form
        )
        off = replace(params, speculation=SpeculationParams(enabled=False))
        plain, drafted = (llm.generate([[9, 8, 7]], p)[0].outputs[0] for p in (off, params))
        assert drafted.token_ids == plain.token_ids
        before, _, call = plain.text.partition("k")
        said.add(before)
        if plain.finish_reason == "stop" and call:
            jsonschema.validate(json.loads(call.partition("(")[2].removesuffix(")")), SCHEMAS["any of objects"])
            assert call.startswith(("go(", "stop("))
    assert temperature == 0 or any(said), "free text came first"


def test_a_batch_of_both_kinds(llm: LLM) -> None:
    """Requests without a form choose as they do alone, beside others with one; some join late."""
    form = StructuredOutputsParams(json=SCHEMAS["an invoice"])
    free = [SamplingParams(temperature=1.0, seed=i, max_tokens=60, ignore_eos=True) for i in range(6)]
    bound = [SamplingParams(temperature=1.0, seed=50 + i, max_tokens=MOST, structured_outputs=form) for i in range(6)]
    prompts = [[3, i] for i in range(12)]
    alone = [
        llm.generate([prompt], p)[0].outputs[0].token_ids for prompt, p in zip(prompts, [*free, *bound], strict=True)
    ]
    mixed = [part for pair in zip(range(6), range(6, 12), strict=True) for part in pair]
    together = llm.generate([prompts[i] for i in mixed], [[*free, *bound][i] for i in mixed])
    assert [output.outputs[0].token_ids for output in together] == [alone[i] for i in mixed]


def test_several_answers_of_one_request(llm: LLM) -> None:
    form = StructuredOutputsParams(json=SCHEMAS["flat"])
    output = llm.generate([[1, 2]], SamplingParams(n=4, seed=1, max_tokens=MOST, structured_outputs=form))[0]
    assert len({answer.text for answer in output.outputs}) > 1
    for answer in output.outputs:
        jsonschema.validate(json.loads(answer.text), SCHEMAS["flat"])


def test_rejection_sampling_keeps_the_form(llm: LLM) -> None:
    asked = SpeculationParams(drafter="model+ngram", verifier="rejection")
    for seed in range(2):
        form = StructuredOutputsParams(json=SCHEMAS["an invoice"])
        params = SamplingParams(seed=seed, max_tokens=MOST, structured_outputs=form, speculation=asked)
        answer = llm.generate([[4, 4]], params)[0].outputs[0]
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), SCHEMAS["an invoice"])


def test_log_probabilities_are_the_raw_model_s(llm: LLM) -> None:
    params = SamplingParams(
        seed=1, max_tokens=50, logprobs=2, structured_outputs=StructuredOutputsParams(regex="[ab]{9}")
    )
    answer = llm.generate([[4, 4]], params)[0].outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == 10
    ranks = [entry[token].rank for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert max(ranks) > 3  # the model itself would have said something else


def test_limits_and_stops_cut_it_short(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="a{50}b")
    cut = llm.generate([[4]], SamplingParams(max_tokens=7, structured_outputs=form))[0].outputs[0]
    assert (cut.text, cut.finish_reason) == ("a" * 7, "length")
    stopped = llm.generate([[4]], SamplingParams(max_tokens=99, stop="aaa", structured_outputs=form))[0].outputs[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")


def test_an_end_is_not_chosen_before_the_form_is_complete(llm: LLM) -> None:
    """Even where the caller wants nothing more than an end."""
    params = SamplingParams(logit_bias={257: 100.0}, structured_outputs=StructuredOutputsParams(regex="a{5}"))
    answer = llm.generate([[4]], params)[0].outputs[0]
    assert (answer.text, answer.token_ids[-1], answer.finish_reason) == ("aaaaa", 257, "stop")


def test_a_special_stop_token_ends_a_complete_form(llm: LLM) -> None:
    params = SamplingParams(stop_token_ids=[258], logit_bias={258: 100.0}, structured_outputs={"regex": "ab"})  # type: ignore[arg-type]
    answer = llm.generate([[4]], params)[0].outputs[0]
    assert (answer.token_ids[-1], answer.stop_reason, answer.finish_reason) == (258, 258, "stop")
    assert answer.text == "ab"


def test_what_is_masked_altogether_ends_with_an_error_and_others_go_on(llm: LLM) -> None:
    bad = SamplingParams(bad_words=["b"], structured_outputs=StructuredOutputsParams(regex="aab"))
    good = SamplingParams(structured_outputs=StructuredOutputsParams(regex="aab"))
    first, second = (output.outputs[0] for output in llm.generate([[4], [4]], [bad, good]))
    assert first.finish_reason == "error"
    assert "no token is left that the form and the other parameters allow" in str(first.error)
    assert second.text == "aab"


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_a_preempted_answer_goes_on_where_it_was(target: Path, rounds: Any) -> None:
    """Pages for hardly more than one of three: they take turns, and come out as they do alone."""
    form = StructuredOutputsParams(json=SCHEMAS["an invoice"])
    params = [SamplingParams(seed=i, max_tokens=MOST, structured_outputs=form) for i in range(3)]
    with LLM(target, device="cpu", memory="64MiB", planner="fixed", rounds=rounds) as llm:
        alone = [llm.generate([[i]], p)[0].outputs[0].token_ids for i, p in enumerate(params)]
        room = max(map(len, alone)) // llm.engine.config.page_size + 3
        held = llm.between_rounds(lambda engine: engine.pool.allocate(engine.pool.free_pages - room))
        got = llm.generate([[i] for i in range(3)], params)
        assert [output.outputs[0].token_ids for output in got] == alone
        assert llm.engine.scheduler.preemptions > 0
        llm.between_rounds(lambda engine: engine.pool.release(held))


COUNTRY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "capital": {"type": "string", "maxLength": 20},
        "population_in_millions": {"type": "integer", "minimum": 0, "maximum": 2000},
        "continent": {"enum": ["Europe", "Asia", "Africa", "North America", "South America", "Oceania"]},
        "is_member_of_the_united_nations": {"type": "boolean"},
    },
    "required": ["name", "capital", "population_in_millions", "continent", "is_member_of_the_united_nations"],
}


ASKED = f"Describe France as a JSON object with the keys {', '.join(COUNTRY['required'])}."


@pytest.fixture(scope="module")
def default_llm() -> Iterator[LLM]:
    with LLM(
        "default", drafter="ngram", device="cpu", memory="256MiB", max_model_len=512, planner="fixed"
    ) as default_llm:
        yield default_llm


@pytest.mark.slow
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_of_a_schema(default_llm: LLM, temperature: float, free: bool) -> None:
    form = StructuredOutputsParams(json=COUNTRY, disable_any_whitespace=not free)
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=200, structured_outputs=form)
    asked = default_llm.chat_prompt([{"role": "user", "content": ASKED}])
    plain = default_llm.generate([asked], replace(params, speculation=SpeculationParams(enabled=False)))[0].outputs[0]
    drafted = default_llm.generate([asked], params)[0].outputs[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish_reason == "stop"
    jsonschema.validate(json.loads(drafted.text), COUNTRY)
    forced = drafted.speculation.by_drafter["grammar"]
    assert forced.alpha > 0.5
    assert drafted.speculation.tau > (1.1 if free else 2)
