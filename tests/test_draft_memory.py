"""What drafts may have of the cache: a limit that users set, and what pages that are short leave."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.draft import Tree
from slipstream.core.errors import CapacityError, ConfigError
from slipstream.drafters.base import DraftRequest, HostDrafter
from slipstream.engine.caps import SHORT, DraftRoom
from slipstream.engine.config import EngineConfig, parse_share
from slipstream.engine.reasons import copied_from, plan_of
from slipstream.engine.state import Answer, Copied
from slipstream.plan.planner import Planner
from slipstream.plan.types import Decision
from stepping import Arrival, Stepper

Open = Callable[..., LLM]
LOOP = [5, 6, 7, 8] * 6


def test_bytes_and_parts() -> None:
    assert parse_share("20%", "k") == pytest.approx(0.2)
    assert parse_share("0.25", "k") == 0.25
    assert parse_share(0.5, "k") == 0.5
    assert parse_share("1MiB", "k") == 2**20
    assert parse_share(4096, "k") == 4096
    assert parse_share(None, "k") is None
    with pytest.raises(ConfigError, match="max_draft_memory='much'"):
        parse_share("much", "max_draft_memory")
    for wrong in ("1.5", "120%", "5XB", "nan"):
        with pytest.raises(ConfigError, match=rf"k='{wrong}': must be a part such as 0.2 or 20%, or a size"):
            parse_share(wrong, "k")
    for slip in ("20", 20):
        with pytest.raises(
            ConfigError, match=r"k=20: must be at least the bytes of a page; write 20% or 0.2 for .*, 20MiB for"
        ):
            parse_share(slip, "k")
    with pytest.raises(ConfigError, match=r"k=512: must be at least the bytes of a page; write 512MiB, say, or 20%"):
        parse_share(512, "k")
    assert parse_share("0", "k") == 0
    with pytest.raises(ConfigError, match="max_draft_memory=-1"):
        EngineConfig(max_draft_memory=-1)
    with pytest.raises(ConfigError, match=r"max_draft_memory=2000000000.0: must be whole bytes"):
        EngineConfig(max_draft_memory=2e9)  # as a part it would be no limit at all


class Always(HostDrafter):
    """Guesses as much as it may."""

    name: ClassVar[str] = "always"
    bounded: ClassVar[bool] = True

    def __init__(self) -> None:
        self.asked = 0

    def propose(self, requests: Sequence[DraftRequest], budget: Sequence[int]) -> Sequence[Tree]:
        self.asked = max(self.asked, *budget)
        return [Tree.chain([7] * nodes) for nodes in budget]


def test_guesses_have_so_many_places_and_no_more(open_llm: Open) -> None:
    plan = open_llm(drafter=Always()).memory_plan
    page = plan.cache_bytes // plan.num_pages
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens, asked = [], []
    for limit in (None, page, 0):  # a page has 16 places, for all of them
        drafter = Always()
        llm = open_llm(drafter=drafter, planner="fixed", draft_tokens=12, max_draft_memory=limit)
        assert llm.memory_plan.draft_places == (None if limit is None else 16 * (limit > 0))
        tokens.append([output.outputs[0].token_ids for output in llm.generate([LOOP] * 4, params)])
        asked.append(drafter.asked)
    assert tokens[0] == tokens[1] == tokens[2]
    assert asked == [12, 4, 0]


def test_bytes_that_hold_no_page_are_refused(open_llm: Open) -> None:
    plan = open_llm(drafter="suffix").memory_plan
    page = plan.cache_bytes // plan.num_pages
    with pytest.raises(ConfigError, match=rf"max_draft_memory={page - 1}: must be at least the bytes of a page,"):
        open_llm(drafter="suffix", max_draft_memory=page - 1)


def test_drafters_that_keep_more_than_that_are_refused(open_llm: Open, tiny_draft: Path) -> None:
    with pytest.raises(CapacityError, match=r"max_draft_memory=0.01: drafters keep .* leave out") as refused:
        open_llm(drafter=f"model:{tiny_draft}", max_draft_memory=0.01)
    (part,) = re.findall(r"or ([0-9.]+) at least", str(refused.value))
    open_llm(drafter=f"model:{tiny_draft}", max_draft_memory=float(part))
    plan = open_llm(drafter=f"model:{tiny_draft}", max_draft_memory=0.9).memory_plan
    assert 0 < plan.draft_cache_bytes < 0.9 * plan.cache_bytes
    assert plan.draft_places is not None
    assert plan.draft_places > 0
    assert open_llm(drafter="suffix").memory_plan.draft_cache_bytes == 0


def test_where_pages_are_short(tiny_target: Path) -> None:
    bench = Stepper(tiny_target, "ngram", pages=7)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    taken: list[tuple[bool, int]] = []  # are pages short, and how many do requests hold beyond what they need?

    def look() -> None:
        scheduler = bench.engine.scheduler
        for answer in scheduler.running:
            if answer.table is not None and scheduler.pages_short:
                needed = scheduler.pool.pages_for(answer.reach + 1)
                taken.append((True, answer.table.capacity // scheduler.pool.page_size - needed))

    answers = bench.run([Arrival(20, params), Arrival(20, params), Arrival(20, params)], look)
    assert taken, "pages are short for a while"
    assert max(more for _, more in taken) <= 1, "no page is taken for guesses that are not reached by tokens yet"
    assert all(len(answer.token_ids) == 40 for answer in answers)


def test_room() -> None:
    left = [8]
    room = DraftRoom(lambda answer, nodes: min(nodes, left[0]))
    answer = fake()
    assert (room.nodes(answer, 2, 9), room.is_full, room.is_short(answer)) == (6, False, False)
    left[0] = 0
    assert (room.nodes(answer, 0, 4), room.refused) == (0, 1)
    assert room.is_short(answer)
    assert room.is_full
    assert plan_of(answer, Told("suffix 8: 1.50x expected"), room, str) == {"suffix": SHORT}
    room.forget(answer)
    assert not room.is_short(answer)


class Told(Planner):
    """Says this of what was decided."""

    def __init__(self, words: str) -> None:
        self._words = words

    def words(self, drafter: str, decision: Decision, *, shared: bool = True) -> str:
        return self._words


def fake() -> Answer:
    answer = object.__new__(Answer)
    answer.id, answer.drafters, answer.copied, answer.tenant = "a/0", ("suffix",), None, ""
    answer.decided, answer.refused = {"suffix": Decision(1, 8, 1.5)}, {}
    return answer


WORDS = ["<|im_start|>user", "```", "x", "=", "1", "```", "<|im_start|>assistant", "so", "y", "<|im_start|>user", "z"]


@pytest.mark.parametrize(
    ("said", "guess", "where"),
    [
        (["so"], ["x", "=", "1"], "matches an earlier text"),
        (["x"], ["=", "z"], "matches code of turn 1"),
        (["x"], ["=", "1"], "matches code of turn 1"),
        (["so"], ["y"], "matches turn 1"),
        (["k", "l", "m", "k"], ["l", "m"], "matches its own answer"),
        (["<|im_start|>user"], ["z"], "matches turn 2"),
    ],
)
def test_it_says_where_guesses_come_from(said: list[str], guess: list[str], where: str) -> None:
    known = [*WORDS, "k", "l", "m"]

    def decode(ids: list[int]) -> str:
        return " ".join(known[i] for i in ids)

    answer = fake()
    answer.prompt_length = len(WORDS)
    answer.tokens = [*range(len(WORDS)), *map(known.index, said)]
    answer.tokens[9] = answer.tokens[0]  # the same word is the same token
    ids = tuple(0 if word == WORDS[0] else known.index(word) for word in guess)
    answer.copied = Copied("suffix", "text", len(answer.tokens), ids)
    plan = plan_of(answer, Told("suffix 64: 1.80x expected"), DraftRoom(lambda *_: 0), decode)
    assert plan == {"suffix": f"suffix {len(guess)}: {where}; 1.80x expected"}
    answer.copied = Copied("suffix", "follows the prediction", 3, ids)
    told = plan_of(answer, Told("suffix 4: 2x expected"), DraftRoom(lambda *_: 0), decode)
    assert told["suffix"].endswith(": follows the prediction; 2x expected")
    off = "off: 0.90x expected of the best draft"
    assert plan_of(answer, Told(off), DraftRoom(lambda *_: 0), decode) == {"suffix": off}


def test_the_place_of_a_copy() -> None:
    assert copied_from([1, 2, 3, 9, 1, 2], [3]) == 2
    assert copied_from([1, 2, 3, 4], [9]) is None
    assert copied_from([4, 5, 4], [5, 4]) == 1
    assert copied_from([], [5]) is None


def test_answers_carry_it(open_llm: Open) -> None:
    llm = open_llm(drafter="ngram")
    llm.engine.drafting.planner = Kind()
    (output,) = llm.generate([LOOP], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert "matches" in output.outputs[0].speculation.plan["ngram"]


class Kind(Planner):
    """Takes everything, and says so."""

    def decision(self, drafter: str) -> Decision:
        return Decision(1, 3, 1.1)

    def words(self, drafter: str, decision: Decision, *, shared: bool = True) -> str:
        return "ngram 3: 1.10x expected"


def test_words_that_cannot_be_had_are_done_without() -> None:
    """The answer is over by then, and its tokens are right."""

    def decode(ids: list[int]) -> str:
        raise ValueError("no such token")

    answer = fake()
    answer.prompt_length, answer.tokens = 4, [5, 6, 7, 5]
    answer.copied = Copied("suffix", "text", 4, (6, 7))
    told = "suffix 64: 1.80x expected"
    assert plan_of(answer, Told(told), DraftRoom(lambda *_: 0), decode) == {"suffix": told}


def test_a_long_answer_is_not_read_to_say_where_guesses_come_from() -> None:
    """Others wait while one ends."""
    answer = fake()
    answer.prompt_length, answer.tokens = 2, [0, 1, *range(10, 4000), 3998, 3999, 3998]
    answer.copied = Copied("suffix", "text", len(answer.tokens), (3999,))
    plan = plan_of(answer, Told("suffix 1: 1.2x"), DraftRoom(lambda *_: 0), lambda _: pytest.fail("read"))
    assert plan == {"suffix": "suffix 1: matches its own answer; 1.2x"}
