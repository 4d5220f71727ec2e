"""What the live page shows and what its reader can do with it, in a real browser; and its files."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace
from playwright.async_api import Browser, Page, expect

from daemon.api import messages
from daemon.api.live_page import DIRECTORY
from daemon.api.messages import AgeBlock, ProbabilityBin, QuestionQuality, Regime, Tally
from feeds.market_data import Answer
from tests.daemon.api.doors import Daemon
from tests.daemon.api.page_sessions import QUESTIONS, VERSIONS, answer, answered, session, signal, tell
from tests.kit import START
from tests.kit.browser import DESKTOP, PHONE, browser
from tests.kit.http import request
from tests.kit.programs import need

pytestmark = pytest.mark.asyncio(loop_scope="module")
MARKUP = "<img src=x onerror=alert(1)>"
SESSIONS = (session("one", "V:AAA"), session("two", "V:BBB"), session("three", "W:AAA", staleness_ns=9))
PIXELS = """(canvas) => {
  const { width, height } = canvas, data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const seen = {};
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] < 255) continue;
    const colour = data.slice(i, i + 3).join();
    seen[colour] = 1 + (seen[colour] ?? 0);
  }
  return seen;
}"""
"""How many pixels of each opaque colour."""
RESOLVED = """(name) => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color.match(/[0-9]+/g).join();
  probe.remove();
  return found;
}"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    need("chromium")
    async with browser() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def daemon() -> AsyncIterator[Daemon]:
    made = await Daemon("http").start()
    tell(made, SESSIONS, [signal(SESSIONS[1], 20)])
    yield made
    await made.server.stop()


@asynccontextmanager
async def opened(
    chromium: Browser, daemon: Daemon, path: str = "/", size: tuple[int, int] = DESKTOP, **options: Any
) -> AsyncIterator[Page]:
    """The page, on which nothing may go wrong and which loads nothing from elsewhere."""
    page = await chromium.new_page(viewport={"width": size[0], "height": size[1]}, **options)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    home = (daemon.address, "data:")
    page.on("request", lambda sent: None if sent.url.startswith(home) else wrong.append(sent.url))
    await page.goto(daemon.address + path)
    yield page
    assert wrong == []
    assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    await page.close()


async def live(page: Page) -> None:
    await expect(page.locator("#state")).to_have_text("live", timeout=20_000)


async def lines(cell: Any, text: str) -> int:
    """On how many lines a cell shows this text."""
    found: int = await cell.evaluate(
        """(cell, text) => {
            cell.textContent = text;
            const range = document.createRange();
            range.selectNodeContents(cell);
            return new Set([...range.getClientRects()].map((each) => each.top)).size;
        }""",
        text,
    )
    return found


def names(page: Page) -> Any:
    return page.locator("#sessions h2:visible").all_text_contents()


async def test_a_chart_shows_prices_ribbons_labels_and_signals(chromium: Browser, daemon: Daemon) -> None:
    async with opened(chromium, daemon) as page:
        await live(page)
        two = page.locator("[data-session=two]")
        await expect(two.locator(".judged").first).to_have_text(" 66.7 % of 30 right")
        seen = await two.locator("canvas").evaluate(PIXELS)
        colours = ("accent", "good", "bad", "warn")
        found = {name: seen.get(await page.evaluate(RESOLVED, name), 0) for name in colours}
        assert min(found.values()) > 4, found
        other = await page.locator("[data-session=one] canvas").evaluate(PIXELS)
        assert found["warn"] > 10 * other.get(await page.evaluate(RESOLVED, "warn"), 0), "no signal there"
        row = two.locator("tbody tr").first
        told = answered("trend", VERSIONS).choice_set or ()
        await expect(row.locator(".set")).to_have_text(", ".join(told) or "none")


async def test_a_price_and_a_heading_break_in_no_word(chromium: Browser, daemon: Daemon) -> None:
    async with opened(chromium, daemon, size=DESKTOP) as page:
        await live(page)
        assert await lines(page.locator("[data-session=two] tbody td.answer").first, "61837.11") == 1
    reply = messages.QualityReply(0, quality_of("one", 5))
    daemon.replies.append((messages.Quality(0, "one", "trend"), reply))
    async with opened(chromium, daemon, "/live/questions/trend", DESKTOP) as page:
        await expect(page.locator("#by-session tr")).to_have_count(1)
        assert await lines(page.locator("section:has(#by-session) th").nth(4), "probability") == 1


