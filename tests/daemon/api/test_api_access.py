"""Keys and limits at the HTTP port, with a clock of the test's own: who gets in, what the others are told."""

import asyncio
import http.client
import json
import logging
import math
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from daemon.api.auth import Access, tenant_labels
from daemon.api.auth_middleware import client_of
from daemon.api.http_server import HttpServer
from daemon.api.limits import REQUESTS, Quota
from daemon.api.messages import QueryError, TenantBudget
from daemon.config.schema import HttpConfig
from daemon.config.tenants_file import TenantTable
from daemon.gateway.credentials import tls_of
from daemon.supervision import Tasks
from daemon.tenants import LOCAL, Client, Tenants, hash_of, new_key
from feeds.connector import SettingError
from metrics.export import exposition
from metrics.store import MetricStore
from support.token_bucket import TokenBucket
from tests.kit.http import conversing, http_server, request
from tests.kit.programs import need

DESK, RISK, OLD = new_key(), new_key(), new_key()
TABLES = (
    TenantTable("desk", api_keys=(hash_of(DESK), hash_of(OLD)), requests_per_second=2, tokens_per_minute=60),
    TenantTable("risk", api_keys=(hash_of(RISK),), operator=True),
)


@given(
    st.floats(0.1, 50),
    st.floats(1, 20),
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 5)), max_size=30),
)
def test_a_bucket_gives_no_more_than_its_rate_and_says_when_there_is_more(
    rate: float, burst: float, steps: list[tuple[float, float]]
) -> None:
    bucket, now, level = TokenBucket(rate, burst, 0.0), 0.0, burst
    for later, taken in steps:
        now += later
        level = min(burst, level + later * rate)
        wait = bucket.wait(now)
        assert wait == pytest.approx(max(0.0, (1 - level) / rate), abs=1e-6)
        assert bucket.wait(now + wait + 1e-9) == pytest.approx(0, abs=1e-6)
        bucket.take(now + wait, taken)
        now += wait
        level = min(burst, level + wait * rate) - taken


