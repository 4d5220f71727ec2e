"""Two tenants and an operator at one real daemon: each tries to see, use or time what is another's."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
import zmq
from click.testing import CliRunner
from playwright.async_api import expect

from daemon.api import messages
from daemon.api.client import AsyncQueryClient
from daemon.cli.main import main
from daemon.config.schema import QueryConfig, SchedulerConfig, TenantsConfig
from daemon.tenants import hash_of, new_key
from feeds.connectors.http import HttpSourceConnector
from feeds.curve import Keys, make_keys
from tests.kit import QueueSource, inproc_config
from tests.kit.browser import DESKTOP, browser
from tests.kit.http import Reply, conversing, listening
from tests.kit.inproc import RunningDaemon, running

_TRACE_ID = re.compile(rb"[0-9a-f]{32}")
"""Each request has another one."""

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAMES = ("alpha", "beta", "ops")
KEYS = {name: new_key() for name in NAMES}
PAIRS = {name: zmq.curve_keypair() for name in NAMES}
RIGHTS = {
    "alpha": 'sessions = ["aaa"]\nmax_listeners = 3',
    "beta": 'sessions = ["bbb*"]\nsources = ["http"]\nmax_prompts = 1',
    "ops": 'sessions = ["*"]\nsources = ["*"]\noperator = true',
}
TEXT = " ".join(f"word{n}" for n in range(60))


def written(names: tuple[str, ...] = NAMES, **more: str) -> str:
    """The tenants file. ``more``: further lines of a tenant."""
    return "\n".join(
        f'[[tenants]]\nname = "{name}"\n{RIGHTS[name]}\n{more.get(name, "")}\n'
        f'api_keys = ["{hash_of(KEYS[name])}"]\ncurve_keys = ["{PAIRS[name][0].decode()}"]'
        for name in names
    )


@dataclass
class House:
    daemon: RunningDaemon
    file: Path
    daemon_key: bytes

    async def http(self, name: str, method: str, path: str, body: object = None, **headers: str) -> Reply:
        return await self.daemon.http(method, path, body, {"x-api-key": KEYS[name]} | headers)

    def query(self, name: str) -> AsyncQueryClient:
        public, secret = PAIRS[name]
        return AsyncQueryClient(self.daemon.endpoint, 20.0, keys=Keys(public, secret, self.daemon_key))

    async def asked(self, name: str, asking: messages.ClientRequest) -> messages.Reply:
        async with self.query(name) as client:
            return await client.request(asking)

    async def reload(self, text: str) -> None:
        self.file.write_text(text)
        gateway = self.daemon.gateway
        await gateway.reload(lambda: gateway.config)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    path = tmp_path_factory.mktemp("house")
    file = path / "tenants.toml"
    file.write_text(written())
    public, secret = make_keys(path / "daemon")
    config = inproc_config(
        ("V:AAA", "V:BBB"),
        tenants=TenantsConfig(str(file)),
        query=QueryConfig(endpoint="tcp://127.0.0.1:*", secret_key_file=str(secret)),
        scheduler=SchedulerConfig(max_new_tokens=64),
    )
    async with running(config, [QueueSource(), HttpSourceConnector().open("http", 1.0)]) as daemon:
        await daemon.advance()
        yield House(daemon, file, public.read_bytes().strip())


async def test_lists_have_what_the_tenant_sees(house: House) -> None:
    for name, seen in (("alpha", ["aaa"]), ("beta", ["bbb"]), ("ops", ["aaa", "bbb"])):
        listed = (await house.http(name, "GET", "/v1/sessions")).json["sessions"]
        assert [each["name"] for each in listed] == seen
        reply = await house.asked(name, messages.ListSessions(1))
        assert isinstance(reply, messages.SessionsReply)
        assert [each.name for each in reply.sessions] == seen
        models = (await house.http(name, "GET", "/v1/models")).json["data"]
        assert [each["id"] for each in models[1:]] == [f"session:{each}" for each in seen]
        answers = (await house.http(name, "GET", "/v1/answers")).json["answers"]
        assert {each["session"] for each in answers} == set(seen)
        questions = (await house.http(name, "GET", "/v1/questions")).json["sessions"]
        assert [each["session"] for each in questions] == seen
        stats = (await house.http(name, "GET", "/v1/stats")).json["values"]
        assert {each for each in ("aaa", "bbb") if f'session="{each}"' in str(stats)} == set(seen)
        assert {each for each in NAMES if f'tenant="{each}"' in str(stats)} == (
            set(NAMES) if name == "ops" else {name}
        )
        budgets = (await house.http(name, "GET", "/v1/budgets")).json["budgets"]
        assert [each["tenant"] for each in budgets] == (list(NAMES) if name == "ops" else [name])
        health = (await house.http(name, "GET", "/v1/health")).json
        assert set(health["silent"]) | set(health["late"]) <= set(seen)


async def test_a_hidden_session_is_told_of_in_the_words_of_an_absent_one(house: House) -> None:
    chat = {"messages": [{"role": "user", "content": "up?"}], "max_tokens": 4}
    decide = {"questions": {"a": {"type": "noul", "instructions": "up?"}}}

    def http(method: str, path: str, body: object = None) -> Callable[[str], Awaitable[bytes]]:
        async def ask(name: str) -> bytes:
            text = None if body is None else json.dumps(body).replace("NAME", name).encode()
            kind = {} if body is None else {"content-type": "application/json"}
            reply = await house.http("alpha", method, path.replace("NAME", name), text, **kind)
            return b"%d %s" % (reply.status, reply.body)

        return ask

    async def over_zeromq(name: str) -> bytes:
        return messages.encode(await house.asked("alpha", messages.Ask(1, name, "up?")))

    ways = [
        http("GET", "/v1/sessions/NAME"),
        http("GET", "/v1/questions?session=NAME"),
        http("GET", "/v1/answers?session=NAME&min_version=1&timeout_s=0.1"),
        http("GET", "/v1/sessions/NAME/versions"),
        http("GET", "/v1/quality/trend?session=NAME"),
        http("POST", "/v1/ask", {"session": "NAME", "question": "up?"}),
        http("POST", "/v1/labels", {"session": "NAME", "question": "q", "data_version": 1, "choice": "YES"}),
        http("DELETE", "/v1/sessions/NAME"),
        http("PATCH", "/v1/sessions/NAME", {"retention_tokens": 512}),
        http("GET", "/v1/models/session:NAME"),
        http("POST", "/v1/chat/completions", chat | {"model": "session:NAME"}),
        http("POST", "/v1/messages", chat | {"model": "session:NAME"}),
        http("POST", "/v1/systemone", decide | {"model": "session:NAME", "state": ""}),
        http("POST", "/v1/systemone", decide | {"model": "jev-latest", "state": {"session": "NAME"}}),
        http("POST", "/v1/messages/count_tokens", {**chat, "model": "session:NAME"}),
        over_zeromq,
    ]
    for way in ways:
        hidden, absent = [_TRACE_ID.sub(b"", await way(name)) for name in ("bbb", "zzz")]
        assert hidden.replace(b"bbb", b"zzz") == absent


async def test_a_stolen_prompt_is_unknown_and_stays_the_owners(house: House) -> None:
    opened = await house.asked("alpha", messages.Open(1, "Up or down?", 4))
    assert isinstance(opened, messages.PromptReply)
    prompt = opened.prompt
    for asking in (
        messages.Append(2, prompt, " now"),
        messages.Update(2, prompt, "x"),
        messages.Finish(2, prompt),
        messages.Close(2, prompt),
    ):
        stolen = await house.asked("beta", asking)
        assert stolen == messages.ErrorReply(2, "unknown_prompt", "there is no such prompt")
    assert isinstance(await house.asked("alpha", messages.Finish(3, prompt)), messages.FinishReply)
    ended = [await house.asked(name, messages.Finish(4, prompt)) for name in ("alpha", "beta")]
    assert [each.code for each in ended if isinstance(each, messages.ErrorReply)] == [
        "finished",
        "unknown_prompt",
    ]


async def test_caches_of_one_tenant_are_no_hit_for_another(house: House) -> None:
    body = {"model": house.daemon.gateway.status.model, "prompt": TEXT, "max_tokens": 3, "temperature": 0}

    async def reused(name: str, **more: object) -> tuple[int, bool]:
        found = (await house.http(name, "POST", "/v1/completions", body | more)).json
        return found["usage"]["prompt_tokens_details"]["cached_tokens"], found["foretick"]["cached"]

    def hits(cache: str) -> int:
        return house.daemon.count("api_cache", cache=cache, outcome="hit")

    # at most the begin-of-text token is there before
    assert (await reused("alpha"))[0] <= 1
    before = hits("response"), hits("tokenise")
    tokens, kept = await reused("beta")
    assert (tokens <= 1, kept) == (True, False)
    assert (hits("response"), hits("tokenise")) == before
    own = await reused("alpha")
    assert (own[0] > 60, own[1]) == (True, True)
    # other lengths are other responses, but the same prefix
    assert (await reused("alpha", max_tokens=2))[0] > 60
    assert (hits("response"), hits("tokenise")) == (before[0] + 1, before[1] + 1)

    salted = {"foretick": {"salt": "user 7"}}
    tokens, kept = await reused("alpha", **salted)
    assert (tokens <= 1, kept) == (True, False)
    assert (await reused("alpha", **salted))[1]
    assert not (await reused("beta", **salted))[1]

    async def prefilled(name: str) -> int:
        reply = await house.asked(name, messages.Complete(1, f"Other {TEXT}", 2))
        assert isinstance(reply, messages.FinishReply)
        return reply.reused_tokens

    assert max(await prefilled("alpha"), await prefilled("beta")) <= 1
    assert await prefilled("alpha") > 60


@pytest.mark.parametrize("api", ["completions", "chat", "messages"])
async def test_what_one_tenant_has_asked_is_computed_whole_for_another(house: House, api: str) -> None:
    """By the tokens that the engine computes, which are what the time of a reply would tell."""
    model, said = house.daemon.gateway.status.model, f"Secret of {api}: {TEXT}"
    messages_ = {"model": model, "messages": [{"role": "user", "content": said}], "max_tokens": 3}
    path, body = {
        "completions": ("/v1/completions", {"model": model, "prompt": said, "max_tokens": 3}),
        "chat": ("/v1/chat/completions", messages_),
        "messages": ("/v1/messages", messages_),
    }[api]
    body["temperature"] = 0

    async def asked(name: str, **more: object) -> tuple[int, int]:
        """Tokens of the prompt that were there, and tokens that were computed."""
        before = house.daemon.count("tenant_tokens", tenant=name)
        found = await house.http(name, "POST", path, body | more)
        assert found.status == 200
        usage = found.json["usage"]
        there = usage.get("cache_read_input_tokens")
        if there is None:
            there = usage["prompt_tokens_details"]["cached_tokens"]
        return there, house.daemon.count("tenant_tokens", tenant=name) - before

    reused, whole = await asked("alpha")
    begins = reused  # the begin-of-text token, or what every chat begins with
    for name in ("beta", "ops"):
        foreign = await asked(name)
        assert foreign[0] <= begins
        assert foreign[1] >= whole > 60
    # no salt of one's own leads to another's
    for salt in ("alpha", "\n", "alpha\n"):
        assert (await asked("beta", foretick={"salt": salt}))[1] >= whole
    # each one's own second is neither computed nor new
    for name in ("alpha", "beta", "ops"):
        there, computed = await asked(name)
        assert (there > 60, computed) == (True, 0)


async def test_events_are_those_of_seen_sessions_even_after_anothers_id(house: House) -> None:
    async with listening(house.daemon.port, x_api_key=KEYS["alpha"]) as mine:
        house.daemon.feed(2)
        event = await mine.next("answer")
    assert event.data["session"] == "aaa"
    # from an id of alpha's stream, beta gets its own sessions' events alone
    async with listening(house.daemon.port, x_api_key=KEYS["beta"], last_event_id=event.id) as theirs:
        assert {(await theirs.next("answer", "data_updated")).data["session"] for _ in range(6)} == {"bbb"}
    protocols = {"sec-websocket-protocol": f"foretick, foretick-key.{KEYS['beta']}"}
    async with conversing(house.daemon.port, **protocols) as socket:
        await socket.ask(type="subscribe", id=1, sessions=["aaa", "bbb"], after=event.id)
        assert {(await socket.next("event"))["data"]["session"] for _ in range(6)} == {"bbb"}
        asked = await socket.ask(type="ask", id=2, session="aaa", question="up?")
        while asked["type"] == "event":
            asked = await socket.next()
        assert (asked["code"], asked["message"]) == (
            "unknown_session",
            "there is no session 'aaa'; there are: bbb",
        )
    async with listening(house.daemon.port, "?session=bbb", x_api_key=KEYS["alpha"]) as wrong:
        house.daemon.feed()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wrong.next(), 1.0)


async def test_only_operators_change_what_others_see(house: House) -> None:
    table = {"name": "bbb-2", "symbol": "V:CCC", "retention_tokens": 512}
    assert (await house.http("beta", "POST", "/v1/sessions", table)).status == 403
    assert (await house.http("ops", "POST", "/v1/sessions", table)).status == 201
    assert "bbb-2" in (await house.http("beta", "GET", "/v1/sessions")).body.decode()
    assert "bbb-2" not in (await house.http("alpha", "GET", "/v1/sessions")).body.decode()
    assert (await house.http("beta", "DELETE", "/v1/sessions/bbb-2")).status == 403
    assert (await house.http("ops", "DELETE", "/v1/sessions/bbb-2")).status == 200
    assert (await house.http("alpha", "GET", "/metrics")).status == 403
    metrics = (await house.http("ops", "GET", "/metrics")).body.decode()
    assert house.daemon.count("tenant_requests", tenant="beta", outcome="forbidden") == 2
    assert 'tenant="beta"' in metrics
    assert not any(key in metrics for key in KEYS.values())


async def test_pushes_go_to_sources_of_the_tenant(house: House) -> None:
    assert (await house.http("alpha", "POST", "/v1/data", [])).json["code"] == "forbidden"
    assert (await house.http("beta", "POST", "/v1/data", [])).status == 202


async def test_a_tenant_has_so_many_prompts_and_listeners_and_others_have_theirs(house: House) -> None:
    opened = await house.asked("beta", messages.Open(1, "one"))
    assert isinstance(opened, messages.PromptReply)
    body = {"model": house.daemon.gateway.status.model, "prompt": "two", "max_tokens": 2}
    refused = await house.http("beta", "POST", "/v1/completions", body)
    assert (refused.status, "1 prompts" in refused.body.decode()) == (429, True)
    assert (await house.http("alpha", "POST", "/v1/completions", body)).status == 200
    await house.asked("beta", messages.Close(2, opened.prompt))
    assert (await house.http("beta", "POST", "/v1/completions", body)).status == 200
    key = {"x_api_key": KEYS["alpha"]}
    async with (
        listening(house.daemon.port, **key),
        listening(house.daemon.port, **key),
        listening(house.daemon.port, **key),
        listening(house.daemon.port, **key) as fourth,
    ):
        assert (fourth.reply.status, fourth.reply.json["code"]) == (429, "busy")
        async with listening(house.daemon.port, x_api_key=KEYS["beta"]) as other:
            assert other.reply.status == 200


async def test_the_sdks_send_their_keys_and_understand_the_refusals(house: House) -> None:
    url = f"http://127.0.0.1:{house.daemon.port}"
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEYS["alpha"], max_retries=0) as theirs:
        assert [each.id async for each in theirs.models.list()][1:] == ["session:aaa"]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as theirs:
        with pytest.raises(openai.AuthenticationError):
            await theirs.models.list()
    said: Any = [{"role": "user", "content": "up?"}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as claude:
        with pytest.raises(anthropic.AuthenticationError):
            await claude.messages.create(model=house.daemon.gateway.status.model, max_tokens=2, messages=said)


async def test_the_command_line_asks_with_keys(house: House, tmp_path: Path) -> None:
    public, secret = tmp_path / "daemon.public", tmp_path / "alpha.secret"
    public.write_bytes(house.daemon_key)
    secret.write_bytes(PAIRS["alpha"][1])
    secret.chmod(0o600)

    def listed(*options: str) -> str:
        arguments = ["sessions", "list", "--endpoint", house.daemon.endpoint, *options]
        return CliRunner().invoke(main, arguments).output

    alpha = await asyncio.to_thread(listed, "--secret-key", str(secret), "--server-key", str(public))
    assert [line.partition(":")[0] for line in alpha.splitlines()] == ["aaa"]
    own = await asyncio.to_thread(listed, "--secret-key", house.daemon.gateway.config.query.secret_key_file)
    assert [line.partition(":")[0] for line in own.splitlines()] == ["aaa", "bbb"]
    assert "cannot be read" in await asyncio.to_thread(listed, "--secret-key", str(tmp_path / "none"))


async def test_the_live_page_asks_for_a_key_and_keeps_it_in_its_tab(house: House) -> None:
    async with browser() as chromium:
        page = await chromium.new_page(viewport={"width": DESKTOP[0], "height": DESKTOP[1]})
        addresses: list[str] = []
        page.on("request", lambda sent: addresses.append(sent.url))
        await page.goto(f"http://127.0.0.1:{house.daemon.port}/")
        await expect(page.locator("#entry-why")).to_have_text("a key is needed", timeout=20_000)
        await page.fill("#key", "wrong")
        await page.press("#key", "Enter")
        await expect(page.locator("#entry-why")).to_have_text("the key is not known")
        await page.fill("#key", KEYS["alpha"])
        await page.press("#key", "Enter")
        await expect(page.locator("#state")).to_have_text("live")
        await expect(page.locator("#entry")).to_be_hidden()
        assert await page.locator("#sessions h2").all_text_contents() == ["aaa"]
        await page.fill("#ask-question", "up?")
        await page.press("#ask-question", "Enter")
        await expect(page.locator("#ask-answer .answer")).to_be_visible()
        await page.reload()
        await expect(page.locator("#state")).to_have_text("live")
        assert not any(KEYS["alpha"] in each for each in addresses)
        other = await chromium.new_page()
        await other.goto(f"http://127.0.0.1:{house.daemon.port}/")
        await expect(other.locator("#entry")).to_be_visible()


async def test_what_is_read_again_applies_at_once_and_a_bad_file_changes_nothing(house: House) -> None:
    gateway = house.daemon.gateway
    await house.reload("[[tenants]")
    assert house.daemon.count("tenants_reloads", outcome="refused") == 1
    assert (await house.http("alpha", "GET", "/v1/sessions")).status == 200

    key = {"sec-websocket-protocol": f"foretick, foretick-key.{KEYS['alpha']}"}
    async with (
        listening(house.daemon.port, x_api_key=KEYS["alpha"]) as gone,
        listening(house.daemon.port, x_api_key=KEYS["ops"]) as stays,
        conversing(house.daemon.port, **key) as socket,
        house.query("alpha") as client,
    ):
        await client.request(messages.ListSessions(1))
        await socket.ask(type="sessions", id=1)
        await house.reload(written(("beta", "ops"), beta="tokens_per_minute = 60"))
        assert house.daemon.count("tenants_reloads", outcome="done") == 1
        assert await gone.ended()
        with pytest.raises(EOFError, match="1008"):
            await socket.next()
        reply = await client.request(messages.ListSessions(2))
        assert isinstance(reply, messages.ErrorReply)
        assert reply.code == "unauthenticated"
        house.daemon.feed()
        assert (await stays.next("answer")).data["session"] in ("aaa", "bbb")
    assert (await house.http("alpha", "GET", "/v1/sessions")).status == 401
    # a budget of 60 tokens a minute: the first may overdraw it, the second waits
    body = {"model": gateway.status.model, "prompt": f"Budget {TEXT}", "max_tokens": 2}
    first, second = [await house.http("beta", "POST", "/v1/completions", body) for _ in range(2)]
    assert (first.status, second.status) == (200, 429)
    used = first.json["usage"]["total_tokens"]
    assert used - 61 <= int(second.headers["retry-after"]) <= used - 58
    waits = await house.asked("beta", messages.Complete(1, "x", 2))
    assert isinstance(waits, messages.ErrorReply)
    assert waits.code == "busy"
    assert used - 62 < waits.retry_after_s <= used - 58
    ask = await house.asked("beta", messages.Ask(1, "bbb", "Not a standing question?", 2))
    assert isinstance(ask, messages.ErrorReply)
    assert ask.code == "busy"
    await house.reload(written())