async def test_dragging_shows_the_answers_of_the_past(chromium: Browser, daemon: Daemon) -> None:
    async with opened(chromium, daemon) as page:
        await live(page)
        one = page.locator("[data-session=one]")
        await expect(one.locator(".judged").first).to_contain_text("right")
        plot = await one.locator(".u-over").bounding_box()
        assert plot is not None
        step = plot["width"] / VERSIONS
        for version in (12, 7):
            await page.mouse.move(plot["x"] + 2, plot["y"] + 30)
            await page.mouse.down()
            await page.mouse.move(plot["x"] + step * (version - 0.5), plot["y"] + 30, steps=4)
            await page.mouse.up()
            await expect(one.locator("header")).to_contain_text(f"v{version}")
            for n, name in enumerate(QUESTIONS):
                told, row = answered(name, version), one.locator("tbody tr").nth(n)
                await expect(row.locator(".answer")).to_have_text(told.text)
                await expect(row.locator(".sure")).to_have_text(f"{(told.probability or 0) * 100:.1f} %")
                right = "right" if told.text == told.label else f"wrong: {told.label}"
                await expect(row.locator(".flags")).to_have_text(f"{right} ")
        await expect(one.locator("header .tag")).to_have_text("the past")
        await one.get_by_role("button", name="now").click()
        await expect(one.locator("header .tag")).to_have_count(0)
        await expect(one.locator("tbody .answer").first).to_have_text(answered("trend", VERSIONS).text)


async def test_the_past_is_there_by_keyboard_alone(chromium: Browser, daemon: Daemon) -> None:
    async with opened(chromium, daemon) as page:
        await live(page)
        one = page.locator("[data-session=one]")
        await expect(one.locator(".judged").first).to_contain_text("right")
        slider = one.get_by_role("slider")
        await slider.focus()
        for key, back in (("ArrowLeft", 1), ("ArrowLeft", 2), ("ArrowRight", 1), ("Home", VERSIONS - 1)):
            version = VERSIONS - back
            await page.keyboard.press(key)
            await expect(one.locator("header")).to_contain_text(f"v{version}")
            await expect(slider).to_have_attribute("aria-valuenow", str(version))
        await page.keyboard.press("Escape")
        await expect(one.locator("header")).to_contain_text(f"v{VERSIONS}")


async def test_sessions_are_filtered_searched_and_sorted(chromium: Browser, daemon: Daemon) -> None:
    unsure = answer(SESSIONS[2], "trend", text="SIDEWAYS", probability=0.3)
    daemon.replies.insert(0, (messages.Answers(0, "three"), messages.AnswersReply(0, "three", (unsure,))))
    async with opened(chromium, daemon) as page:
        await live(page)
        assert await names(page) == ["one", "two", "three"]
        for order, expected in {
            "symbol": ["one", "two", "three"],
            "age": ["one", "two", "three"],
            "sure": ["three", "one", "two"],
            "signal": ["two", "one", "three"],
        }.items():
            await page.locator("#sort").select_option(order)
            assert await names(page) == expected
        await page.locator("#symbol").select_option("W:AAA")
        assert await names(page) == ["three"]
        await expect(page.locator("#shown")).to_have_text("1 of 3 sessions")
        await page.locator("#symbol").select_option("")
        for text, expected in {"aaa": ["one", "three"], "SIDEWAYS w:": ["three"], "nowhere": []}.items():
            await page.locator("#search").fill(text)
            assert sorted(await names(page)) == sorted(expected)