class Bench:
    """A server whose routes say who asks, and the time in the hands of the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tenants = Tenants(TABLES)
        self.store = MetricStore.local({"tenant": tenant_labels(self.tenants)})
        self.access = Access(self.tenants, self.store, lambda: self.now)
        paths = ("/", "/who", "/v1/messages", "/v1/chat/completions", "/v1/models", "/openapi.json")
        routes = [Route(path, _say, methods=["GET", "POST"]) for path in paths]
        self.server = HttpServer(
            lambda names: exposition(self.store, {}),
            list,
            more=[*routes, WebSocketRoute("/v1/ws", _converse)],
            access=self.access,
        )

    async def status(self, path: str, **headers: str) -> int:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return (await request(self.server.port, "GET", path, headers=fields)).status

    def refusals(self, **labels: str) -> float:
        return self.store.value("foretick_unauthenticated_total", **labels)

    def requests(self, tenant: str, outcome: str) -> float:
        return self.store.value("foretick_tenant_requests_total", tenant=tenant, outcome=outcome)


async def _say(asked: Request) -> Response:
    return JSONResponse([client_of(asked).tenant.name, client_of(asked).name])


async def _converse(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_json({"type": "who", "name": client_of(websocket).tenant.name})
    await websocket.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.server.start(Tasks())
    yield made
    await made.server.stop()


async def test_a_key_in_any_of_its_places_finds_the_tenant(bench: Bench) -> None:
    port = bench.server.port
    for headers in ({"authorization": f"Bearer {DESK}"}, {"authorization": f"bearer {OLD}"}):
        reply = await request(port, "GET", "/who", headers=headers)
        assert reply.json == ["desk", "http 127.0.0.1"]
    assert (await request(port, "GET", "/who", headers={"x-api-key": RISK})).json[0] == "risk"
    # a page of another origin, a proxy's host: the key decides
    elsewhere = {"x-api-key": RISK, "host": "foretick.example", "origin": "https://desk.example"}
    assert (await request(port, "GET", "/who", headers=elsewhere)).status == 200
    offered = {"sec_websocket_protocol": f"foretick, foretick-key.{RISK}"}
    async with conversing(port, **{k.replace("_", "-"): v for k, v in offered.items()}) as socket:
        assert (await socket.next())["name"] == "risk"


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "missing"),
        ({"authorization": "Basic abc"}, "missing"),
        ({"authorization": "Bearer"}, "missing"),
        ({"authorization": f"Bearer {new_key()}"}, "unknown"),
        ({"x-api-key": hash_of(DESK)}, "unknown"),
        ({"x-api-key": "a" * 300}, "malformed"),
        ({"x-api-key": "\xe4"}, "malformed"),
    ],
)
async def test_without_a_right_key_nothing_is_told_and_the_reason_counted(
    bench: Bench, headers: dict[str, str], reason: str
) -> None:
    port = bench.server.port
    own = await request(port, "GET", "/who", headers=headers)
    assert (own.status, own.json["code"]) == (401, "unauthenticated")
    assert own.headers["www-authenticate"].startswith("Bearer")
    absent = await request(port, "GET", "/v1/nothing", headers=headers)
    assert (absent.status, absent.body) == (401, own.body)  # not even which routes there are
    theirs = await request(port, "POST", "/v1/messages", {}, headers)
    assert (theirs.status, theirs.json["error"]["type"]) == (401, "authentication_error")
    openai = await request(port, "POST", "/v1/chat/completions", {}, headers)
    assert (openai.status, openai.json["error"]["code"]) == (401, "invalid_api_key")
    models = await request(port, "GET", "/v1/models", headers=headers)
    assert models.json["error"]["code"] == "invalid_api_key"
    assert bench.refusals(reason=reason) == 5
    async with conversing(port, **headers) as socket:
        assert (socket.accepted, socket.status) == (False, 401)
    assert bench.refusals(reason=reason) == 6


async def test_health_the_page_and_the_description_are_open_and_metrics_are_for_operators(
    bench: Bench,
) -> None:
    for path in ("/healthz", "/readyz", "/", "/openapi.json"):
        assert await bench.status(path) == 200
    assert await bench.status("/metrics") == 401
    assert await bench.status("/metrics", x_api_key=DESK) == 403
    assert await bench.status("/metrics", x_api_key=RISK) == 200
    assert bench.requests("desk", "forbidden") == 1
    assert await bench.status("/metrics%0A", x_api_key=DESK) == 403, "a route ends before a line break, too"


async def test_too_many_requests_are_told_when_to_come_back(bench: Bench) -> None:
    port = bench.server.port
    statuses = [await bench.status("/who", x_api_key=DESK) for _ in range(3)]
    assert statuses == [200, 200, 429]
    for path in ("/who", "/v1/messages", "/v1/chat/completions"):
        refused = await request(port, "GET", path, headers={"x-api-key": DESK})
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert await bench.status("/who", x_api_key=OLD) == 429  # the tenant's limit, not the key's
    assert await bench.status("/who", x_api_key=RISK) == 200
    bench.now = 0.5
    assert await bench.status("/who", x_api_key=DESK) == 200
    assert (bench.requests("desk", "admitted"), bench.requests("desk", "rate")) == (3, 5)


async def test_a_token_budget_is_spent_as_tokens_are_computed_and_flows_back(bench: Bench) -> None:
    client = bench.access.by_key(DESK, "http", "here")
    bench.access.tokens(client)
    bench.access.charge(client, 100)  # overdrawn by 40 of 60 a minute
    with pytest.raises(QueryError) as refused:
        bench.access.tokens(client)
    assert refused.value.code == "busy"
    assert refused.value.retry_after_s == pytest.approx(41)
    assert math.isclose(bench.store.value("foretick_tenant_tokens_total", tenant="desk"), 100)
    bench.now = 41.0
    bench.access.tokens(client)


async def test_a_share_of_the_engine_is_spent_and_flows_back(bench: Bench) -> None:
    """A tenth of it, of which ten seconds' worth may be taken at once."""
    tables = [msgspec.structs.replace(t, engine_share=0.1, tokens_per_minute=0) for t in TABLES]
    bench.tenants.replace(tables)
    client = bench.access.by_key(DESK, "http", "here")
    bench.access.tokens(client)
    bench.access.charge(client, 5, 3 * 10**9)  # overdrawn by two of one second
    with pytest.raises(QueryError, match=r"has 0\.1 of the") as refused:
        bench.access.tokens(client)
    assert (refused.value.code, refused.value.retry_after_s) == ("busy", pytest.approx(20))
    assert bench.requests("desk", "engine") == 1
    seconds = bench.store.value("foretick_tenant_engine_seconds_total", tenant="desk")
    assert math.isclose(seconds, 3)
    (budget,) = bench.access.budgets(client)
    assert (budget.tenant, budget.engine_share, budget.engine_s) == ("desk", 0.1, 3.0)
    assert (budget.engine_used, budget.wait_s) == (pytest.approx(3), pytest.approx(20))
    bench.now = 20.001
    bench.access.tokens(client)
    (budget,) = bench.access.budgets(client)
    assert (budget.engine_used, budget.wait_s) == (pytest.approx(1, abs=1e-3), 0)
    assert [each.tenant for each in bench.access.budgets(Client(LOCAL, "own"))] == ["desk", "risk"]


