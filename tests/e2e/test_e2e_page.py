"""The live page of a real daemon in a real browser."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.kit import inproc_config
from tests.kit.browser import DESKTOP, PHONE, browser
from tests.kit.inproc import RunningDaemon, running
from tests.kit.programs import need

pytestmark = pytest.mark.asyncio(loop_scope="module")
Shown = tuple[RunningDaemon, Browser]
CONTRAST = """() => {
  const rgb = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = (text) => rgb(text).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const found = getComputedStyle(node).backgroundColor;
      if (rgb(found)[3] !== 0) return found;
    }
    return "rgb(255, 255, 255)";
  };
  const worst = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.textContent.trim());
    if (!own || ["SCRIPT", "STYLE"].includes(node.tagName)) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
    worst.push([(a + 0.05) / (b + 0.05), node.tagName, node.textContent.slice(0, 40)]);
  }
  return worst.sort((x, y) => x[0] - y[0])[0];
}"""
"""The text with the least contrast, as WCAG 2 defines it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shown() -> AsyncIterator[Shown]:
    need("chromium")  # before a daemon starts in vain
    async with running(inproc_config(("V:AAA", "V:BBB"))) as daemon, browser() as chromium:
        await daemon.advance()
        yield daemon, chromium


async def opened(shown: Shown, size: tuple[int, int], **options: object) -> tuple[Page, list[str]]:
    """The page at this size, and what goes wrong on it; it must use nothing from elsewhere."""
    daemon, chromium = shown
    page = await chromium.new_page(viewport={"width": size[0], "height": size[1]}, **options)  # type: ignore[arg-type]  # a page's
    wrong: list[str] = []
    home = f"http://127.0.0.1:{daemon.port}/"
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("request", lambda sent: None if sent.url.startswith((home, "data:")) else wrong.append(sent.url))
    await page.goto(home)
    await expect(page.locator("#state")).to_have_text("live", timeout=20_000)
    return page, wrong


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_it_shows_every_session_and_answer_and_can_be_read(
    shown: Shown, size: tuple[int, int], scheme: str
) -> None:
    page, wrong = await opened(shown, size, color_scheme=scheme)
    assert await page.locator("h2:visible").all_text_contents() == ["aaa", "bbb", "Ask"]
    await expect(page.locator("td.answer:not(.none)")).to_have_count(12)
    assert "gap" in await page.locator("tbody tr").first.inner_text()
    widest = await page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert widest <= 0, "it scrolls sideways"
    ratio, *where = await page.evaluate(CONTRAST)
    assert ratio >= 4.5, where
    unnamed = await page.evaluate(
        "[...document.querySelectorAll('input, select')].filter((each) => !each.labels.length).length"
    )
    assert (unnamed, wrong) == (0, [])
    await page.close()


async def test_on_a_phone_ages_line_up_and_a_long_error_wraps(shown: Shown) -> None:
    page, wrong = await opened(shown, PHONE)
    await page.evaluate(
        "async (text) => (await import('/live/words.js')).setState(text, true)",
        "no connection to the daemon at " + "x" * 90,
    )
    widest = await page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert widest <= 0, "it scrolls sideways"
    edges = await page.evaluate(
        "[...document.querySelectorAll('tbody .age')].map((each) => each.getBoundingClientRect().right)"
    )
    assert len(edges) == 12
    assert len(set(edges)) == 1
    assert wrong == []
    await page.close()


async def test_answers_come_in_and_ages_tick(shown: Shown) -> None:
    page, wrong = await opened(shown, DESKTOP)
    daemon, _ = shown
    await daemon.advance()
    version = daemon.state().version
    await expect(page.locator("tbody tr").first.locator(".version")).to_have_text(f"v{version}")
    await expect(page.locator("#latency")).to_contain_text("median")
    assert await page.locator("#line").get_attribute("points")
    # the tape is of the past, where ages are in days: as if it had been received now
    ticks = await page.evaluate(
        """async () => {
          const { sessions } = await import("/live/sessions.js");
          const answer = sessions.get("aaa").answers.values().next().value;
          Object.assign(answer, { staleness_ns: 2e9, since: performance.now() });
          const age = () => document.querySelector("tbody tr .age").textContent;
          const seen = [];
          for (let i = 0; i < 2; i++) {
            await new Promise((done) => setTimeout(done, 400));
            seen.push(age());
          }
          return seen;
        }"""
    )
    first, second = (float(text.removesuffix(" s")) for text in ticks)
    assert 2 < first < second
    assert wrong == []
    await page.close()


async def test_what_is_missing_and_stale_is_said_in_words(shown: Shown) -> None:
    page, _ = await opened(shown, DESKTOP)
    await page.evaluate(
        """async () => {
          const { sessions, show } = await import("/live/sessions.js");
          const session = sessions.get("aaa"), [name, answer] = session.answers.entries().next().value;
          session.answers.delete(name);
          const other = session.answers.values().next().value;
          Object.assign(other, { flags: ["stale", "price_jump"], probability: 0.925 });
          show(session);
        }"""
    )
    await expect(page.locator("tbody tr").first).to_contain_text("missing")
    second = page.locator("tbody tr").nth(1)
    await expect(second).to_contain_text("92.5 %")
    await expect(second.locator(".flags")).to_have_text("stale price jump ")
    await page.close()


async def test_a_question_is_asked_by_keyboard_alone(shown: Shown) -> None:
    page, wrong = await opened(shown, PHONE)
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.className") == "skip"
    await page.locator("#ask-question").focus()
    await page.keyboard.type("Is it so?")
    await page.keyboard.press("Tab")
    await page.keyboard.type("YES, NO")
    await page.keyboard.press("Enter")
    await expect(page.locator("#ask-answer")).to_contain_text("gap", timeout=20_000)
    assert (await page.locator("#ask-answer .answer").inner_text()) in ("YES", "NO")
    assert wrong == []
    await page.close()


async def test_a_name_with_markup_is_text(shown: Shown) -> None:
    """Nothing that a client can name becomes part of the page."""
    page, wrong = await opened(shown, DESKTOP)
    await page.locator("#ask-question").fill("<img src=x onerror=alert(1)>")
    await page.locator("#ask-choices").fill("<b>A</b>,<b>B</b>")
    await page.locator("#ask button").click()
    await expect(page.locator("#ask-answer")).not_to_have_text("asking", timeout=20_000)
    assert await page.locator("#ask-answer b, #ask-answer img").count() == 0
    assert [each for each in wrong if "400" not in each] == []
    await page.close()