async def test_light_and_dark_follow_the_system_until_one_is_chosen(
    chromium: Browser, daemon: Daemon
) -> None:
    async with opened(chromium, daemon, color_scheme="dark") as page:
        await live(page)
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = await page.evaluate(ground)
        await page.emulate_media(color_scheme="light")
        light = await page.evaluate(ground)
        assert light != dark
        for theme, expected in (("light", light), ("dark", dark)):
            await page.locator("#theme").click()
            await expect(page.locator("#theme")).to_have_text(f"colours: {theme}")
            assert await page.evaluate(ground) == expected
        await page.reload()
        await live(page)
        assert await page.evaluate(ground) == dark, "this browser keeps it"
        axis = await page.evaluate(RESOLVED, "accent")
        await expect(page.locator("[data-session=one] .judged").first).to_contain_text("right")
        assert axis in await page.locator("[data-session=one] canvas").evaluate(PIXELS)


async def test_news_come_in_without_a_reload(chromium: Browser, daemon: Daemon) -> None:
    info = SESSIONS[0]
    async with opened(chromium, daemon) as page:
        await live(page)
        daemon.events.publish(answer(info, "trend", text="SIDEWAYS", data_version=VERSIONS + 1))
        first = page.locator("[data-session=one] tbody tr").first
        await expect(first.locator(".answer")).to_have_text("SIDEWAYS")
        await expect(first.locator(".version")).to_have_text(f"v{VERSIONS + 1}")
        daemon.events.publish(signal(info, VERSIONS, "late turn"))
        await expect(page.locator("#fired tr").first).to_contain_text("late turn")
        await expect(page.locator("#fired tr")).to_have_count(2)


async def test_markup_in_names_and_answers_is_text(chromium: Browser, daemon: Daemon) -> None:
    """From a feed, a model or a client, on both pages."""
    info = session(f"s{MARKUP}", f"V:{MARKUP}", more_symbols=(f"V:2{MARKUP}",), questions=(MARKUP,))
    told: Answer = replace(answer(info, "trend"), question=MARKUP, text=MARKUP, choice_set=(MARKUP,))
    tell(daemon, [info], [signal(info, 3, MARKUP)])
    past = messages.PastVersion(9, START, "1", (messages.PastAnswer(MARKUP, MARKUP, 1.0, label="x"),))
    asked = messages.QuestionInfo(
        MARKUP, MARKUP, (MARKUP, "x"), 1, "text", "always", 0.8, 2.0, "0", 1, 1, 0, 0
    )
    quality = QuestionQuality(info.name, MARKUP, 1, Tally(1, 0, 0, None, 0, 0), (), (), ())
    daemon.replies = [
        (messages.Answers(0, info.name), messages.AnswersReply(0, info.name, (told,))),
        (messages.ListVersions(0, info.name), messages.VersionsReply(0, info.name, 0, 9, 9, (past,))),
        (messages.ListQuestions(0, info.name), messages.QuestionsReply(0, info.name, (asked,))),
        (messages.Quality(0, info.name, MARKUP), messages.QualityReply(0, quality)),
        *daemon.replies,
    ]
    async with opened(chromium, daemon) as page:
        await live(page)
        await expect(page.locator("td.answer", has_text=MARKUP).first).to_be_visible()
        await expect(page.locator("#fired")).to_contain_text(MARKUP)
        await expect(page.locator(".judged")).to_contain_text("right")
        assert await page.locator("img, script:not([src])").count() == 0
        await page.locator("tbody th a").click()
        await expect(page.locator("#name")).to_have_text(MARKUP)
        await expect(page.locator("#by-session")).to_contain_text(MARKUP)
        assert await page.locator("img").count() == 0