async def test_what_may_be_taken_at_once_is_the_share_of_the_window() -> None:
    tenant = TenantTable("desk", api_keys=(hash_of(DESK),), engine_share=0.5)
    access = Access(Tenants((tenant,)), clock=lambda: 0.0, window_s=2.0)
    client = access.by_key(DESK, "http", "here")
    access.charge(client, 5, 10**9 // 2)
    access.tokens(client)
    assert access.budgets(client)[0].engine_used == pytest.approx(0.5)
    access.charge(client, 5, 10**9 // 2)
    with pytest.raises(QueryError, match="has used it up"):
        access.tokens(client)


def test_without_tenants_there_is_one_budget_that_allows_all() -> None:
    access = Access(clock=lambda: 0.0)
    client = Client(LOCAL, "here")
    access.charge(client, 5, 10**9)
    assert access.budgets(client) == (TenantBudget("", 0.0, 0.0, 0.0, 1.0),)


async def test_what_a_request_takes_is_charged_to_the_limits_of_now(bench: Bench) -> None:
    """They changed while it was computed."""
    client = bench.access.by_key(DESK, "http", "here")
    bench.tenants.replace([msgspec.structs.replace(t, tokens_per_minute=600) for t in TABLES])
    bench.access.charge(client, 700)
    with pytest.raises(QueryError) as refused:
        bench.access.tokens(bench.access.again(client, "http"))
    assert refused.value.retry_after_s == pytest.approx(10.1)


def test_parts_of_the_daemon_need_no_key(bench: Bench) -> None:
    assert bench.access.holds(Client(LOCAL, "mcp"))
    assert not bench.access.holds(Client(LOCAL, "somebody", "sha256:x"))


async def test_a_key_that_is_removed_is_refused_at_once_and_others_keep_what_they_have_used(
    bench: Bench,
) -> None:
    old = bench.access.by_key(OLD, "http", "here")
    assert [await bench.status("/who", x_api_key=DESK) for _ in range(2)] == [200, 200]
    (desk, risk) = TABLES
    left = TenantTable("desk", api_keys=(hash_of(DESK),), requests_per_second=2, tokens_per_minute=60)
    bench.tenants.replace((left, risk, TenantTable("late", api_keys=(hash_of("late"),))))
    assert not bench.access.holds(old)
    with pytest.raises(QueryError, match="not known"):
        bench.access.again(old, "websocket")
    assert await bench.status("/who", x_api_key=OLD) == 401
    assert await bench.status("/who", x_api_key=DESK) == 429
    assert await bench.status("/who", x_api_key="late") == 200
    assert bench.requests("other", "admitted") == 1  # labels are those of the start
    assert desk.name == "desk"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "tls.pem", folder / "tls.key"
    made = [need("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    return certificate, key


async def test_over_tls_the_same_is_served_and_a_bad_certificate_is_named(pem: tuple[Path, Path]) -> None:
    certificate, key = pem
    config = HttpConfig(tls_certificate_file=str(certificate), tls_key_file=str(key))
    trusted = ssl.create_default_context(cafile=str(certificate))
    access = Access(Tenants(TABLES))
    async with http_server(Route("/who", _say), access=access, tls=tls_of(config)) as server:

        def get() -> tuple[int, object]:
            connection = http.client.HTTPSConnection("localhost", server.port, timeout=20, context=trusted)
            connection.request("GET", "/who", headers={"x-api-key": RISK})
            reply = connection.getresponse()
            found = reply.status, json.loads(reply.read())[0]
            connection.close()
            return found

        assert await asyncio.to_thread(get) == (200, "risk")
        with pytest.raises((OSError, EOFError, IndexError, ValueError)):  # in the clear there is nothing
            await request(server.port, "GET", "/who", headers={"x-api-key": RISK})
    for files in ((certificate, certificate), (key.parent / "absent", key)):
        bad = HttpConfig(tls_certificate_file=str(files[0]), tls_key_file=str(files[1]))
        with pytest.raises(SettingError, match="tls_certificate_file"):
            tls_of(bad)


@settings(max_examples=25)
@given(st.text(min_size=1, max_size=64).filter(str.strip))
def test_a_key_is_never_repeated(key: str) -> None:
    store = MetricStore.local({"tenant": ["local", "desk", "other"]})
    access = Access(Tenants(TABLES), store)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    marked = f"{key}~marked~{key}"
    try:
        with pytest.raises(QueryError) as refused:
            access.by_key(marked, "http", "here")
    finally:
        logging.getLogger().removeHandler(handler)
    told = json.dumps([str(refused.value), lines, exposition(store, {}).decode()])
    assert "marked" not in told
    assert hash_of(marked) not in told


@given(st.integers(1, 6), st.lists(st.sampled_from(["a", "b", "", "-a", "-b", "-"]), max_size=40))
def test_one_tenant_leaves_half_of_the_room_to_others(most: int, steps: list[str]) -> None:
    share, now = Quota(most, *REQUESTS), {"a": 0, "b": 0, "": 0}
    for step in steps:
        name = step.removeprefix("-")
        if step.startswith("-"):
            if now[name]:
                share.leave(name)
                now[name] -= 1
            continue
        room = sum(now.values()) < most and (not name or now[name] < max(1, most // 2))
        if not room:
            with pytest.raises(QueryError, match="already being answered"):
                share.enter(name)
            continue
        share.enter(name)
        now[name] += 1


def test_a_client_does_not_show_its_key() -> None:
    access = Access(Tenants(TABLES))
    shown = repr(access.by_key(DESK, "http", "here"))
    assert hash_of(DESK) not in shown
    assert DESK not in shown
    assert isinstance(access.by_key(DESK, "http", "here"), Client)
