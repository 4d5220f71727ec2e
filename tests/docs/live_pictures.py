"""Pictures of the live page in docs/images: `python -m tests.docs.live_pictures` makes them.

The daemon is a real one with the model of the package, over some minutes of generated trades
as if they were of now. Its questions have rules, so that their answers are labelled, and there are signals.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser, expect

from daemon.config.schema import (
    ClauseConfig,
    Config,
    ModelConfig,
    QuestionConfig,
    SessionConfig,
    SignalConfig,
)
from feeds.codec import encode
from feeds.synthetic import INSTRUMENTS, SyntheticTape
from tapes.rules import RULES
from tests.kit import SECOND, incoming, inproc_config
from tests.kit.browser import PHONE, browser
from tests.kit.inproc import RunningDaemon, running

FOLDER = Path(__file__).parents[2] / "docs" / "images"
SECONDS, SEED, WINDOW = 150, 7, 64
WIDE = (1200, 900)
_SETTLE_S, _PACE_S = 8.0, 0.2
_RULES = {
    "trend": '"close > close[10]"\nwhere = "abs(close - close[10]) > 0"',
    "breakout": '"close > highest(high, 20)[1]"',
    "volatility": '"mean(high - low, 10) > mean(high - low, 20)[10]"',
    "range_location": '["place > 2 / 3", "place > 1 / 3"]\n[define]\n'
    'place = "(close - lowest(low, 30)) / (highest(high, 30) - lowest(low, 30))"',
}
"""Questions of the model, as rules of a question's file."""


def config(folder: Path) -> Config:
    """Three sessions and two signals; the questions' files go into the folder."""
    questions = []
    for rule in (each for each in RULES if each.name in _RULES):
        file = folder / f"{rule.name}.toml"
        head = f'name = "{rule.name}"\ntext = "{rule.text}"\nchoices = {list(rule.choices)}\n'
        file.write_text(f"{head}rule = {_RULES[rule.name]}\n", encoding="utf-8")
        questions.append(QuestionConfig(rule.name, rule.text, rule.choices, rule=str(file)))
    sessions = tuple(
        SessionConfig(name=i.symbol.lower(), symbol=i.key, price_decimals=5 if i.tick == 10_000 else 2,
                      retention_tokens=2048, retention_records=WINDOW)
        for i in INSTRUMENTS
    )  # fmt: skip
    signals = (
        SignalConfig("breaks_out", (ClauseConfig("breakout", answer=("YES",)),)),
        SignalConfig(
            "turns_up", (ClauseConfig("trend", changed=True, before=("DOWN",), min_probability=0.9),)
        ),
    )
    return inproc_config(
        sessions=sessions, model=ModelConfig(), standing="none", questions=tuple(questions), signals=signals
    )


@contextlib.asynccontextmanager
async def shown() -> AsyncIterator[RunningDaemon]:
    """A daemon that has answered and labelled all but the newest bars."""
    with tempfile.TemporaryDirectory() as folder:
        async with running(config(Path(folder)), signals="signals.v1") as daemon:
            tapes, offset = [SyntheticTape(each, SEED) for each in INSTRUMENTS], 0
            begin = time.time_ns() // SECOND - SECONDS
            for second in range(SECONDS):
                trades = sorted(
                    (trade for tape in tapes for trade in tape.second((begin + second) * SECOND)),
                    key=lambda trade: trade.ts_event,
                )
                daemon.source.put([incoming(encode(each), offset + n) for n, each in enumerate(trades)])
                offset += len(trades)
                await asyncio.sleep(_PACE_S)
            yield daemon


async def picture(
    chromium: Browser,
    url: str,
    name: str,
    size: tuple[int, int],
    scheme: Literal["dark", "light"],
    ready: str,
) -> None:
    """Save the page once ``ready`` is there and its events have settled."""
    page = await chromium.new_page(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, locale="en-GB"
    )
    await page.goto(url)
    await expect(page.locator(ready).first).to_be_visible(timeout=30_000)
    await asyncio.sleep(_SETTLE_S)
    await page.screenshot(path=FOLDER / name)
    await page.close()


async def main() -> None:
    """Make all of them."""
    async with shown() as daemon, browser() as chromium:
        home = f"http://127.0.0.1:{daemon.port}/"
        await picture(chromium, home, "live.png", WIDE, "dark", ".judged:not(:empty)")
        await picture(chromium, home, "live_phone.png", PHONE, "light", ".judged:not(:empty)")
        question = f"{home}live/questions/breakout"
        await picture(chromium, question, "live_question.png", WIDE, "light", "#reliability .point")


if __name__ == "__main__":
    asyncio.run(main())
