"""The page in headless Chromium: what a person sees and does there, against a server with a scripted engine.

Needs `pip install 'jaxpd[page-test]'` (Playwright) and a Chromium of the system; skipped where either is missing.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from serving.callers import Caller, Keys

pytestmark = pytest.mark.heavy  # a browser

sync_api = pytest.importorskip("playwright.sync_api", reason="the page is tested with Playwright: jaxpd[page-test]")
CHROMIUM = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
if CHROMIUM is None:
    pytest.skip("the page is tested in Chromium, and there is none (apt-get install chromium)", allow_module_level=True)

expect = sync_api.expect
DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 360, "height": 740}


def load_server() -> ModuleType:
    """tests/system/page_server.py"""
    path = pathlib.Path(__file__).parent / "page_server.py"
    spec = importlib.util.spec_from_file_location("page_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["page_server"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


server = load_server()
serving, STEP_S = server.serving, server.STEP_S


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Any]:
    with serving() as it:
        yield it


@pytest.fixture
def open_page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """`open_page(url, **context options)`; at the end no page may have had an error or broken its own policy."""
    contexts, wrong = [], []

    def open_(url: str, ready: bool = True, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(8000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" and not known(m.text) else None)
        page.goto(url)
        if ready:
            expect(page.locator("#state")).to_have_text("ready")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not wrong


def probe(name: str) -> str:
    """A function that looks at the page from inside."""
    return (pathlib.Path(__file__).parent / "page_probes" / f"{name}.js").read_text()


def known(message: str) -> bool:
    """What the browser notes by itself of answers above 399 and of connections that end, which are asked for here."""
    return message.startswith("Failed to load resource")


def ask(page: Any, text: str, **options: str) -> None:
    """Types a message and presses Enter."""
    for name, value in options.items():
        page.locator("#options").evaluate("o => { o.open = true }")
        page.locator(f"#{name.replace('_', '-')}").fill(value)
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def answer(page: Any) -> Any:
    return page.locator(".turn.assistant").last


def done(page: Any) -> None:
    expect(page.locator("#send")).to_be_visible()


# -- the chat


def test_an_answer_streams_in_as_it_is_made(site: Any, open_page: Any) -> None:
    page = open_page(site.url)
    expect(page.locator("#model")).to_have_text("bytes · disaggregated")
    ask(page, "hello", max_tokens="40")
    body = answer(page).locator(".body")
    expect(body).to_contain_text("user:")
    early = body.text_content()
    done(page)
    late = body.text_content()
    assert 0 < len(early) < len(late) == 40 and late.startswith(early)
    expect(answer(page).locator(".summary")).to_contain_text("40 tokens")
    expect(page.locator("#status")).to_have_text("The answer is complete: 40 tokens.")


def test_a_conversation_goes_on_and_a_new_one_starts_empty(site: Any, open_page: Any) -> None:
    page = open_page(site.url)
    page.locator("#options summary").click()
    page.locator("#system").fill("be brief")
    ask(page, "one", max_tokens="4")
    done(page)
    ask(page, "two", max_tokens="4")
    done(page)
    prompt = bytes(site.engine.submitted[-1].prompt_ids).decode()
    assert prompt == "system:be brief;user:one;assistant:syst;user:two;"
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#prompt")).to_be_focused()
    ask(page, "three", max_tokens="4", seed="7", temperature="0.5")
    done(page)
    last = site.engine.submitted[-1]
    assert bytes(last.prompt_ids).decode() == "system:be brief;user:three;"
    assert (last.params.max_tokens, last.params.seed, last.params.temperature) == (4, 7, 0.5)


def test_stop_ends_the_answer_in_the_engine_too(site: Any, open_page: Any) -> None:
    page = open_page(site.url)
    aborts = len(site.engine.aborts)
    ask(page, "a long one", max_tokens="500")
    expect(answer(page).locator(".body")).to_contain_text("user:a")
    page.get_by_role("button", name="Stop").click()
    done(page)
    expect(answer(page)).to_contain_text("stopped by you")
    expect(page.locator(".dot")).to_have_count(0)
    assert len(site.engine.aborts) > aborts and site.engine.running == 0
    expect(page.locator("#timeline-note")).to_contain_text("As the page saw it")


def test_text_of_the_model_is_never_markup(site: Any, open_page: Any) -> None:
    page = open_page(site.url)
    ask(page, "<img src=x onerror=alert(1)><b>x</b>", max_tokens="60")
    done(page)
    expect(answer(page).locator(".body")).to_contain_text("<b>x</b>")
    assert page.locator("#log img, #log b").count() == 0


def test_a_model_without_a_chat_template_goes_on_with_the_text(open_page: Any) -> None:
    with serving(chat_template=False) as site:
        page = open_page(site.url)
        expect(page.locator("#mode-hint")).to_contain_text("no chat template")
        ask(page, "abc", max_tokens="6")
        done(page)
        expect(answer(page).locator(".body")).to_have_text("abcabc")


def test_reasoning_is_folded_away(site: Any, open_page: Any) -> None:
    page = open_page(site.url)
    deltas = [{"role": "assistant", "reasoning_content": "hm, "}, {"reasoning_content": "<i>two</i>"}, {"content": "2"}]
    chunks = [{"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=body, headers={"content-type": "text/event-stream"})
    )
    ask(page, "1 + 1?")
    done(page)
    expect(answer(page).locator(".body")).to_have_text("2")
    thought = answer(page).locator(".thought-text")
    expect(thought).to_be_hidden()
    answer(page).get_by_text("Reasoning").click()
    expect(thought).to_have_text("hm, <i>two</i>")


def test_a_full_queue_says_when_to_come_again(site: Any, open_page: Any) -> None:
    page = open_page(site.url)
    site.engine.max_queued = 0
    try:
        ask(page, "is there room?", max_tokens="4")
        alert = answer(page).get_by_role("alert")
        expect(alert).to_have_text(re.compile(r"0 requests wait already\. Try again in \d+ s\."))
    finally:
        site.engine.max_queued = 64


# -- the picture and the timeline


def test_the_meshes_fill_and_the_request_crosses(site: Any, open_page: Any) -> None:
    page = open_page(site.url)
    expect(page.locator(".mesh.prefill .badge")).to_have_text("2×1")
    expect(page.locator(".mesh.decode .badge")).to_have_text("1×2")
    assert page.locator(".mesh.prefill .chip").count() == 2
    assert page.locator(".mesh.decode .replica").count() == 2
    page.evaluate(probe("watch"))
    site.engine.step_s = 0.2  # slower than the readings, so that each stage is seen
    try:
        ask(page, "watch this one cross from mesh to mesh", max_tokens="10")
        expect(page.locator(".mesh.decode .dot.decode.mine")).to_be_visible()
        done(page)
    finally:
        site.engine.step_s = STEP_S
    expect(page.locator(".dot")).to_have_count(0)
    expect(page.locator(".cell.mine")).to_have_count(0)
    seen = page.evaluate("window.seen")
    assert seen["places"] == ["queue", "prefill", "transfer", "decode"]
    assert seen["prefill"] == [3], "44 bytes on pages of 16, and back when the prompt has crossed"
    assert seen["decode"] == [4], "with room for the answer, in one replica"
    assert len(set(seen["filled"])) > 2, "pages fill one after another"
    expect(page.locator("#totals")).to_have_text("0 running · 0 queued")


def test_the_timeline_shows_every_stage_of_the_answer(site: Any, open_page: Any) -> None:
    page = open_page(site.url)
    ask(page, "where does the time go", max_tokens="20")
    done(page)
    chart = page.locator("#timeline")
    for stage in ("queue", "prefill", "transfer", "decode"):
        expect(chart.locator(f".bar.{stage}")).to_have_count(1)
    assert chart.locator(".chunk").count() == 4 and chart.locator(".exposed").count() == 1
    assert len(re.findall("M", chart.locator(".tokens").get_attribute("d"))) == 20
    times = page.locator("#times").text_content()
    assert re.search(r"\d+ ms exposed", times) and "20 out" in times
    before = chart.locator(".bar.prefill").bounding_box()["width"]
    page.get_by_role("button", name="First tokens").click()
    assert chart.locator(".bar.prefill").bounding_box()["width"] > 1.5 * before
    bar = chart.locator(".bar.transfer")
    bar.hover(position={"x": 3, "y": 5})
    expect(page.locator("#tip")).to_contain_text("Transfer: ")
    chart.locator(".bar.prefill").focus()
    expect(page.locator("#tip")).to_contain_text("Prefill: ")
    ask(page, "and another", max_tokens="5")
    done(page)
    expect(page.locator("#times")).to_contain_text("5 out")
    ask(page, "one that runs while somebody looks at the first", max_tokens="200")
    expect(page.locator("#times")).not_to_contain_text("5 out")
    page.locator(".summary").first.click()
    page.wait_for_timeout(300)
    expect(page.locator("#times")).to_contain_text("20 out")


# -- what goes wrong


def test_an_error_of_the_server_is_told_in_words(site: Any, open_page: Any) -> None:
    page = open_page(site.url)
    ask(page, "too much", max_tokens="5000")
    alert = answer(page).get_by_role("alert")
    expect(alert).to_contain_text("above the limit of 1024 (--max-model-len)")
    expect(page.locator("#prompt")).to_have_value("too much")
    expect(page.locator("#timeline-note")).to_contain_text("not answered")
    done(page)
    page.evaluate("document.querySelector('#max-tokens').value = '5'")
    page.locator("#prompt").press("Enter")
    expect(answer(page).locator(".summary")).to_contain_text("5 tokens")


def test_an_answer_that_fails_half_way_keeps_what_came_and_says_why(open_page: Any) -> None:
    with serving(chat_template=False) as site:
        page = open_page(site.url)
        ask(page, "!abc", max_tokens="50")
        expect(answer(page).get_by_role("alert")).to_contain_text("the device fell over (request ")
        expect(answer(page).locator(".body")).to_have_text("!ab")


def test_a_page_that_is_early_or_loses_the_server_recovers_by_itself(open_page: Any) -> None:
    with serving(opened=False) as site:
        page = open_page(site.url, ready=False)
        expect(page.locator("#state")).to_have_text("starting")
        expect(page.locator("#picture-note")).to_contain_text("loads weights")
        ask(page, "too early", max_tokens="24")
        expect(answer(page).get_by_role("alert")).to_contain_text("starting")
        site.call(site.open)
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator(".mesh.decode")).to_be_visible()
        page.locator("#prompt").press("Enter")
        expect(answer(page).locator(".body")).to_contain_text("user:too early;")
        done(page)
    expect(page.locator("#state")).to_have_text("no connection")
    page.locator("#prompt").fill("anyone?")
    page.locator("#prompt").press("Enter")
    expect(answer(page).get_by_role("alert")).to_have_text("The server does not answer. Is it still running?")
    page.close()


def test_a_key_is_asked_for_kept_in_the_tab_and_sent_along(open_page: Any) -> None:
    with serving(keys=Keys({"k-secret": Caller(name="ann")})) as site:
        page = open_page(site.url, ready=False)
        expect(page.locator("#state")).to_have_text("key needed")
        ask(page, "let me in")
        expect(answer(page).get_by_role("alert")).to_have_text("This server asks for an API key. Enter it above.")
        expect(page.locator("#key")).to_be_focused()
        page.locator("#max-tokens").evaluate("o => { o.value = 24 }")
        page.keyboard.type("k-secret")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#prompt")).to_be_focused()
        page.keyboard.press("Enter")
        expect(answer(page).locator(".body")).to_contain_text("user:let me in;")
        assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]


# -- everybody can use it


def test_the_keyboard_is_enough(site: Any, open_page: Any) -> None:
    page = open_page(site.url)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    expect(page.locator("#prompt")).to_have_value("first line\nsecond line")
    page.keyboard.press("Enter")
    expect(answer(page).locator(".body")).to_contain_text("user:first line")
    page.keyboard.press("Escape")
    expect(answer(page)).to_contain_text("stopped by you")
    expect(page.locator("#prompt")).to_be_focused()
    reached = []
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('class')"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        stroke = page.evaluate("getComputedStyle(document.activeElement).stroke")
        assert outline != "none" or stroke != "none" or reached[-1] is None, f"{reached[-1]} shows no focus"
    for wanted in ("send", "replica", "zoom-all", "zoom-start", "bar decode", "summary"):
        assert any(wanted in (name or "") for name in reached) or wanted == "summary", (wanted, reached)


def test_it_fits_a_phone(site: Any, open_page: Any) -> None:
    page = open_page(site.url, viewport=PHONE, has_touch=True, is_mobile=True)
    ask(page, "on the phone, with-a-word-that-is-much-longer-than-the-screen-is-wide-" + "x" * 80, max_tokens="150")
    expect(page.locator(".mesh.decode .dot")).to_be_visible()
    done(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for name in ("#prompt", "#send", ".mesh.prefill", ".mesh.decode", "#timeline svg"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"], name
    assert page.locator("#send").bounding_box()["height"] >= 32
    card, field = page.locator(".chat").bounding_box(), page.locator("#system").bounding_box()
    assert field["y"] + field["height"] < card["y"] + card["height"], "the options are inside their card"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(site: Any, open_page: Any, scheme: str) -> None:
    page = open_page(site.url, color_scheme=scheme)
    ask(page, "colours", max_tokens="8")
    done(page)
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") is (scheme == "dark")
    ratios = page.evaluate(probe("contrasts"))
    low = {text: ratio for text, ratio in ratios.items() if ratio < 4.5}
    assert len(ratios) > 20 and not low


def test_who_wants_no_motion_gets_none(site: Any, open_page: Any) -> None:
    page = open_page(site.url, reduced_motion="reduce")
    ask(page, "stand still", max_tokens="30")
    expect(page.locator(".dot.decode")).to_be_visible()
    assert page.evaluate("document.getAnimations().length") == 0
    done(page)
