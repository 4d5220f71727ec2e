"""Pictures of the live page in docs/images: `python -m tests.docs.live_pictures` makes them.

The server and the page are the daemon's own; sessions, answers and labels are made up.
"""

import asyncio
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser, expect

from daemon.api import messages
from daemon.gateway.question_quality import by_age, by_regime, found_in, reliability, tally_of
from tests.daemon.api.doors import Daemon
from tests.daemon.api.page_sessions import VERSIONS, session, signal, tell, versions
from tests.kit.browser import PHONE, browser

FOLDER = Path(__file__).parents[2] / "docs" / "images"
WIDE = (1200, 760)
SESSIONS = (session("alpha", "DEMO:ALPHA"), session("beta", "DEMO:BETA"), session("gamma", "DEMO:GAMMA"))
_SETTLE_S = 2.0


async def picture(
    chromium: Browser,
    url: str,
    name: str,
    size: tuple[int, int],
    scheme: Literal["dark", "light"],
    ready: str,
) -> None:
    """Save the page once ``ready`` is there."""
    page = await chromium.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    await page.goto(url)
    await expect(page.locator(ready).first).to_be_visible(timeout=30_000)
    await asyncio.sleep(_SETTLE_S)
    await page.screenshot(path=FOLDER / name)
    await page.close()


async def main() -> None:
    """Make all of them."""
    daemon = await Daemon("http").start()
    tell(daemon, SESSIONS, [signal(SESSIONS[0], 12), signal(SESSIONS[1], 31)])
    kept = versions()
    found = found_in(kept, "trend")
    for each in SESSIONS:
        quality = messages.QuestionQuality(
            each.name, "trend", len(kept), tally_of(a for _, a in found), reliability(a for _, a in found),
            by_regime(kept, found), by_age(VERSIONS, VERSIONS, found), 1.04,
        )  # fmt: skip
        asked = messages.Quality(0, each.name, "trend")
        daemon.replies.append((asked, messages.QualityReply(0, quality)))
    async with browser() as chromium:
        await picture(chromium, daemon.address, "live.png", WIDE, "dark", ".judged:not(:empty)")
        await picture(chromium, daemon.address, "live_phone.png", PHONE, "light", ".judged:not(:empty)")
        question = f"{daemon.address}/live/questions/trend"
        await picture(chromium, question, "live_question.png", WIDE, "light", "#reliability .point")
    await daemon.server.stop()


if __name__ == "__main__":
    asyncio.run(main())
