"""Frames that the live page drops at 300 sessions; `pytest -m long -s` prints them."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace
from playwright.async_api import expect

from feeds.market_data import DataUpdated
from tests.daemon.api.doors import Daemon
from tests.daemon.api.page_sessions import QUESTIONS, VERSIONS, answer, session, tell
from tests.kit import START
from tests.kit.browser import DESKTOP, browser
from tests.kit.programs import need

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
COUNT, SECONDS, PARTS = 300, 20, 50
FRAMES = """async ([seconds, step]) => {
  const times = [];
  await new Promise((done) => requestAnimationFrame(function frame(now) {
    times.push(now);
    if (step) scrollTo(0, (scrollY + step) % (document.documentElement.scrollHeight - innerHeight));
    now - times[0] < seconds * 1000 ? requestAnimationFrame(frame) : done();
  }));
  const frame = 1000 / 60, gaps = times.slice(1).map((time, n) => time - times[n]);
  return {
    due: Math.round((times.at(-1) - times[0]) / frame),
    dropped: gaps.reduce((n, gap) => n + Math.max(0, Math.round(gap / frame) - 1), 0),
    longest: Math.max(...gaps),
  };
}"""
"""Frames of a screen of 60 Hz that were due, and those without a picture; scrolls by ``step`` a frame."""
SESSIONS = [session(f"s{n:03d}", f"V:S{n:03d}") for n in range(COUNT)]


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    need("chromium")
    made = await Daemon("http").start()
    tell(made, SESSIONS)
    yield made
    await made.server.stop()


async def news(daemon: Daemon, told: list[int]) -> None:
    """A version of each session a second, with all its answers, spread over the second; counts answers."""
    answers = [[answer(each, name) for name in QUESTIONS * 3] for each in SESSIONS]
    begun, part = time.monotonic(), 0
    while True:
        version = VERSIONS + 1 + part // PARTS
        for n in range(part % PARTS, COUNT, PARTS):
            daemon.events.publish(
                DataUpdated(session=SESSIONS[n].name, data_version=version, as_of=START, bars=1)
            )
            for each in answers[n]:
                daemon.events.publish(replace(each, data_version=version, answer_id=f"{told[0]}"))
                told[0] += 1
        part += 1
        await asyncio.sleep(max(0.0, begun + part / PARTS - time.monotonic()))


@pytest.mark.parametrize("step", [0, 8], ids=["still", "scrolling"])
async def test_frames_dropped_at_300_sessions(daemon: Daemon, step: int) -> None:
    async with browser() as chromium:
        page = await chromium.new_page(viewport={"width": DESKTOP[0], "height": DESKTOP[1]})
        wrong: list[Any] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        await page.goto(daemon.address)
        await expect(page.locator("#sessions > section")).to_have_count(COUNT, timeout=60_000)
        await expect(page.locator(".judged").first).to_contain_text("right", timeout=60_000)
        told = [0]
        publishing = asyncio.create_task(news(daemon, told))
        try:
            await asyncio.sleep(2)
            before, began = told[0], time.monotonic()
            found = await page.evaluate(FRAMES, [SECONDS, step])
            rate = (told[0] - before) / (time.monotonic() - began)
        finally:
            publishing.cancel()
        share = found["dropped"] / found["due"]
        print(
            f"\n{COUNT} sessions, {rate:.0f} answers a second, {'scrolling' if step else 'still'}: "
            f"{found['dropped']} of {found['due']} frames dropped ({share:.1%}), "
            f"longest {found['longest']:.0f} ms"
        )
        assert wrong == []
        assert found["due"] > 0
