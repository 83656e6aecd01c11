"""Who guessed each token, over HTTP; the page's files; and the view that all watchers share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from serving import MODEL, client_of, serving
from slipstream import LLM
from slipstream.core.outputs import Snapshot
from slipstream.serve.config import ApiKey
from slipstream.serve.live import LiveView
from slipstream.serve.page import PATHS
from slipstream.serve.server import HttpServer

ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 30,
    "temperature": 0,
    "extra_body": {"speculation": {"origins": True}},
}
MESSAGES: list[Any] = [{"role": "user", "content": "one two one two"}]


@pytest.fixture(scope="module")
def llm(tiny_target: Path) -> Iterator[LLM]:
    with LLM(
        tiny_target, device="cpu", max_num_seqs=4, memory="64MiB", drafter=f"model:{tiny_target}", planner="fixed"
    ) as made:
        yield made


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[HttpServer]:
    with serving(llm) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[OpenAI]:
    with client_of(server) as made:
        yield made


def test_origins_whole_and_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **ASKED)
    told = (whole.choices[0].model_extra or {})["origins"]
    assert whole.usage is not None
    assert len(told) == whole.usage.completion_tokens
    assert set(told[0]) == {"token", "round", "depth", "drafters", "text_end"}
    assert {name for origin in told for name in origin["drafters"]} == {"model"}
    assert all(a["text_end"] <= b["text_end"] for a, b in pairwise(told))
    chunks = client.chat.completions.create(messages=MESSAGES, stream=True, **ASKED)
    assert [o for c in chunks for choice in c.choices for o in (choice.model_extra or {}).get("origins", ())] == told
    parts = client.completions.create(prompt="abab" * 6, stream=True, **ASKED)
    streamed = [o for c in parts for choice in c.choices for o in (choice.model_extra or {}).get("origins", ())]
    answer = client.completions.create(prompt="abab" * 6, **ASKED).choices[0]
    assert streamed == (answer.model_extra or {})["origins"]
    assert streamed[-1]["text_end"] <= len(answer.text)


def test_nobody_is_told_who_did_not_ask(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="abab", max_tokens=4)
    assert "origins" not in (answer.choices[0].model_extra or {})


def test_streams_that_hide_acceptance_do_not_tell(llm: LLM) -> None:
    with serving(llm, chunk_chars=4) as hiding:
        body = {"model": MODEL, "prompt": "a", "stream": True, "speculation": {"origins": True}}
        answer = httpx.post(f"{hiding.url}/v1/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "speculation.origins"


def test_the_files_need_no_key_and_hold_no_secret(llm: LLM) -> None:
    with serving(llm, keys=(ApiKey.of("a-good-key"),)) as locked:
        for path in PATHS:
            answer = httpx.get(locked.url + path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            for outside in ("http://", "https://", "//cdn"):
                assert outside not in answer.text.replace("http://www.w3.org/2000/svg", "")
        for path in ("/live", "/v1/models", "/page/", "/page/nothing.js"):
            assert httpx.get(locked.url + path).status_code == 401


def test_a_server_that_ends_does_not_wait_for_watchers(llm: LLM) -> None:
    with serving(llm) as ending, httpx.stream("GET", f"{ending.url}/live?stream=true&every=0.1") as stream:
        events = stream.iter_lines()
        assert next(events).startswith("data: ")
        ending.drain()
        for _ in events:
            pass  # it ends of itself


def test_all_watchers_share_one_view(llm: LLM) -> None:
    looks = 0

    def look() -> Snapshot:
        nonlocal looks
        looks += 1
        return llm.snapshot()

    view = LiveView(look, lambda: 0, lambda: "ok")

    async def watch(views: int) -> list[str]:
        seen: list[str] = []
        async with aclosing(view.events(0.02)) as events:
            async for event in events:
                seen.append(event)
                if len(seen) == views:
                    break
        return seen

    async def all_watch() -> list[list[str]]:
        return await asyncio.gather(*[watch(4) for _ in range(20)])

    seen = asyncio.run(all_watch())
    assert all(events == seen[0] for events in seen)
    assert looks == 4
    assert len(set(seen[0])) == 4
