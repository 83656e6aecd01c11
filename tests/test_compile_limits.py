"""Forms of strangers: bounded before they are compiled, tried out apart, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest

from serving import MODEL, serving
from slipstream import LLM, StructuredOutputsParams
from slipstream.constrain import matcher, trials
from slipstream.constrain.compiler import Grammars
from slipstream.constrain.limits import MOST_SHARING, CompileLimits, Places
from slipstream.constrain.source import MAX_ONE_OF, Source, read_schema, source_of
from slipstream.constrain.syntax import MAX_ALTERNATIVES, MAX_GRAMMAR_WEIGHT, MAX_RULES, check_grammar
from slipstream.constrain.trials import TRIALS, Outcome, Sample
from slipstream.core.errors import ConfigError, InvalidRequest, QueueFull

LIMITS = CompileLimits()


def ambiguous(rules: int) -> str:
    """Any text of letters can be read in very many ways."""
    lines = (f'r{i} ::= [a-z]+ r{(i + 1) % rules} | [0-9a-z]+ " " r{(7 * i + 3) % rules} | "x"' for i in range(rules))
    return "\n".join(["root ::= r0", *lines])


def words() -> Sample:
    """A vocabulary with tokens of many letters, where it costs to be ambiguous."""
    drawn = random.Random(3)
    longer = ["".join(drawn.choices("abcdefghijklmnop ", k=drawn.randint(2, 9))).encode() for _ in range(2000)]
    return Sample.of([bytes([i]) for i in range(256)] + longer)


def late(letter: str) -> str:
    """A grammar of texts that part after 2,000 characters."""
    return "root ::= " + " | ".join(f'"{letter * 2000}{i}"' for i in range(12))


def long_enum(letter: str) -> dict[str, Any]:
    """Values that part after 2,000 characters."""
    return {"enum": [letter * 2000 + str(i) for i in range(12)]}


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    TRIALS.close()


class TestBefore:
    @pytest.mark.parametrize(
        ("grammar", "weight"),
        [
            ('root ::= "a" [b-z]+ other # {9}\nother ::= "]"', 5),
            ('root ::= ("a" | "b" "c"){2,30} "d"?', 91),
            ('root ::= ("a"{1,20}){1,20}', 400),
            ('root ::= "\\"{99}" [\\]{99}] "x"{3,}', 5),
            ("nothing that can be read }{", 5),
        ],
    )
    def test_a_grammar_weighs_what_is_written_in_it(self, grammar: str, weight: int) -> None:
        assert check_grammar("grammar", grammar) == weight

    @pytest.mark.parametrize(
        ("grammar", "what"),
        [
            ("\n".join(f'r{i} ::= "a"' for i in range(MAX_RULES + 1)), f"more than {MAX_RULES} rules"),
            ("root ::= " + " | ".join(["[a]"] * (MAX_ALTERNATIVES + 2)), "alternatives"),
            ('root ::= (("a"{1,99}){1,99}){1,99}', f"more than {MAX_GRAMMAR_WEIGHT} parts"),
            ("root ::= " + '"a" ' * (MAX_GRAMMAR_WEIGHT + 1), "parts"),
            ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "brackets inside each other"),
        ],
    )
    def test_too_much_is_refused_unseen(self, grammar: str, what: str) -> None:
        with pytest.raises(InvalidRequest, match=f"structured_outputs.grammar: too dear, .*{what}"):
            source_of(StructuredOutputsParams(grammar=grammar))

    def test_schemas_weigh_more_than_their_texts(self) -> None:
        def properties(count: int, one: Any, **more: Any) -> str:
            return json.dumps({"type": "object", "properties": {f"p{i}": one for i in range(count)}, **more})

        with pytest.raises(InvalidRequest, match="too dear together"):
            read_schema(properties(12, {"type": "integer", "multipleOf": 990}))
        with pytest.raises(InvalidRequest, match=f"oneOf has {MAX_ONE_OF + 1} schemas"):
            read_schema(json.dumps({"oneOf": [{"const": i} for i in range(MAX_ONE_OF + 1)]}))
        assert read_schema(properties(40, {"type": "string"})).light
        assert read_schema(properties(8, {"enum": ["red", "green", "blue"]})).light
        for heavy in (
            properties(40, {"type": "string"}, additionalProperties=True),
            properties(200, {"type": "string"}),
            properties(1, {"type": "string", "maxLength": 100}),
            json.dumps(long_enum("a")),
        ):
            assert not read_schema(heavy).light

    @pytest.mark.parametrize("mark", ["[", "{", '"\\'])
    def test_marks_that_are_never_closed_are_read_once(self, mark: str) -> None:
        began = time.thread_time()
        with suppress(InvalidRequest):
            check_grammar("grammar", "root ::= " + mark * (60_000 // len(mark)))
        assert time.thread_time() - began < 1  # with each of them read to the end it took minutes

    @pytest.mark.parametrize("form", [{"regex": "(" * 500 + "a" + ")" * 500}, {"json": {"pattern": "(" * 30_000}}])
    def test_groups_are_not_followed_down(self, form: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequest, match="more than 64 groups inside each other"):  # it was the process's end
            source_of(StructuredOutputsParams(**form))

    def test_values_are_not_followed_down(self) -> None:
        for deep in (100, 900):
            with pytest.raises(InvalidRequest, match="nested"):
                source_of(StructuredOutputsParams(json='{"enum": [' + "[" * deep + "]" * deep + "]}"))
        source_of(StructuredOutputsParams(json={"enum": [[[[{"a": [1]}]]]]}))

    def test_what_many_refer_to_is_looked_at_once(self) -> None:
        names = [f"p{i}" for i in range(10)]
        parts = {name: {"$ref": "#/$defs/many"} for name in names}
        branches = [
            {"type": "object", "properties": {**parts, "tag": {"const": i}}, "required": [*names, "tag"]}
            for i in range(MAX_ONE_OF)
        ]
        began = time.thread_time()
        read_schema(json.dumps({"oneOf": branches, "$defs": {"many": {"enum": list(range(2000))}}}))
        assert time.thread_time() - began < 2  # looked at for every pair of branches it took a minute

    def test_limits_must_be_possible(self) -> None:
        with pytest.raises(ConfigError, match="trial_s=0: must be above 0"):
            CompileLimits(trial_s=0)


class TestTrials:
    def test_what_is_ambiguous_takes_too_long(self) -> None:
        """And not what is merely long: a grammar of as many rules that begin with letters of their own."""
        rules = 250
        plain = "\n".join(f'r{i} ::= "{i} " [a-z]+ "; " r{i + 1}' for i in range(rules))
        assert TRIALS.try_out(Source("grammar", ambiguous(rules)), words(), LIMITS.trial_s) == Outcome(False)
        told = TRIALS.try_out(Source("grammar", f'root ::= r0\n{plain}\nr{rules} ::= "."'), words(), LIMITS.trial_s)
        assert told == Outcome(True)

    @pytest.mark.parametrize("form", [{"grammar": late("a")}, {"json": long_enum("b")}])
    def test_what_takes_too_long_is_refused_and_remembered(self, form: dict[str, Any], grammars: Grammars) -> None:
        asked = StructuredOutputsParams(**form)
        for _ in range(2):
            with pytest.raises(
                InvalidRequest, match=rf"structured_outputs\.{asked.kind}: would take too long to compile"
            ):
                grammars.constraint(asked, (), LIMITS)
        assert (asked, LIMITS.trial_s) in grammars._tried

    def test_what_is_fine_can_be_followed(self, grammars: Grammars) -> None:
        form = StructuredOutputsParams(grammar='root ::= "a" root "b" | "c"{1,20}')
        assert grammars.constraint(form, (), LIMITS).possible
        with pytest.raises(InvalidRequest, match=r'grammar cannot be followed: .*"nobody" is not defined$'):
            grammars.constraint(StructuredOutputsParams(grammar="root ::= nobody"), (), LIMITS)

    def test_one_that_ended_is_started_again(self, grammars: Grammars) -> None:
        """Also while somebody waits: that one is told to come again."""
        sample = Sample.of([b"a", b"b"])
        assert TRIALS.try_out(Source("grammar", 'root ::= "a"'), sample, 1.0) == Outcome(True)
        process = TRIALS._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)  # so that the form is still there when it ends
        told: list[BaseException] = []

        def ask() -> None:
            try:
                TRIALS.try_out(Source("grammar", 'root ::= "b"'), sample, 1.0)
            except QueueFull as error:
                told.append(error)

        waiting = threading.Thread(target=ask)
        waiting.start()
        while not TRIALS._waiting:
            pass
        with TRIALS._lock:  # it was written, too
            os.kill(process.pid, signal.SIGKILL)
        waiting.join(60)
        assert len(told) == 1
        assert TRIALS.try_out(Source("grammar", 'root ::= "b"'), sample, 1.0) == Outcome(True)
        assert TRIALS._process is not process

    @pytest.mark.parametrize(("more", "fits"), [(1 << 30, True), (3 << 30, False)])
    def test_memory_counts_from_what_there_is(self, more: int, fits: bool) -> None:
        """In a process of its own, which has gigabytes before the limit is set."""
        script = (
            "import mmap\n"
            "from slipstream.constrain.trials import _limit\n"
            "before = mmap.mmap(-1, 3 << 30, mmap.MAP_PRIVATE)\n"
            "_limit(60)\n"
            f"mmap.mmap(-1, {more}, mmap.MAP_PRIVATE)\n"
        )
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert (ended.returncode == 0) is fits, ended.stderr
        assert fits or "Cannot allocate memory" in ended.stderr

    def test_a_sample_has_every_byte(self) -> None:
        vocabulary = [bytes([i]) for i in range(256)] + [b"ab%d" % i for i in range(50_000)] + [b""]
        sample = Sample.of(vocabulary)
        assert set(vocabulary[:256]) <= set(sample.tokens)
        assert 1500 < len(sample.tokens) < 2000
        assert b"" not in sample.tokens
        larger = vocabulary + [b"cd%d" % i for i in range(150_000)]  # which takes longer, and so does its sample
        assert 6000 < len(Sample.of(larger).tokens) < 6800

    def test_where_no_process_can_be_had_only_what_is_simple_is_taken(
        self, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def none(*_: object, **__: object) -> None:
            raise OSError("no more processes")

        TRIALS.close()
        monkeypatch.setattr("subprocess.Popen", none)
        heavy = StructuredOutputsParams(grammar='root ::= "z"')
        with pytest.raises(InvalidRequest, match=r"grammar: may take long to compile, and cannot be tried out on this"):
            grammars.constraint(heavy, (), LIMITS)
        assert grammars.constraint(StructuredOutputsParams(regex="[a-f]{3}"), (), LIMITS).possible
        assert grammars.constraint(heavy).possible, "the library's own caller may wait"

    def test_one_that_does_not_read_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its pipe is full: who writes to it would hang, and everybody behind."""
        sample = Sample.of([b"c", b"d"])
        assert TRIALS.try_out(Source("grammar", 'root ::= "c"'), sample, 1.0) == Outcome(True)
        process = TRIALS._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        monkeypatch.setattr(trials, "_ANSWER_TIMEOUT_S", 0.2)
        long = Source("grammar", 'root ::= "c" # ' + "x" * (1 << 20))
        for _ in range(2):
            with pytest.raises(QueueFull, match="try again"):
                TRIALS.try_out(long, sample, 0.0)
            assert process.wait(30) == -signal.SIGKILL
        monkeypatch.undo()
        assert TRIALS.try_out(Source("grammar", 'root ::= "d"'), sample, 1.0) == Outcome(True)


