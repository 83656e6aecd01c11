"""By which names a server is reached, and how many may watch it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from serving import serving
from slipstream import LLM
from slipstream.core.errors import ConfigError
from slipstream.serve import live
from slipstream.serve.config import ApiKey, ServeConfig
from slipstream.serve.errors import ApiError
from slipstream.serve.hosts import check_host, checked_names
from slipstream.serve.live import LiveView

HERE = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3", "[::1]", "[::1]:8000", "localhost."]
STRANGE = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "10.0.0.1", "["]


def comes_in(name: str, **options: Any) -> bool:
    try:
        check_host({b"host": name.encode()}, checked_names(ServeConfig(**options)))
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "localhost"])
def test_a_server_for_this_machine_answers_to_its_names_alone(bound: str) -> None:
    assert all(comes_in(name, host=bound) for name in HERE)
    assert not any(comes_in(name, host=bound) for name in STRANGE)


def test_names_beyond_this_machine() -> None:
    assert comes_in("gpu-box:8000", host="0.0.0.0")
    assert comes_in("chat.example", keys=(ApiKey.of("a-good-key"),))  # a page from elsewhere has none
    assert comes_in("Chat.Example:443", allowed_hosts=("chat.example",))
    assert comes_in("localhost", allowed_hosts=("chat.example",))
    assert not comes_in("evil.example", allowed_hosts=("chat.example",), host="0.0.0.0")
    assert not comes_in("evil.example", allowed_hosts=("chat.example",), keys=(ApiKey.of("a-good-key"),))
    assert comes_in("evil.example", allowed_hosts=("*",))
    check_host({}, checked_names(ServeConfig()))  # a browser always says it
    for wrong in ("chat.example:443", "http://chat.example", ""):
        with pytest.raises(ConfigError, match="allowed_hosts"):
            ServeConfig(allowed_hosts=(wrong,))


def test_a_page_that_took_our_address_reads_nothing(open_llm: Callable[..., LLM]) -> None:
    with serving(open_llm()) as server:
        for path in ("/", "/live", "/v1/models", "/health", "/nothing"):
            answer = httpx.get(server.url + path, headers={"Host": "evil.example"})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "host_not_allowed"
            assert "--allowed-host" in answer.json()["error"]["message"]
        body = {"model": "tiny", "prompt": "a"}
        asked = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Host": "evil.example:8000"})
        assert asked.status_code == 403
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": "localhost:1"}).status_code == 200


def test_pages_from_elsewhere_ask_where_their_origin_is_allowed(open_llm: Callable[..., LLM]) -> None:
    """A browser's preflight has no key; the request behind it needs one."""
    page, other = {"Origin": "https://chat.example"}, {"Origin": "https://evil.example"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    keys = (ApiKey.of("a-good-key"),)
    with serving(open_llm(), keys=keys, allowed_origins=("https://chat.example",)) as server:
        path = f"{server.url}/v1/chat/completions"
        allowed = httpx.options(path, headers={**page, **asks})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == page["Origin"]
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert "access-control-allow-origin" not in httpx.options(path, headers={**other, **asks}).headers
        answer = httpx.post(path, json={}, headers=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, page["Origin"])
        assert "access-control-allow-origin" not in httpx.post(path, json={}, headers=other).headers
    for wrong in ("chat.example", "https://", ""):
        with pytest.raises(ConfigError, match="allowed_origins"):
            ServeConfig(allowed_origins=(wrong,))


def test_how_often_watchers_look_is_limited(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm()
    with serving(llm) as server:
        for wrong in ("nan", "inf", "-1", "0", "0.01", "1e9", "x"):
            assert httpx.get(f"{server.url}/live?stream=true&every={wrong}").status_code == 400
    view = LiveView(llm.snapshot, lambda: 0, lambda: "ok")
    monkeypatch.setattr(live, "MAX_WATCHERS", 3)

    async def main() -> None:
        async with aclosing(view.watch(1.01)) as a, aclosing(view.watch(1.02)) as b, aclosing(view.watch(1.99)) as c:
            first, second, third = await anext(a), await anext(b), await anext(c)
            assert first == second == third  # the next slower pace, which they share
            with pytest.raises(ApiError) as refused:
                view.watch(1.0)
            assert refused.value.status == 429
            assert refused.value.headers["Retry-After"]
        async with aclosing(view.watch(1.0)) as again:
            assert await anext(again)

    asyncio.run(main())
