"""Chunks of prompts that are cut by the request alone: in any company the same passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import LLM, SamplingParams
from slipstream.engine.chunks import Chunk, OwnChunks

RULE = OwnChunks(max_rows=64, narrow=8, together=20)


@dataclass(eq=False)
class FakeAnswer:
    prompt_length: int
    generated: int = 0
    cached: int = 0
    wide: list[tuple[int, int]] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return self.prompt_length + self.generated - self.cached


def read(answer: FakeAnswer, rooms: Sequence[int]) -> None:
    """Compute everything that is pending, in passes with these rooms; then with all the room there is."""
    for room in [*rooms, *[RULE.max_rows] * 1000]:
        if answer.pending == 0:
            return
        rows = RULE.rows(answer, room)  # type: ignore[arg-type]
        assert 0 <= rows <= min(room, answer.pending)
        if rows > RULE.narrow:
            answer.wide.append((answer.cached, answer.cached + rows))
        answer.cached += rows
    raise AssertionError("it never ends")


@given(st.integers(1, 300), st.integers(0, 40), st.lists(st.integers(1, 64), max_size=30))
def test_what_is_computed_widely_depends_on_the_prompt_alone(prompt: int, generated: int, rooms: list[int]) -> None:
    alone, in_company = FakeAnswer(prompt), FakeAnswer(prompt, generated)
    read(alone, [])
    read(in_company, rooms)
    assert alone.wide == in_company.wide
    assert all(end < prompt for _, end in alone.wide)  # the last token of a prompt, and what follows, is never in it


@given(st.lists(st.integers(1, 64), max_size=20))
def test_a_wide_chunk_has_a_pass_to_itself(rows: list[int]) -> None:
    chunks = [Chunk(FakeAnswer(n + 1), n) for n in rows]  # type: ignore[arg-type]
    passes = RULE.passes(chunks)
    assert sorted(map(id, chunks)) == sorted(id(chunk) for part in passes for chunk in part)
    for part in passes:
        assert len(part) == 1 or sum(chunk.rows for chunk in part) <= RULE.together
        assert RULE.is_wide(part) == any(chunk.rows > RULE.narrow for chunk in part)
        assert not RULE.is_wide(part) or len(part) == 1


@given(st.lists(st.integers(1, 64), max_size=20))
def test_wide_chunks_share_passes_where_they_may(rows: list[int]) -> None:
    rule = replace(RULE, wide_together=50)
    chunks = [Chunk(FakeAnswer(n + 1), n) for n in rows]  # type: ignore[arg-type]
    passes = rule.passes(chunks)
    assert sorted(map(id, chunks)) == sorted(id(chunk) for part in passes for chunk in part)
    for part in passes:
        wide = rule.is_wide(part)
        assert all((chunk.rows > rule.narrow) == wide for chunk in part)
        assert len(part) == 1 or sum(chunk.rows for chunk in part) <= (50 if wide else 20)
        assert rule.shares(part) == wide
        assert not RULE.shares(part)
    for before, after in pairwise(part for part in passes if rule.shares(part)):
        assert sum(chunk.rows for chunk in before) + after[0].rows > 50  # none is left half empty


@pytest.mark.parametrize("rounds", ["eager", "queued"])
def test_bad_words_with_a_prompt_in_chunks(open_llm: Callable[..., LLM], rounds: str) -> None:
    """A pass may emit nothing at all."""
    llm = open_llm(drafter=None, max_num_batched_tokens=32, rounds=rounds)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    neighbour, long = llm.generate([[1, 2, 3], list(range(40, 140))], [params, replace(params, bad_words=["ab"])])
    assert [o.outputs[0].error for o in (neighbour, long)] == [None, None]
    assert (
        long.outputs[0].token_ids
        == open_llm(drafter=None).generate(list(range(40, 140)), params)[0].outputs[0].token_ids
    )