class TestEqualForms:
    """What is asked for by many at the same time is tried and compiled once."""

    @pytest.fixture
    def slow(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], threading.Event]]:
        """The forms that were tried, and what ends the trials."""
        tried: list[str] = []
        released = threading.Event()

        def slowly(source: Source, *_: object) -> Outcome:
            tried.append(source.text)
            assert released.wait(60)
            return Outcome("nobody" not in source.text)

        monkeypatch.setattr(TRIALS, "try_out", slowly)
        yield tried, released
        released.set()

    def ask(self, grammars: Grammars, text: str, times: int, released: threading.Event) -> list[object]:
        """What becomes of equal requests of many tenants."""
        form = StructuredOutputsParams(grammar=text)

        def one(number: int) -> object:
            try:
                return grammars.constraint(form, (), LIMITS, f"tenant {number}").possible
            except (InvalidRequest, QueueFull) as error:
                return error

        with ThreadPoolExecutor(times) as threads:
            asked = [threads.submit(one, number) for number in range(times)]
            while grammars._sharing < min(times - 1, MOST_SHARING) and not any(one.done() for one in asked):
                time.sleep(0.001)
            released.set()
            return [one.result() for one in asked]

    def test_64_at_once_share_one_compilation(
        self, grammars: Grammars, slow: tuple[list[str], threading.Event], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried, released = slow
        compiled: list[str] = []
        compile = Source.compile

        def counted(source: Source, compiler: Any) -> Any:
            compiled.append(source.text)
            return compile(source, compiler)

        monkeypatch.setattr(Source, "compile", counted)
        assert self.ask(grammars, 'root ::= "shared"', 64, released) == [True] * 64
        assert tried == compiled == ['root ::= "shared"']
        assert not grammars._under_way

    def test_all_are_told_what_is_wrong(self, grammars: Grammars, slow: tuple[list[str], threading.Event]) -> None:
        tried, released = slow
        answers = self.ask(grammars, 'root ::= "nobody may have this"', 8, released)
        assert len({str(answer) for answer in answers}) == len(tried) == 1
        assert all(isinstance(answer, InvalidRequest) for answer in answers)

    def test_one_without_a_place_does_not_refuse_the_others(
        self, grammars: Grammars, slow: tuple[list[str], threading.Event]
    ) -> None:
        _, released = slow
        with ExitStack() as inside:
            for _ in range(LIMITS.waiting):
                inside.enter_context(grammars._places.taken("tenant 0", LIMITS.waiting))
            first = self.ask(grammars, 'root ::= "a place"', 1, released)[0]
            assert isinstance(first, QueueFull)
            form = StructuredOutputsParams(grammar='root ::= "a place"')
            assert grammars.constraint(form, (), LIMITS, "tenant 1").possible


class TestClocks:
    """A form is judged by its time on a CPU: a busy machine, or one that slept, says nothing of it."""

    def test_a_pause_does_not_condemn_a_form(self, grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(matcher, "LONGEST_S", 0.01)
        form = StructuredOutputsParams(grammar='root ::= "patience"')
        constraint = grammars.constraint(form, (), LIMITS)
        monkeypatch.setattr(constraint, "_follow", lambda _: time.sleep(1))
        constraint.advance([1], 0)
        assert "too busy" in str(constraint.failure)
        assert grammars.constraint(form, (), LIMITS).possible

    def test_a_trial_that_gets_no_cpu_says_nothing(self) -> None:
        """Its fork is ended by the clock; with a CPU it would take milliseconds."""
        asked = [
            {"vocabulary": "v", "tokens": ["a", "b"]},
            {"vocabulary": "v", "id": 1, "kind": "grammar", "text": 'root ::= "a"', "free": False, "cpu_s": 60},
        ]
        script = (
            "import time\n"
            "from slipstream.constrain import trials\n"
            "trials._WALL = 0.005\n"
            "trials._try = lambda *_: time.sleep(60)\n"
            "trials.main()\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", script],
            input="".join(json.dumps(line) + "\n" for line in asked),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert json.loads(ended.stdout) == {"id": 1, "outcome": "starved"}


class TestShares:
    def test_a_tenant_alone_has_all_places_and_of_several_each_its_share(self) -> None:
        places = Places()
        with ExitStack() as inside:
            for _ in range(8):
                inside.enter_context(places.taken("a", 8))
            with pytest.raises(QueueFull), places.taken("a", 8):
                pass
            for _ in range(4):
                inside.enter_context(places.taken("b", 8))
            with pytest.raises(QueueFull), places.taken("b", 8):
                pass
            inside.enter_context(places.taken("c", 8))
        with places.taken("b", 1):
            pass
        assert not places._inside

    def test_however_many_tenants_there_are_there_is_an_end(self) -> None:
        places = Places()
        with ExitStack() as inside:
            for number in range(6):
                inside.enter_context(places.taken(f"t{number}", 2))
            with pytest.raises(QueueFull), places.taken("another", 2):
                pass

    def test_a_form_does_not_wait_behind_all_of_another_tenants(
        self, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One has all places; another comes last, and has the next turn."""
        begun: list[str] = []
        step = threading.Semaphore(0)

        def slowly(source: Source, *_: object) -> Outcome:
            begun.append(source.text)
            assert step.acquire(timeout=60)
            return Outcome(True)

        monkeypatch.setattr(TRIALS, "try_out", slowly)
        told: list[BaseException] = []

        def ask(tenant: str, number: int) -> None:
            try:
                grammars.constraint(StructuredOutputsParams(grammar=f'root ::= "{tenant}{number}"'), (), LIMITS, tenant)
            except BaseException as error:
                told.append(error)

        threads = [threading.Thread(target=ask, args=("greedy", number)) for number in range(8)]
        for thread in threads:
            thread.start()
        while len(begun) + len(grammars._trying._waiting) < 8:
            pass
        threads.append(threading.Thread(target=ask, args=("other", 0)))
        threads[-1].start()
        while len(grammars._trying._waiting) < 7:
            assert not told
        step.release()
        while len(begun) < 3:
            pass
        assert begun[2] == 'root ::= "other0"'
        step.release(20)
        for thread in threads:
            thread.join(60)
        assert not told
        assert len(begun) == 9


def body(**form: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, **form}


@pytest.mark.alone
def test_hostile_forms_over_http(open_llm: Callable[..., LLM]) -> None:
    """They are refused within a second, and a stream and simple forms go on meanwhile."""
    llm = open_llm(drafter="ngram")
    llm._intake.grammars.warm()
    hostile: list[dict[str, Any]] = [{"guided_grammar": late(letter)} for letter in "pqr"]
    hostile += [{"guided_json": long_enum(letter)} for letter in "st"]
    too_much = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"oneOf": [{}] * 900}}}
    }
    with serving(llm) as server:

        async def main() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                ready = await client.post("/v1/completions", json=body(guided_grammar='root ::= "ready"'))
                assert ready.status_code == 200
                events = 0
                stop = False

                async def stream() -> None:
                    nonlocal events
                    while not stop:
                        long = body(max_tokens=100, stream=True, ignore_eos=True)
                        async with client.stream("POST", "/v1/completions", json=long) as answer:
                            async for _ in answer.aiter_lines():
                                events += 1

                streaming = asyncio.create_task(stream())
                took: list[float] = []
                for form in [*hostile, too_much]:
                    before, begun = events, time.perf_counter()
                    asked = asyncio.create_task(client.post("/v1/completions", json=body(**form)))
                    simple = await client.post("/v1/completions", json=body(guided_regex=f"a{len(took)}b"))
                    refused = await asked
                    took.append(time.perf_counter() - begun)
                    assert simple.status_code == 200
                    assert refused.status_code == 400, refused.text
                    assert events > before or form is too_much
                stop = True
                await streaming
                assert min(took[: len(hostile)]) < 1.0

        asyncio.run(asyncio.wait_for(main(), 120))


def test_too_many_at_once_are_told_to_come_again(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(drafter="ngram")
    inside, released = threading.Event(), threading.Event()

    def slowly(*_: object) -> Outcome:
        inside.set()
        released.wait(60)
        return Outcome(True)

    monkeypatch.setattr(TRIALS, "try_out", slowly)
    with serving(llm, compiling=CompileLimits(waiting=1)) as server:

        async def main() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                first = asyncio.create_task(client.post("/v1/completions", json=body(guided_grammar='root ::= "a"')))
                assert await asyncio.to_thread(inside.wait, 60)
                second = await client.post("/v1/completions", json=body(guided_grammar='root ::= "b"'))
                assert second.status_code == 429
                assert second.headers["retry-after"] == "1"
                simple = await client.post("/v1/completions", json=body(guided_regex="abc"))
                assert simple.status_code == 200
                released.set()
                assert (await first).status_code == 200
                assert (
                    await client.post("/v1/completions", json=body(guided_grammar='root ::= "b"'))
                ).status_code == 200

        try:
            asyncio.run(asyncio.wait_for(main(), 120))
        finally:
            released.set()
