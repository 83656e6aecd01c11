"""The page at `/` in a real browser: what it shows is what the engine did, and nobody sees it without the key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from browser import chromium
from serving import MODEL, serving
from slipstream import LLM
from slipstream.plan.planner import AdaptivePlanner
from slipstream.serve.config import ApiKey
from slipstream.serve.server import HttpServer

PROMPT = "count: one two one two one two"
WAIT_MS = 20_000
Open = Callable[..., Page]

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # the driver's own pipes, when it ends


@pytest.fixture(scope="module")
def llm(tiny_target: Path) -> Iterator[LLM]:
    with LLM(
        tiny_target,
        device="cpu",
        max_num_seqs=4,
        memory="64MiB",
        drafter=[f"model:{tiny_target}", "suffix"],
        planner="fixed",
    ) as made:
        yield made


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[HttpServer]:
    with serving(llm) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Pages of their own, with nothing left from before; whatever went wrong in one fails the test."""
    contexts: list[BrowserContext] = []
    wrong: list[str] = []

    def open_one(url: str, live: str = "", **options: Any) -> Page:
        """live: events that the page follows in the place of the engine's; then there are no more."""
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        if live:
            told = iter([live])

            def answer(route: Route) -> None:
                body = next(told, None)
                route.abort() if body is None else route.fulfill(body=body, content_type="text/event-stream")

            page.route("**/live?stream=true**", answer)
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
        page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith(url) else None)
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not wrong


def ask(page: Page, prompt: str, mode: str = "on", **fields: str) -> None:
    """Fill in the playground, send it, wait for the end."""
    expect(page.locator("main:not([inert])")).to_be_attached()
    settings = {"temperature": "0", "seed": "5", "tokens": "40", **fields}
    for name, value in settings.items():
        page.fill(f"#{name}", value)
    page.locator(f"[name=mode][value={mode}]").check(force=True)
    page.fill("#prompt", prompt)
    turns = page.locator(".turn").count()
    page.press("#prompt", "Enter")
    expect(page.locator(".turn")).to_have_count(turns + 1)
    expect(page.locator("#stop")).to_be_hidden(timeout=WAIT_MS)


def test_each_token_is_coloured_by_who_guessed_it(open_page: Open, server: HttpServer, llm: LLM) -> None:
    page = open_page(server.url)
    expect(page.locator("#model")).to_have_text(MODEL)
    expect(page.locator("#drafter option")).to_have_text(["the server's choice", "model", "suffix"])
    before = llm.snapshot()
    ask(page, PROMPT)
    after = llm.snapshot()
    answer = page.locator(".answer")
    expect(answer).to_have_count(1)
    guessed = answer.locator(".legend li").all_inner_texts()
    told = {re.sub(r"\s\d+$", "", text): int(text.split()[-1]) for text in guessed}
    assert sum(told.values()) == after.generated_tokens - before.generated_tokens
    assert sum(told.values()) - told["the model itself"] == after.accepted_tokens - before.accepted_tokens > 0
    assert "τ" in answer.locator("h3").inner_text()
    token = answer.locator(".token.guessed").first
    assert token.evaluate("e => getComputedStyle(e).boxShadow") != "none"
    token.hover()
    expect(answer.locator(".readout")).to_contain_text(re.compile(r"round \d+ · guess \d+ of the draft, by \w+"))
    expect(page.locator(".guessed.chosen")).to_have_count(1)


def test_side_by_side_the_tokens_are_the_same(open_page: Open, server: HttpServer) -> None:
    page = open_page(server.url)
    ask(page, PROMPT, "both", temperature="0.8")
    expect(page.locator(".answer")).to_have_count(2)
    expect(page.locator(".verdict.same")).to_contain_text(re.compile(r"The same \d+ tokens\. .*as fast"))
    on, off = page.locator(".answer .text").all_inner_texts()
    assert on == off
    assert page.locator(".answer").nth(1).locator(".guessed").count() == 0
    ask(page, "and now?", "both")  # the conversation goes on
    expect(page.locator(".verdict.same")).to_have_count(2)
    page.click("#fresh")
    expect(page.locator(".turn")).to_have_count(0)


def test_by_keyboard_with_probabilities(open_page: Open, server: HttpServer) -> None:
    page = open_page(server.url)
    expect(page.locator("main:not([inert])")).to_be_attached()
    page.check("#logprobs")
    page.select_option("#drafter", "suffix")
    ask(page, PROMPT)
    page.locator(".answer .text").focus()
    page.keyboard.press("ArrowRight")
    first = page.locator(".readout").inner_text()
    assert re.search(r"round \d+ · .+ · probability [\d.]+%", first)
    page.keyboard.press("ArrowRight")
    assert page.locator(".readout").inner_text() != first
    by = page.locator(".token").evaluate_all("all => [...new Set(all.map(e => e.dataset.by))]")
    assert set(by) <= {"target", "suffix"}


