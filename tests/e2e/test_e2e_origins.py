"""Web pages of another origin, in a real browser: what they may, and may not, do with a daemon."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from playwright.async_api import Page

from daemon.config.checks import cross_check
from daemon.config.schema import HttpConfig, QueryConfig, TenantsConfig
from daemon.tenants import hash_of, new_key
from tests.kit import inproc_config
from tests.kit.browser import browser
from tests.kit.inproc import RunningDaemon, running
from tests.kit.programs import need

KEY = new_key()
FETCH = """async ([url, method, body, headers]) => {
  try {
    const reply = await fetch(url, {method, headers, body: body && JSON.stringify(body)});
    return [reply.status, await reply.json(), reply.headers.get("retry-after")];
  } catch (error) { return [0, String(error), null]; }
}"""
LISTEN = """(url) => new Promise((done) => {
  const source = new EventSource(url);
  source.addEventListener("answer", (event) => { source.close(); done(JSON.parse(event.data).session); });
  source.onerror = () => { source.close(); done("refused"); };
})"""
CONVERSE = """(url) => new Promise((done) => {
  const socket = new WebSocket(url, ["foretick"]);
  socket.onopen = () => socket.send(JSON.stringify({type: "sessions", id: 1}));
  socket.onmessage = (event) => { socket.close(); done(JSON.parse(event.data).type); };
  socket.onerror = () => done("refused");
})"""


class Empty(BaseHTTPRequestHandler):
    """A page with nothing on it."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>desk</title>")

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def site() -> Iterator[str]:
    """Its origin. For a browser localhost and 127.0.0.1 are different sites."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://localhost:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@asynccontextmanager
async def visited(origin: str) -> AsyncIterator[Page]:
    async with browser() as chromium:
        page = await chromium.new_page()
        await page.goto(origin)
        yield page


async def fetched(
    page: Page, daemon: RunningDaemon, method: str, path: str, body: object = None, **headers: str
) -> list[Any]:
    """Status, body, and the header retry-after; status 0 where the page may not read the reply."""
    url = f"http://127.0.0.1:{daemon.port}{path}"
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    sent |= {} if body is None else {"content-type": "application/json"}
    found: list[Any] = await page.evaluate(FETCH, [url, method, body, sent])
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("allowed", [True, False])
async def test_a_page_of_another_origin_uses_the_api_where_it_is_allowed(allowed: bool) -> None:
    """By fetch with and without a preflight, by EventSource and by WebSocket."""
    need("chromium")
    with site() as origin:
        http = HttpConfig(port=0, allowed_origins=(origin,) if allowed else ("http://localhost:1",))
        async with running(inproc_config(http=http)) as daemon, visited(origin) as page:
            await daemon.advance()
            status, listed, _ = await fetched(page, daemon, "GET", "/v1/sessions")
            question = {"session": "aaa", "question": "Did it close up?", "choices": ["YES", "NO"]}
            asked, answer, _ = await fetched(page, daemon, "POST", "/v1/ask", question)
            here = f"127.0.0.1:{daemon.port}"
            spoken = await page.evaluate(CONVERSE, f"ws://{here}/v1/ws")
            listening = asyncio.create_task(page.evaluate(LISTEN, f"http://{here}/v1/events"))
            while not listening.done():  # it hears what comes once it is connected
                await daemon.advance()
            if not allowed:
                assert (status, asked, spoken, listening.result()) == (0, 0, "refused", "refused")
                return
            assert (status, asked) == (200, 200), answer
            assert [each["name"] for each in listed["sessions"]] == ["aaa"]
            assert (spoken, listening.result()) == ("sessions_reply", "aaa")


async def test_a_page_sends_its_key_and_reads_why_it_is_refused(tmp_path: Path) -> None:
    """A preflight has no key; it is answered all the same."""
    need("chromium")
    file = tmp_path / "tenants.toml"
    file.write_text(
        f'[[tenants]]\nname = "desk"\nsessions = ["*"]\noperator = true\napi_keys = ["{hash_of(KEY)}"]'
    )
    with site() as origin:
        config = replace(
            inproc_config(http=HttpConfig(port=0, allowed_origins=(origin,))),
            tenants=TenantsConfig(str(file)),
            query=QueryConfig(endpoint=""),
        )
        async with running(config) as daemon, visited(origin) as page:
            found = await fetched(page, daemon, "GET", "/v1/sessions", authorization=f"Bearer {KEY}")
            refused = await fetched(page, daemon, "GET", "/v1/sessions", authorization="Bearer nonsense")
            stranger = await fetched(page, daemon, "GET", "/v1/sessions")
    assert found[0] == 200
    assert refused[0] == stranger[0] == 401
    assert "key" in refused[1]["message"]


@pytest.mark.parametrize(
    "origin", ["*", "desk.example", "https://desk.example/", "HTTPS://desk.example", "https://a.example:443",
               "https://a.example:port", "ftp://a.example", "https://", "null", "https://user@a.example"],
)  # fmt: skip
def test_what_browsers_would_never_send_is_no_origin(origin: str) -> None:
    config = inproc_config(http=HttpConfig(port=0, allowed_origins=("https://[::1]:8443", origin)))
    (problem,) = cross_check(config)
    assert problem.key == "http.allowed_origins[1]"
