"""The live page on a phone, in a real browser, with all that is long: names, questions, answers, errors."""

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from playwright.async_api import Page, expect

from daemon.api import messages
from daemon.api.messages import MAX_QUESTION_CHARS, ErrorReply, SessionInfo
from tests.daemon.api.doors import Daemon
from tests.daemon.api.test_api_query import PUBLISHED
from tests.kit.browser import DESKTOP, PHONE, browser
from tests.kit.programs import need

COUNT = 30
QUESTIONS = ("up", "q" * 64, "Is_the_last_close_in_the_upper_third_of_the_range_of_thirty_bars")
ERROR = f"there is no room for {'x' * 700} and the engine says {'why ' * 300}"
AGES = (0, 2_500_000_000, 99 * 10**9, 35_000 * 10**9, 10**15, 10**18)
OVERFLOWING = """() => [...document.querySelectorAll("body *")]
  .filter((each) => each.getClientRects().length && each.getBoundingClientRect().left > -500)
  .map((each) => [each.tagName, each.className, each.getBoundingClientRect(), each.textContent.slice(0, 40)])
  .filter(([tag, name, box]) => (box.right > innerWidth + 0.5 || box.left < -0.5))
  .map(([tag, name, box, text]) => [tag, String(name), box.left, box.right, text])"""
"""What sticks out of the window on either side, but for what is only read aloud."""
CLIPPED = """() => [...document.querySelectorAll("h2, th[scope=row], td, header span, .tag, output")]
  .filter((each) => each.getClientRects().length && each.clientWidth)
  .filter((each) => each.scrollWidth > each.clientWidth + 1)
  .map((each) => [each.tagName, each.className, each.scrollWidth, each.clientWidth])"""
"""What is wider than the box it has."""


STATE = "async (text) => (await import('/live/words.js')).setState(text, true)"
ENTERED = "async (text) => { (await import('/live/sessions.js')).entered(text); }"
BROKEN = """() => [...document.querySelectorAll(".flags .tag")]
  .filter((each) => !each.textContent.includes(" "))
  .filter((each) => each.getBoundingClientRect().height > 1.5 * parseFloat(getComputedStyle(each).lineHeight))
  .map((each) => each.textContent)"""
"""Flags of one word that take two lines."""


def session(number: int) -> SessionInfo:
    """Of 30, the first has short names, the second the longest there are, others something between."""
    length = (1, 128)[number] if number < 2 else 4 * number
    name = f"{number:02d}".ljust(length, "n")
    symbols = tuple(f"{'V' * 64}:{'S' * 64}{each}" for each in range(number % 3))
    info = SessionInfo(
        name, f"VENUE:{'SYMBOL' * (1 + number)}"[:129], number, 9, 9, 1, AGES[number % 6], QUESTIONS
    )
    silent = number % 4 == 1
    return msgspec.structs.replace(
        info, more_symbols=symbols, silent=silent, last_seen_age_ns=5 * 10**9, bars_waiting=number % 5
    )


SESSIONS = [session(number) for number in range(COUNT)]


def answers(info: SessionInfo) -> tuple[Any, ...]:
    flags = ("stale", "gap", "warm_up", "skewed_clock", "untrained", "abstained", "provisional", "price_jump")
    return tuple(
        msgspec.structs.replace(
            PUBLISHED, session=info.name, symbol=info.symbol, question=question,
            data_version=info.data_version, text=("YES", "word " * 60, "w" * 300)[number],
            staleness_ns=info.staleness_ns, flags=flags[: number * 4], logit_gap=10.0**number,
            probability=(None, 0.5, 1.0)[number], choice_set=(None, ("YES", "w" * 300), ())[number],
        )
        for number, question in enumerate(QUESTIONS)
    )  # fmt: skip


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    need("chromium")
    made = await Daemon("http").start()
    made.replies = [(messages.ListSessions(0), messages.SessionsReply(0, tuple(SESSIONS)))]
    made.replies += [
        (messages.Answers(0, each.name), messages.AnswersReply(0, each.name, answers(each)))
        for each in SESSIONS
    ]
    made.replies += [
        (messages.ListQuestions(0, each.name), messages.QuestionsReply(0, each.name, ())) for each in SESSIONS
    ]
    made.replies += [
        (messages.ListVersions(0, each.name), messages.VersionsReply(0, each.name, 0, 0, 0, ()))
        for each in SESSIONS
    ]
    made.replies.append((messages.ListSignals(0), messages.SignalsReply(0, (), ())))
    made.otherwise = ErrorReply(0, "busy", ERROR)
    yield made
    await made.server.stop()


async def fits(page: Page) -> None:
    """Nothing scrolls sideways, sticks out or is cut off."""
    assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert await page.evaluate(OVERFLOWING) == []
    assert await page.evaluate(CLIPPED) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("size", "scheme"),
    [(PHONE, "light"), (PHONE, "dark"), ((320, 640), "dark"), (DESKTOP, "light")],
    ids=["phone", "phone_dark", "small", "desktop"],
)
async def test_thirty_sessions_with_long_names_fit(
    daemon: Daemon, size: tuple[int, int], scheme: Any, tmp_path: Any
) -> None:
    async with browser() as chromium:
        page = await chromium.new_page(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, has_touch=True
        )
        await page.goto(daemon.address)
        await expect(page.locator("#state")).to_have_text("live", timeout=30_000)
        await expect(page.locator("td.answer:not(.none)")).to_have_count(
            COUNT * len(QUESTIONS), timeout=30_000
        )
        await fits(page)
        for number in range(0, COUNT, 7):  # ages of a session end at one edge, whatever their unit
            rows = f"#sessions > section:nth-child({number + 1}) tbody .age"
            edges = await page.locator(rows).evaluate_all(
                "all => all.map((each) => { const text = document.createRange();"
                " text.selectNodeContents(each); return Math.round(text.getBoundingClientRect().right); })"
            )
            assert len(edges) == len(QUESTIONS)
            assert len(set(edges)) == 1, edges
        assert await page.evaluate(BROKEN) == []
        assert "NaN" not in await page.locator("body").inner_text()
        assert re.search(
            r"silent for \d", await page.locator("#sessions > section").nth(1).text_content() or ""
        )
        await page.evaluate("document.getElementById('ask').scrollIntoView()")
        await page.locator("#ask-question").fill("why " * 400)
        await page.locator("#ask-choices").fill("c" * 250 + "," + "d" * 250)
        await page.locator("#ask button").click()
        told = page.locator("#ask-answer .tag")
        await expect(told).to_contain_text("there is no room", timeout=30_000)
        await fits(page)
        heights = await told.evaluate(
            "each => [each.getBoundingClientRect().height, parseFloat(getComputedStyle(each).lineHeight)]"
        )
        assert heights[0] > 3 * heights[1], "it takes several lines"
        await page.evaluate(STATE, f"not connected: {ERROR}")
        await fits(page)


async def test_a_key_is_asked_for_in_words_that_fit(daemon: Daemon) -> None:
    async with browser() as chromium:
        page = await chromium.new_page(viewport={"width": PHONE[0], "height": PHONE[1]})
        await page.goto(daemon.address)
        await expect(page.locator("#state")).to_have_text("live", timeout=30_000)
        await page.evaluate(ENTERED, ERROR)
        await expect(page.locator("#entry")).to_be_visible()
        await fits(page)
    assert len(ERROR) < MAX_QUESTION_CHARS
