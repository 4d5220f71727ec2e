"""A headless Chromium, and a picture of a running daemon's live page.

`python -m tests.kit.browser http://127.0.0.1:7800/ live.png` makes one. Those in docs/images:
`tests.docs.live_pictures`.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from playwright.async_api import Browser, async_playwright

from tests.kit.programs import need

DESKTOP, PHONE = (1200, 640), (390, 844)
SETTLE_S = 12.0


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """The browser of this machine. In a container it runs as root, where Chromium has no sandbox."""
    program = need("chromium")
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield found
        finally:
            await found.close()


async def picture(url: str, path: str, scheme: Literal["dark", "light"] = "dark") -> None:
    """Save the page as it is after some seconds of events."""
    async with browser() as chromium:
        width, height = DESKTOP
        page = await chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        await page.goto(url)
        await asyncio.sleep(SETTLE_S)
        await page.screenshot(path=path)


if __name__ == "__main__":
    asyncio.run(picture(sys.argv[1], sys.argv[2]))
