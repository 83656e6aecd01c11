"""Rules: what is refused by name, what is put in order, and a state that follows and goes back like a fresh one."""

from __future__ import annotations

import builtins
import json
import re
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from conftest import EOS, VOCAB, save_tokenizer
from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.constrain import matcher
from slipstream.constrain.compiler import Grammars
from slipstream.constrain.disjoint import disjoint
from slipstream.constrain.matcher import Constraint, mask_words
from slipstream.constrain.patterns import MAX_JSON_WEIGHT, MAX_WEIGHT, check_pattern, dotless
from slipstream.constrain.schema import MAX_NESTING, MAX_PROPERTIES, MAX_SUBSCHEMAS, lawful_schema
from slipstream.core.draft import ROOT, Tree
from slipstream.core.errors import InvalidRequest
from structured_scenes import SCHEMAS

WORDS = mask_words(VOCAB)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Grammars(AutoTokenizer.from_pretrained(folder), VOCAB, [EOS])


def start(grammars: Grammars, **form: Any) -> Constraint:
    return grammars.constraint(StructuredOutputsParams(**form))


def allowed(constraint: Constraint, tree: Tree | None = None) -> list[set[int]]:
    """The tokens that may follow the root, then each node."""
    tree = tree or Tree()
    masks = torch.full((1 + len(tree), WORDS), 123, dtype=torch.int32)
    constraint.masks(tree, masks, 0)
    return [{t for t in range(VOCAB) if (int(row[t // 32]) >> (t % 32)) & 1} for row in masks]


def tokens_of(text: str) -> list[int]:
    """One token a byte, by the alphabet of the tiny tokenizer."""
    return [TABLE[byte] for byte in text.encode()]


def _table() -> list[int]:
    from tokenizers import pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ids = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return [ids[char] for _, char in sorted(bytes_to_unicode().items())]


TABLE = _table()


class TestSchemas:
    @pytest.mark.parametrize("name", SCHEMAS)
    def test_what_the_scenes_ask_for_can_be_followed(self, name: str, grammars: Grammars) -> None:
        start(grammars, json=SCHEMAS[name])

    @pytest.mark.parametrize(
        ("schema", "message"),
        [
            ({"not": {"type": "string"}}, "'not' cannot be followed"),
            ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
            ({"if": {}, "then": {}}, "'if'"),
            ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
            ({"properties": {"a": {"type": "string", "nullable": True}}}, "#/properties/a: 'nullable'"),
            ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf of several"),
            ({"type": "integer", "anyOf": [{"minimum": 3}]}, "'anyOf' beside 'type'"),
            ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {}}}, "'.ref' beside 'minimum'"),
            ({"$ref": "https://elsewhere/schema"}, "place in this document"),
            ({"$ref": "#anchor"}, "place in this document"),
            ({"$ref": "#/$defs/gone"}, "cannot be followed"),
            ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "nothing tells schemas 0 and 1 apart"),
            ({"type": "string", "pattern": "^a$", "maxLength": 3}, "together cannot be followed"),
            ({"type": "string", "format": "zip"}, "format"),
            ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
            ({"type": "string", "pattern": 'a"b'}, "a quote"),
            ({"type": "string", "pattern": r"a\\b"}, "escape must be"),
            ({"type": "string", "pattern": r"\x22"}, "escape must be"),
            ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
            ({"type": "integer", "multipleOf": 5000}, "multipleOf"),
            ({"minLength": 3, "minimum": 4}, "without a type"),
            ({"type": "colour"}, "must be one or some of"),
            ({"type": "string", "enum": ["a", 1]}, "1 is not of type"),
            ({"enum": []}, "one at least"),
            ({"enum": list(range(3000))}, "at most 2000"),
            ({"type": "object", "required": ["z"], "additionalProperties": False}, "'z' is required"),
            ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^a": {}}}, "beside named properties"),
            ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "may overlap"),
            ({"type": "object", "additionalProperties": True, "minProperties": 2}, "cannot be counted"),
            ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum greater than maximum"),
            ({"properties": ["a"]}, "must be an object"),
            ({"type": "object", "properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}, "more than"),
            ({"prefixItems": [{"type": "null"}] * (MAX_SUBSCHEMAS + 1)}, "more than"),
        ],
    )
    def test_what_would_be_ignored_is_refused(self, schema: Any, message: str, grammars: Grammars) -> None:
        with pytest.raises(InvalidRequest, match=message):
            start(grammars, json=schema)

    def test_nesting_has_a_limit(self) -> None:
        schema: Any = {"type": "null"}
        for _ in range(MAX_NESTING + 1):
            schema = {"type": "array", "items": schema}
        with pytest.raises(InvalidRequest, match="nested"):
            lawful_schema(json.dumps(schema))
        with pytest.raises(InvalidRequest, match="no JSON"):
            lawful_schema('{"items":' * 50_000)

    def test_patterns_and_lengths_together_have_a_limit(self) -> None:
        words = [{"type": "string", "pattern": f"^[a-{end}]{{1,200}}$"} for end in "xyz"]
        lawful_schema(json.dumps({"properties": dict.fromkeys("abcdefgh", words[0])}))  # equal ones share their work
        with pytest.raises(InvalidRequest, match="too dear together"):
            lawful_schema(json.dumps({"properties": dict(zip("abc", words, strict=True))}))
        lengths = [{"type": "string", "minLength": n, "maxLength": 1000 + n} for n in range(5)]
        with pytest.raises(InvalidRequest, match="too dear together"):
            lawful_schema(json.dumps({"prefixItems": lengths}))
        with pytest.raises(InvalidRequest, match="minLength -1"):
            lawful_schema('{"minLength": -1}')

    def test_no_text_at_all(self, grammars: Grammars) -> None:
        with pytest.raises(InvalidRequest, match="no text at all"):
            start(grammars, json={"$ref": "#"})

    def test_what_is_required_is_described(self) -> None:
        schema = {"required": ["x"], "additionalProperties": {"type": "null"}}
        made = lawful_schema(json.dumps(schema))
        assert made == {**schema, "type": "object", "properties": {"x": {"type": "null"}}}

    @pytest.mark.parametrize(
        ("one", "other", "apart"),
        [
            ({"type": "string"}, {"type": "null"}, True),
            ({"type": "integer"}, {"type": "number"}, False),
            ({"const": 1}, {"const": 1.0}, False),
            ({"enum": [1, 2]}, {"enum": [3, True]}, True),
            ({"type": "object"}, {"type": "object"}, False),
            ({}, {"type": "null"}, False),
            ({"$ref": "#/$defs/n"}, {"type": "string"}, True),
            ({"$ref": "#/$defs/loop"}, {"type": "string"}, False),
        ],
    )
    def test_schemas_that_cannot_both_fit(self, one: Any, other: Any, apart: bool) -> None:
        document = {"$defs": {"n": {"type": "null"}, "loop": {"$ref": "#/$defs/loop"}}}
        assert disjoint(one, other, document) is apart
        assert disjoint(other, one, document) is apart


class TestPatterns:
    @pytest.mark.parametrize(
        "pattern", ["a+b*c?", "^[a-z]{1,20}$", "(a|b){3}", "(?:x[^y]*)+?", r"\d{4}-\d\d", "[{}()*]+"]
    )
    def test_usual_ones_are_taken(self, pattern: str) -> None:
        assert 0 < check_pattern("regex", pattern) < 100
        check_pattern("pattern", pattern, in_json=True)

    @pytest.mark.parametrize("pattern", ["((a{1,30}){1,30}){1,30}", f"a{{{MAX_WEIGHT + 1}}}", "(a{40}){40}b{500}"])
    def test_dear_ones_are_refused(self, pattern: str) -> None:
        with pytest.raises(InvalidRequest, match="too dear"):
            check_pattern("regex", pattern)

    def test_in_json_they_may_weigh_less(self) -> None:
        assert check_pattern("regex", "a{1000}") == 1000
        with pytest.raises(InvalidRequest, match=f"more than {MAX_JSON_WEIGHT}"):
            check_pattern("pattern", "a{1000}", in_json=True)

    @pytest.mark.parametrize("pattern", ["a^b", "a$b", "(?i)a", "(?P<n>a)", "(?!a)b", "a{x}", "a{"])
    def test_what_would_be_left_out_is_refused(self, pattern: str) -> None:
        with pytest.raises(InvalidRequest, match="at character"):
            check_pattern("regex", pattern)

    def test_a_dot_is_no_end_of_a_line(self) -> None:
        assert dotless("regex", r"a.b\.[.]") == r"a[^\n\r]b\.[.]"

    @pytest.mark.parametrize("bad", ["(", "[z-a]", r"\1", "a**", r"\b"])
    def test_what_the_compiler_refuses_is_said_in_its_words(self, bad: str, grammars: Grammars) -> None:
        with pytest.raises(InvalidRequest, match="regex cannot be followed: ") as caught:
            start(grammars, regex=bad)
        assert ".cc" not in str(caught.value)
        with pytest.raises(InvalidRequest, match="grammar cannot be followed"):
            start(grammars, grammar="root ::= nobody")


class TestState:
    def test_masks_along_a_tree(self, grammars: Grammars) -> None:
        a, b, c = tokens_of("abc")
        constraint = start(grammars, regex="a(b|c)a|bb")
        tree = Tree((a, b, c, b, a, c), (ROOT, 0, 0, ROOT, 2, ROOT))  # a, ab, ac, b, aca, and c: forbidden
        assert allowed(constraint, tree)[:6] == [{a, b}, {b, c}, {a}, {a}, {b}, {EOS}]
        assert len(allowed(constraint, tree)[6]) == 32 * WORDS - (32 * WORDS - VOCAB)  # nobody gets there
        assert constraint.legal(tree) == [True] * 5 + [False]
        assert allowed(constraint) == [{a, b}]  # as before

    def test_an_end_has_nothing_below_it(self, grammars: Grammars) -> None:
        (a,) = tokens_of("a")
        constraint = start(grammars, regex="a")
        tree = Tree((a, EOS, a), (ROOT, 0, 1))
        assert constraint.legal(tree) == [True, True, False]
        assert allowed(constraint, tree)[:2] == [{a}, {EOS}]

    def test_what_is_forced(self, grammars: Grammars) -> None:
        constraint = start(grammars, json={"properties": {"name": {"enum": ["x", "y"]}}, "required": ["name"]})
        assert constraint.forced(99) == tokens_of('{"name": "')
        assert constraint.forced(3) == tokens_of('{"n')
        constraint.advance(tokens_of('{"name": "x'), 0)
        assert constraint.forced(99) == [*tokens_of('"}'), EOS]
        assert not constraint.complete
        constraint.advance(tokens_of('{"name": "x"}'), 0)
        assert constraint.complete
        constraint.advance([*tokens_of('{"name": "x"}'), EOS, 3], 0)  # what a round gave beyond the end
        assert constraint.failure is None
        assert constraint.forced(9) == []

    def test_half_a_character_is_forced_too(self, grammars: Grammars) -> None:
        first, second = tokens_of("é")
        constraint = start(grammars, regex="(é|a)b?")
        constraint.advance([7, 7, first], 2)
        assert constraint.forced(5) == [second]

    def test_a_token_against_the_grammar_is_a_failure(self, grammars: Grammars) -> None:
        constraint = start(grammars, regex="ab")
        constraint.advance(tokens_of("b"), 0)
        assert "against the grammar" in str(constraint.failure)
        assert allowed(constraint) == [set()]
        assert constraint.forced(4) == []
        assert constraint.legal(Tree.chain(tokens_of("ab"))) == [False, False]

    def test_control_characters_are_never_allowed_in_json(self, grammars: Grammars) -> None:
        constraint = start(grammars, json={"type": "string", "maxLength": 3})
        constraint.advance(tokens_of('"'), 0)
        following = allowed(constraint)[0]
        assert following.isdisjoint(TABLE[:32])
        assert TABLE[ord("x")] in following

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_it_follows_and_goes_back_like_a_fresh_one(self, grammars: Grammars, data: st.DataObject) -> None:
        """Any tokens, trees of any shape in between: the state is that of one who only heard the committed tokens."""
        name = data.draw(st.sampled_from(sorted(SCHEMAS)))
        constraint = start(grammars, json=SCHEMAS[name])
        said: list[int] = [1, 2]  # a prompt, which is not looked at
        for _ in range(data.draw(st.integers(1, 6))):
            tree = data.draw(trees(said, constraint))
            masks = allowed(constraint, tree)
            fresh = start(grammars, json=SCHEMAS[name])
            fresh.advance(said, 2)
            assert masks[0] == allowed(fresh)[0]
            legal = constraint.legal(tree)
            for node in range(len(tree)):
                path = path_of(tree, node)
                alone = start(grammars, json=SCHEMAS[name])
                alone.advance([*said, *path], 2)
                assert legal[node] == (alone.failure is None and EOS not in path[:-1])
                if legal[node] and path[-1] != EOS:
                    assert masks[1 + node] == allowed(alone)[0]
            accepted = [node for node in range(len(tree)) if legal[node] and EOS not in path_of(tree, node)]
            said += path_of(tree, data.draw(st.sampled_from(accepted))) if accepted else []
            constraint.advance(said, 2)


@st.composite
def trees(draw: st.DrawFn, said: list[int], constraint: Constraint) -> Tree:
    """Nodes that the grammar likes at the root, what it forces, and anything."""
    likely = sorted(allowed(constraint)[0])[:20] + constraint.forced(4)
    tokens: list[int] = []
    parents: list[int] = []
    seen: set[tuple[int, int]] = set()
    for token in constraint.forced(draw(st.integers(0, 5))):
        parents.append(len(tokens) - 1)
        tokens.append(token)
        seen.add((parents[-1], token))
    for _ in range(draw(st.integers(0, 6))):
        parent = draw(st.integers(-1, len(tokens) - 1))
        token = draw(st.sampled_from([*likely, EOS, *tokens_of('"}],0a')]) | st.integers(0, VOCAB - 1))
        if (parent, token) not in seen:
            seen.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return Tree(tuple(tokens), tuple(parents))


def path_of(tree: Tree, node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]


@pytest.mark.parametrize("name", ["number bounds", "integer bounds", "multiples", "several types"])
def test_numbers_are_bounded_as_the_schema_says(name: str, grammars: Grammars) -> None:
    """Texts near the bounds: what is taken is valid."""
    schema = SCHEMAS[name]
    inner = next(iter(schema["properties"].values())) if "properties" in schema else schema
    taken = 0
    texts = [f"{n / 100:g}" for n in range(-700, 11000, 7)] + [f"{n / 4}" for n in range(-30, 80)] + ["1e1", "null"]
    texts += map(str, range(-20, 120))
    for text in texts:
        constraint = start(grammars, json=inner)
        constraint.advance(tokens_of(text), 0)
        if constraint.failure is None and constraint.complete:
            jsonschema.validate(json.loads(text), inner)
            taken += 1
    assert taken > 5


def test_a_grammar_that_takes_too_long_ends_its_answer(open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm: LLM = open_llm(drafter="ngram")
    monkeypatch.setattr(matcher, "GRACE_S", -1.0)
    params = [SamplingParams(structured_outputs=StructuredOutputsParams(regex="a{20}")), SamplingParams(max_tokens=5)]
    slow, other = (output.outputs[0] for output in llm.generate([[1], [2]], params))
    assert slow.finish_reason == "error"
    assert "too ambiguous" in str(slow.error)
    assert len(other.token_ids) == 5 or other.finish_reason == "stop"


def test_a_large_draft_is_not_what_ends_an_answer(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond a mask is slow but allowed: not too much only because there are many nodes, but fewer next time."""
    constraint = start(grammars, regex="a{900}")
    clock = iter(range(10**6))
    monkeypatch.setattr("time.thread_time", lambda: 0.032 * next(clock))  # a walk of 32 masks
    out = torch.zeros((32, WORDS), dtype=torch.int32)
    assert constraint.most_nodes == 63
    for _ in range(40):
        constraint.masks(Tree.chain(tokens_of("a" * 31)), out, 0)
    assert constraint.failure is None
    assert constraint.most_nodes == 5


def test_a_small_draft_does_not_save_a_slow_grammar(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = start(grammars, regex="a{900}")
    clock = iter(range(10**6))
    monkeypatch.setattr("time.thread_time", lambda: 0.02 * next(clock))
    out = torch.zeros((1, WORDS), dtype=torch.int32)
    constraint.masks(Tree(), out, 0)
    assert (constraint.failure, constraint.most_nodes) == (None, 0)
    for _ in range(40):
        constraint.masks(Tree(), out, 0)
    assert "too ambiguous" in str(constraint.failure)


def test_special_tokens_in_drafts_are_refused_quietly(grammars: Grammars, capfd: pytest.CaptureFixture[str]) -> None:
    constraint = start(grammars, regex="ab")
    assert constraint.legal(Tree.chain([290])) == [False]
    assert constraint.failure is None
    assert capfd.readouterr() == ("", "")


def test_without_the_package_the_error_names_the_extra(open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm: LLM = open_llm()
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "xgrammar":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InvalidRequest, match=re.escape("slipstream-llm[grammar]")):
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    assert llm.generate("a", SamplingParams(max_tokens=2))[0].finished


def test_compiled_rules_are_kept_up_to_a_limit(grammars: Grammars) -> None:
    form = StructuredOutputsParams(json={"properties": {f"p{i}": {"type": "string"} for i in range(100)}})
    grammars.constraint(form)
    compiler = grammars._compiler()
    size = compiler.get_cache_size_bytes()
    grammars.constraint(form)
    assert compiler.get_cache_size_bytes() == size > 0
    assert 0 < compiler.cache_limit_bytes < 1 << 30


def test_a_matcher_that_raises_while_it_looks_ahead_ends_its_answer(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is not where the text is any more: what it allowed from there on would be wrong."""
    constraint = start(grammars, regex="aab|aac")

    def broken() -> None:
        raise RuntimeError("a bug in there")

    monkeypatch.setattr(constraint, "_only_token", broken)
    assert constraint.forced(5) == []
    assert "a bug in there" in str(constraint.failure)
    assert allowed(constraint) == [set()]


def test_a_matcher_that_raises_ends_its_answer(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = start(grammars, regex="ab")

    def broken(*_: object) -> None:
        raise RuntimeError("a bug in there")

    monkeypatch.setattr(constraint, "_accept", broken)
    assert constraint.legal(Tree.chain(tokens_of("a"))) == [False]
    assert "a bug in there" in str(constraint.failure)
    assert allowed(constraint) == [set()]