def test_what_the_engine_does_is_shown_live(open_page: Open, server: HttpServer, llm: LLM) -> None:
    page = open_page(server.url)
    ask(page, PROMPT)
    seen = llm.snapshot()
    expect(page.locator("#tau-note")).to_have_text(f"{seen.generated_tokens:,} tokens")
    expect(page.locator("#alpha-note")).to_have_text(f"{seen.accepted_tokens:,} of {seen.draft_tokens:,}")
    expect(page.locator("#tau")).to_have_text(f"{seen.generated_tokens / seen.turns:.2f}")
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#health")).to_have_text(re.compile("^up "))
    used = [name for name, did in seen.drafters.items() if did.drafts]
    assert page.locator("#drafters .name").all_inner_texts() == used
    assert page.locator("#positions .position").count() == min(16, len(seen.accepted_by_position))
    expect(page.locator("#rounds")).to_have_attribute(
        "aria-label", re.compile(r"draft .* ms, verify .* ms, host .* ms")
    )
    assert page.locator("#rounds .verify").get_attribute("d")
    expect(page.locator("#cache-legend li").last).to_contain_text(re.compile(r"free [\d,]+"))
    expect(page.locator("#decisions .name").first).to_be_visible()


def test_the_key_is_asked_for_and_kept_in_the_tab(open_page: Open, llm: LLM) -> None:
    with serving(llm, keys=(ApiKey.of("me=a-good-key"),)) as locked:
        page = open_page(locked.url)
        expect(page.locator("#key-dialog")).to_be_visible()
        expect(page.locator("#model")).to_have_text("")
        page.fill("#key", "a-bad-key")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_contain_text("not known here")
        page.fill("#key", "a-good-key")
        page.keyboard.press("Enter")
        expect(page.locator("#key-dialog")).to_be_hidden()
        ask(page, PROMPT)
        expect(page.locator(".answer .token").first).to_be_visible()
        page.reload()
        expect(page.locator("#model")).to_have_text(MODEL)  # it was kept
        assert "key" not in page.url
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        page.click("#forget")
        expect(page.locator("#key-dialog")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(open_page: Open, server: HttpServer, scheme: str) -> None:
    page = open_page(
        server.url, viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True, is_mobile=True
    )
    ask(page, PROMPT + " " + "longwordwithoutanend" * 4, "both", tokens="30")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator(".answer .token").first.tap()
    expect(page.locator(".readout").first).to_contain_text("round")
    for name in ("body", ".small"):
        ink, ground = page.locator(name).first.evaluate(
            "e => [getComputedStyle(e).color, getComputedStyle(document.body).backgroundColor]"
        )
        assert contrast(ink, ground) >= 4.5
    for button in page.locator("#send:visible").all():
        box = button.bounding_box()
        assert box is not None
        assert box["height"] >= 44  # for a thumb


def test_where_acceptance_is_hidden_the_page_tells_no_more(open_page: Open, llm: LLM) -> None:
    with serving(llm, chunk_chars=8) as hiding:
        page = open_page(hiding.url)
        ask(page, PROMPT, "both")
        expect(page.locator(".verdict.same")).to_contain_text("characters")
        on, off = page.locator(".answer .text").all_inner_texts()
        assert on == off != ""
        expect(page.locator(".token")).to_have_count(0)


def test_what_the_server_refuses_is_said(open_page: Open, server: HttpServer) -> None:
    page = open_page(server.url)
    ask(page, "x" * 5000)
    expect(page.locator(".answer .error")).to_contain_text("too long")
    ask(page, PROMPT)  # what failed is no part of the conversation
    expect(page.locator(".answer .error")).to_have_count(1)


def views(server: HttpServer, count: int, **series: Callable[[int], Any]) -> str:
    """Events as `/live` has them, a second and ten rounds apart; `series` sets values of the engine by their number."""
    seen = httpx.get(f"{server.url}/live").json()
    begun, events = seen["time"], []
    for i in range(count):
        engine = {**seen["engine"], "rounds": 10 * i, "draft_s": 0.0, "host_s": 0.0, "verify_s": 0.05 * i}
        rate = series["tokens_per_s"](i) if "tokens_per_s" in series else 100.0
        engine |= {name: value(i) for name, value in series.items() if name != "tokens_per_s"}
        live = {**seen, "time": begun + i, "uptime_s": 10.0 + i, "seconds": 1.0, "tokens_per_s": rate, "engine": engine}
        events.append(f"data: {json.dumps(live)}\n\n")
    return "".join(events)


def test_a_spike_is_cut_and_the_others_are_seen(open_page: Open, server: HttpServer) -> None:
    """Twenty seconds of 5 ms a round and 100 tokens a second, and one of 500 ms and 10,000."""

    def verify_s(i: int) -> float:
        return 0.05 * i + 5.0 * (i >= 12)

    live = views(server, 20, verify_s=verify_s, tokens_per_s=lambda i: 10_000.0 if i == 12 else 90.0 + i)
    page = open_page(server.url, live)
    expect(page.locator("#rounds-top")).to_have_text(re.compile(r"^\d+ ms · cut: the highest has 505 ms$"))
    found = "(e, mark) => [...e.getAttribute('d').matchAll(new RegExp(mark + '([0-9.]+)', 'g'))].map(m => +m[1])"
    tops = page.locator("#rounds .verify").evaluate(found, "V")
    assert len(tops) == 19
    assert sum(top < 50 for top in tops) == 19  # all are as high as half of the drawing or more
    assert page.locator("#rounds .cut").get_attribute("d") != ""
    ends = page.locator("#rate-line .stroke").evaluate(found, ",")
    assert sum(end < 24 for end in ends) == 20  # of 40, from the top: so are those, nearly
    assert page.locator("#rate-line .cut").get_attribute("d") != ""


def test_what_the_planner_decides_is_plotted_with_its_reasons(open_page: Open, server: HttpServer) -> None:
    later = {"sampled, echoing prompt": 0.9}
    plan = {"model": "model 5: 1.42x expected", "suffix": "off: batch 48 leaves no spare arithmetic"}
    live = views(
        server,
        30,
        gains=lambda i: {"greedy": 1.2 + 0.05 * i, **(later if i >= 10 else {})},
        plan=lambda i: plan,
    )
    page = open_page(server.url, live)
    expect(page.locator("#gains")).to_have_attribute(
        "aria-label", "greedy: 2.65\u00d7; sampled, echoing prompt: 0.90\u00d7"
    )
    expect(page.locator("#gains-top")).to_have_text("3.00\u00d7")
    expect(page.locator("#gains-legend li")).to_have_text(["greedy 2.65\u00d7", "sampled, echoing prompt 0.90\u00d7"])
    expect(page.locator("#reasons dt")).to_have_text(["model", "suffix"])
    expect(page.locator("#reasons dd")).to_have_text(list(plan.values()))
    box = "e => (({ y, width, height }) => ({ y, width, height }))(e.getBBox())"
    level, one, other = (page.locator("#gains path").nth(i).evaluate(box) for i in range(3))
    assert one["y"] + one["height"] < level["y"] < other["y"]  # above 1x, 1x, below it
    assert one["width"] == pytest.approx(29, abs=0.1)
    assert other["width"] == pytest.approx(19, abs=0.1)  # it came later


def test_the_engines_own_plan_is_shown(open_page: Open, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word of its own: what the planner said of real requests."""
    drafters = ["ngram", "suffix"]
    monkeypatch.setattr(
        AdaptivePlanner, "asks", lambda *_: True
    )  # also where a machine's passes leave nothing to hope for
    monkeypatch.setattr(AdaptivePlanner, "least_chance", lambda *_: 0.0)
    with (
        LLM(tiny_target, device="cpu", max_num_seqs=4, memory="64MiB", drafter=drafters) as planned,
        serving(planned) as adaptive,
    ):
        page = open_page(adaptive.url)
        page.fill("#temperature", "0")  # greedily such a model soon repeats itself
        ask(page, PROMPT, tokens="60")
        said = planned.snapshot().plan
        assert said
        expect(page.locator("#reasons dt")).to_have_text(list(said))
        expect(page.locator("#reasons dd")).to_have_text(list(said.values()))
        expect(page.locator("#gains-legend li")).to_have_count(len(planned.snapshot().gains))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tokens", "99999999", "Most tokens: 99999999 must be a whole number, 1 to"),
        ("tokens", "0", "Most tokens: 0 must be"),
        ("temperature", "7", "Temperature: 7 must be 0 to 2"),
        ("seed", "-1", "Seed: -1 must be"),
    ],
)
def test_settings_that_cannot_be_are_said(
    open_page: Open, server: HttpServer, field: str, value: str, words: str
) -> None:
    page = open_page(server.url)
    expect(page.locator("main:not([inert])")).to_be_attached()
    page.fill(f"#{field}", value)
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Enter")
    expect(page.locator("#ask-error")).to_contain_text(words)
    expect(page.locator(f"#{field}")).to_have_attribute("aria-invalid", "true")
    expect(page.locator(".turn")).to_have_count(0)
    assert page.input_value("#prompt") == PROMPT
    ask(page, PROMPT, tokens="5")
    expect(page.locator("#ask-error")).to_have_text("")


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours as browsers write them."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
