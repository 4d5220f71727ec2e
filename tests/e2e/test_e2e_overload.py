"""More than the daemon can carry: thousands of listeners, readers that stop, bars faster than it reads."""

import asyncio
import os
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from daemon.api.connections import allow_connections
from daemon.api.events import KEPT
from daemon.api.messages import QueryError
from daemon.config.schema import SourceConfig
from daemon.engine.build import build
from feeds.connectors.zeromq import ZmqSourceConnector
from feeds.durations import Duration
from flash.question import PAPER_SIX
from tests.kit import SECOND, START, inproc_config, sessions, until
from tests.kit.http import Sse, Ws, conversing, head, listening
from tests.kit.inproc import Recorder, running

LISTENERS = 2000
AT_ONCE = 64
EACH_BYTES = 256 << 10
"""Memory that a listener may take, both of its ends together: they are in this process."""
FLOOD, TEXT = KEPT + 2000, 4000
"""Events, and bytes of each: more than is kept for a client, and than fits into its connection."""
FLOOD_BYTES = 10 * KEPT * TEXT
"""What is kept of them may take: a message, its text for each transport, and what this process's clients
have read."""
CHAT = {"messages": [{"role": "user", "content": "Is it up?"}], "max_tokens": 4}

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def idle(port: int, number: int, opening: asyncio.Semaphore) -> Connection:
    """A client that waits for a version's answers: every other one by a WebSocket."""
    async with opening:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 14)
        host = {"host": f"127.0.0.1:{port}"}
        if number % 2:
            writer.write(head("GET", "/v1/events?event=flash_ready", host))
            await reader.readuntil(b"\n\n")
            return reader, writer
        upgrade = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-version": "13"}
        key = {"sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="}
        writer.write(head("GET", "/v1/ws", host | upgrade | key))
        await reader.readuntil(b"\r\n\r\n")
        text = b'{"type":"subscribe","id":1,"events":["flash_ready"]}'
        writer.write(b"\x81" + bytes([0x80 | len(text)]) + bytes(4) + text)  # masked by zeros
        await reader.readuntil(b'"subscribed"')
        return reader, writer


def pause(client: Sse | Ws) -> asyncio.Transport:
    """The client reads nothing more."""
    assert isinstance(client.writer.transport, asyncio.Transport)
    client.writer.transport.pause_reading()
    return client.writer.transport


async def versions_of(client: Sse | Ws, last: int) -> tuple[list[int], int]:
    """Versions of the answers that it gets, up to the ``last``, and how many it is told that it has lost."""
    got: list[int] = []
    lost = 0
    while not got or got[-1] != last:
        if isinstance(client, Sse):
            message = (await client.next()).data
        else:
            message = await client.next()
        if "reason" in message:
            assert (message["reason"], message["exact"]) == ("slow", True)
            lost += message["events"]
        else:
            answer = message.get("data", message)
            assert answer["type"] == "answer"
            got.append(answer["data_version"])
    return got, lost


async def test_two_thousand_listeners_and_readers_that_stop() -> None:
    allow_connections(2 * LISTENERS)
    async with running(inproc_config()) as daemon, AsyncExitStack() as stack:
        await daemon.advance()
        before, opening = resident(), asyncio.Semaphore(AT_ONCE)
        clients = await asyncio.gather(*(idle(daemon.port, n, opening) for n in range(LISTENERS)))
        stack.callback(lambda: [writer.close() for _, writer in clients])
        for transport in ("sse", "websocket"):
            listeners = daemon.value("listeners", transport=transport)
            assert listeners == LISTENERS / 2
        assert resident() - before < LISTENERS * EACH_BYTES

        port = daemon.port
        quick = await stack.enter_async_context(listening(port, "?event=answer"))
        slow = await stack.enter_async_context(listening(port, "?event=answer"))
        stuck = await stack.enter_async_context(conversing(port))
        assert (await stuck.ask(type="subscribe", id=1, events=["answer"]))["type"] == "subscribed"
        held = [pause(slow), pause(stuck)]
        before, some = resident(), daemon.answers()[0]
        reading = asyncio.ensure_future(versions_of(quick, FLOOD - 1))
        for n in range(FLOOD):
            daemon.gateway.events.publish(msgspec.structs.replace(some, data_version=n, text="x" * TEXT))
            if n % 64 == 0:
                await asyncio.sleep(0.005)
        assert await reading == (list(range(FLOOD)), 0)
        assert resident() - before < FLOOD_BYTES
        for transport_ in held:
            transport_.resume_reading()
        for client in (slow, stuck):
            got, lost = await versions_of(client, FLOOD - 1)
            assert got == sorted(got)
            assert lost == FLOOD - len(got) > 0

        daemon.feed(2)
        async with asyncio.timeout(60):
            await asyncio.gather(*(reader.readuntil(b"flash_ready") for reader, _ in clients))
        await until(lambda: daemon.count("answers", session="aaa") == len(daemon.answers()))
        dropped = {
            transport: daemon.count("events_dropped", transport=transport)
            for transport in ("sse", "websocket")
        }
        assert all(dropped.values())