def quality_of(name: str, right: int) -> QuestionQuality:
    bins = tuple(ProbabilityBin(n / 10, Tally(20, 20, right + n, n / 10 + 0.05, 18, 20)) for n in (5, 6, 8))
    ages = tuple(AgeBlock(ago, START, 1.5, Tally(30, 20, right, 0.7, 18, 20)) for ago in (60, 30, 0))
    total = Tally(90, 60, 3 * right, 0.7, 54, 60)
    return QuestionQuality(name, "trend", 90, total, bins, (Regime("calm", total),), ages, 1.25)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_a_question_has_a_page_with_its_quality(
    chromium: Browser, daemon: Daemon, size: tuple[int, int]
) -> None:
    rights = {"one": 5, "two": 11, "three": 8}
    daemon.replies += [
        (messages.Quality(0, name, "trend"), messages.QualityReply(0, quality_of(name, right)))
        for name, right in rights.items()
    ]
    async with opened(chromium, daemon, "/live/questions/trend", size) as page:
        await expect(page.locator("#state")).to_have_text("the newest 90 versions", timeout=20_000)
        await expect(page.locator("#text")).to_contain_text("What of the trend?")
        facts = page.locator("#facts")
        await expect(facts).to_contain_text(re.compile(r"with a label\s*180"))
        await expect(facts).to_contain_text(re.compile(r"right\s*40.0 %"))
        await expect(facts).to_contain_text(re.compile(r"at calibration\s*1.25"))
        await expect(page.locator("#reliability .point")).to_have_count(3)
        await expect(page.locator("#regimes tr")).to_have_count(1)
        await expect(page.locator("#by-session tr")).to_have_count(3)
        await expect(page.locator("#drift canvas, #gaps canvas")).to_have_count(2)
        await page.locator("#session").select_option("two")
        await expect(facts).to_contain_text(re.compile(r"right\s*55.0 %"))
        heights = await page.locator("#reliability .point").evaluate_all(
            "all => all.map((each) => +each.getAttribute('cy'))"
        )
        inner = 300 - 36 - 14
        expected = [8 + (1 - (11 + n) / 20) * inner for n in (5, 6, 8)]
        assert heights == pytest.approx(expected)


async def test_a_question_without_labels_says_where_they_come_from(chromium: Browser, daemon: Daemon) -> None:
    empty = Tally(5, 0, 0, None, 0, 0)
    for each in SESSIONS:
        quality = QuestionQuality(each.name, "trend", 5, empty, (), (), ())
        asked = messages.Quality(0, each.name, "trend")
        daemon.replies.append((asked, messages.QualityReply(0, quality)))
    async with opened(chromium, daemon, "/live/questions/trend") as page:
        await expect(page.locator("#unlabelled")).to_contain_text("/v1/labels")
        await expect(page.locator("#facts")).to_contain_text(re.compile(r"right\s*not known"))


async def test_shares_have_their_interval_and_tallies_add_up(chromium: Browser, daemon: Daemon) -> None:
    """Against Wilson's formula as it is printed, and a mean over all labels."""
    async with opened(chromium, daemon, "/live/questions/none") as page:
        least, most = await page.evaluate("async () => (await import('/live/question.js')).interval(8, 10)")
        z, p, n = 1.96, 0.8, 10
        for bound in (least, most):
            assert abs(p - bound) == pytest.approx(z * (bound * (1 - bound) / n) ** 0.5)
        total = await page.evaluate(
            """async () => (await import('/live/question.js')).sum([
              { answers: 5, labels: 2, right: 1, covered: 1, sets: 2, probability: 0.5 },
              { answers: 3, labels: 0, right: 0, covered: 0, sets: 0, probability: null },
              { answers: 4, labels: 4, right: 4, covered: 3, sets: 3, probability: 0.8 },
            ])"""
        )
    counts = {"answers": 12, "labels": 6, "right": 5, "covered": 4, "sets": 5}
    assert total == counts | {"probability": pytest.approx((2 * 0.5 + 4 * 0.8) / 6)}


async def test_files_have_a_policy_and_a_tag_and_lead_nowhere_else(daemon: Daemon) -> None:
    port = daemon.port
    for path in ("/", "/live/questions/any", *(f"/live/{each.name}" for each in DIRECTORY.iterdir())):
        found = await request(port, "GET", path)
        assert (found.status, found.headers["cache-control"]) == (200, "no-cache"), path
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        again = await request(port, "GET", path, headers={"if-none-match": found.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
    paths = (
        "/live/",
        "/live/../live_page.py",
        "/live/%2e%2e/live_page.py",
        "/live//etc/passwd",
        "/live/x",
        "/live/questions/a/b",
    )
    for path in paths:
        assert (await request(port, "GET", path)).status == 404, path
    assert (await request(port, "POST", "/live/live.css")).status == 405