async def test_a_flood_of_bars_sheds_prompts_and_no_standing_question() -> None:
    """Every pass takes longer than the objective, so each version is late."""
    sharp = sessions("V:AAA", retention_tokens=1024, max_staleness=Duration(1_000_000))
    async with running(inproc_config(sessions=sharp), executor=Recorder(0.01)) as daemon:
        pool: dict[str, Any] = {"model": daemon.gateway.status.model, **CHAT}
        text = {"model": daemon.gateway.status.model, "max_tokens": 4}
        assert (await daemon.http("POST", "/v1/chat/completions", pool)).status == 200
        flooding = True

        async def flood() -> None:
            while flooding:
                daemon.feed()
                await asyncio.sleep(0.005)

        flood_ends = asyncio.ensure_future(flood())
        await until(lambda: daemon.count("freshness_misses", session="aaa") > 3, what="deadline misses")
        for path, asked, code in (
            ("/v1/chat/completions", pool, "rate_limit_error"),
            ("/v1/completions", text | {"prompt": "one two"}, "rate_limit_error"),
            ("/v1/responses", {"model": daemon.gateway.status.model, "input": "one two"}, "rate_limit_error"),
            ("/v1/messages", pool, "rate_limit_error"),
            ("/v1/complete", {"text": "one two"}, "overloaded"),
        ):
            reply = await daemon.http("POST", path, asked)
            assert (reply.status, reply.headers["retry-after"]) == (429, "1")
            assert reply.json.get("code", reply.json.get("error", {}).get("type")) == code
        with pytest.raises(QueryError) as refused:
            await daemon.call("complete", "one two")
        assert refused.value.code == "overloaded"
        session = {"model": "session:aaa", **CHAT}
        ready = session | {"messages": [{"role": "user", "content": "trend"}]}
        for asked, cached in ((ready, True), (session, False)):
            reply = await daemon.http("POST", "/v1/chat/completions", asked)
            assert (reply.status, reply.json["foretick"]["cached"]) == (200, cached)
        flooding = False
        await flood_ends
        state, last = (
            daemon.state(),
            START + (daemon.tape.seconds - 2) * SECOND,
        )  # that a later bar has closed
        await until(lambda: state.times is not None and state.times.as_of >= last, 60, "the last bar")
        version = state.version
        due = {(each.name, n) for each in PAPER_SIX if each.choices for n in range(1, version + 1)}

        def all_accounted() -> bool:
            """Every flash answer is published; what is generated token by token may be superseded."""
            published = {(each.question, each.data_version) for each in daemon.answers()}
            superseded = daemon.count("answers_suppressed", reason="superseded")
            return due <= published and len(published - due) + superseded == version

        await until(all_accounted, what="all answers, or their count")
        assert daemon.count("prompts_refused") == 6
        (listed,) = (await daemon.call("sessions")).sessions
        missed = daemon.count("freshness_misses", session="aaa")
        assert (listed.freshness_objective_ns, listed.freshness_misses) == (1_000_000, missed)
        await asyncio.sleep(1)
        await daemon.call("complete", "one two", choices=("YES", "NO"))


async def test_an_objective_that_is_met_refuses_nothing() -> None:
    met = sessions("V:AAA", retention_tokens=1024, max_staleness=Duration(3600 * SECOND))
    async with running(inproc_config(sessions=met)) as daemon:
        daemon.feed(3)
        await until(daemon.answers, what="an answer")
        await daemon.call("complete", "one two", choices=("YES", "NO"))
        assert (daemon.count("freshness_misses", session="aaa"), daemon.count("prompts_refused")) == (0, 0)


def test_a_live_source_has_an_objective_of_three_bars_and_a_file_none() -> None:
    live = SourceConfig(kind="zeromq", zeromq=ZmqSourceConnector("tcp://127.0.0.1:1"))
    skips = SourceConfig(kind="none", backlog_policy="skip")
    own = sessions("V:AAA", retention_tokens=1024)
    for source, bars in ((SourceConfig(), 0), (live, 3), (skips, 3)):
        made = inproc_config(sessions=own, source=source)
        assert made.freshness_objective_ns(made.sessions[0]) == bars * made.bars.interval
    assert build(inproc_config(sessions=own, source=skips), {}).tapes["aaa"].staleness_ns == 3 * SECOND
