"""`foretick doctor` on a daemon: absent, another program, one that is made up, and one that runs."""

import asyncio
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.client import IncompleteRead
from typing import Any

import pytest
from msgspec import structs

from daemon.api.messages import HelloReply, QueryError, SessionInfo, SessionsReply, StatsReply
from daemon.api.socket_calls import SocketCalls
from daemon.config.schema import UNTRAINED, Config, HttpConfig, ModelConfig, QueryConfig, SessionConfig
from daemon.doctor import running as running_daemon
from daemon.doctor.bundle import members_of
from daemon.doctor.examination import Facts
from daemon.doctor.machine import Machine
from daemon.doctor.running import (
    Daemon,
    Fetch,
    http_fetch,
    judge_daemon,
    judge_sessions,
    open_client,
    read_daemon,
)
from feeds.durations import Duration
from tests.kit import inproc_config
from tests.kit.inproc import running
from tests.kit.kafka import free_ports

ALIVE = {"/healthz": (200, {"status": "alive"}), "/readyz": (200, {"status": "ready", "reasons": []})}
A = SessionInfo("a", "V:A", 3, 100, 10, 0, 0, ())


def fetching(replies: Mapping[str, tuple[int, object]], metrics: str = "") -> Fetch:
    """Replies of HTTP; a further scrape of ``metrics`` counts one more at %d."""
    scrapes = iter(range(1, 9))

    def fetch(path: str) -> tuple[int, bytes]:
        if path == "/metrics":
            return (200, (metrics % next(scrapes)).encode()) if metrics else (403, b"")
        code, body = replies[path]
        return code, body if isinstance(body, bytes) else json.dumps(body).encode()

    return fetch


class FakeClient:
    """A query socket that has one session and one counter."""

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *_: object) -> None: ...

    def hello(self) -> HelloReply:
        return HelloReply(1, 1, "0.0.9", 1.0, 1, 1)

    def sessions(self) -> SessionsReply:
        return SessionsReply(1, (A,))

    def stats(self) -> StatsReply:
        return StatsReply(1, {'foretick_source_up{source="kafka"}': 0.0}, {})


def read(fetch: Fetch, client: Callable[[Config], Any] = lambda config: FakeClient()) -> Daemon:
    return read_daemon(Config(), fetch, client, lambda seconds: None)


def judged(daemon: Daemon) -> dict[str, str]:
    return {each.check: each.verdict for each in judge_daemon(daemon, Config())}


def test_a_daemon_that_does_not_run_is_skipped_and_another_program_is_a_problem() -> None:
    (port,) = free_ports(1)
    config = Config(http=HttpConfig(port=port))
    absent = read_daemon(config, http_fetch(config))
    assert not absent.running
    assert judged(absent) == {"daemon": "skipped"}
    for body in (b"<html>", {"status": 7}, [], {"other": "alive"}):
        replies = {"/healthz": (200, body), "/readyz": (404, {"detail": "not found"})}
        assert judged(read(fetching(replies))) == {"daemon": "problem"}


@contextmanager
def answering(reply: bytes) -> Iterator[Config]:
    """A configuration whose HTTP port replies with these bytes to each connection, and closes it."""

    class Reply(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(reply)

    with socketserver.TCPServer(("127.0.0.1", 0), Reply) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Config(http=HttpConfig(port=server.server_address[1]))
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "reply", [b"SSH-2.0-OpenSSH_9.2\r\n", b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"status"']
)
def test_what_is_not_http_or_is_cut_is_another_program(reply: bytes) -> None:
    with answering(reply) as config:
        found = read_daemon(config, http_fetch(config))
    assert found.status == "foreign"
    assert judged(found) == {"daemon": "problem"}


def test_a_port_that_is_open_and_does_not_reply_is_a_daemon_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_daemon, "PATIENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel takes connections, and nobody reads
        config = Config(http=HttpConfig(port=server.getsockname()[1]))
        found = read_daemon(config, http_fetch(config))
    assert found.status == "hung"
    assert found.running, "it has its ports and its memory"
    (diagnosis,) = judge_daemon(found, config)
    assert (diagnosis.check, diagnosis.verdict) == ("daemon", "problem")
    assert "does not reply" in diagnosis.seen
    assert diagnosis.step.startswith("restart it")


def test_metrics_that_are_cut_are_skipped_with_the_reason() -> None:
    replies = fetching(ALIVE)

    def cut(path: str) -> tuple[int, bytes]:
        if path == "/metrics":
            raise IncompleteRead(b"foretick", 99)
        return replies(path)

    found = judge_daemon(read(cut), Config())
    (skipped,) = (each for each in found if each.verdict == "skipped")
    assert "IncompleteRead" in skipped.seen


def test_a_port_that_a_socket_unit_holds_is_mentioned_where_nothing_answers() -> None:
    (found,) = judge_daemon(Daemon("absent", "Connection refused"), Config())
    assert "foretick-http.socket" in found.step
    assert "http.port" in found.step


def test_reasons_why_it_is_not_ready_are_problems_of_their_own() -> None:
    waiting = (503, {"status": "waiting", "reasons": ["the engine is not up", "no room for session x"]})
    found = read(fetching(ALIVE | {"/readyz": waiting}, "foretick_bars_total %d\n"))
    ready = [each for each in judge_daemon(found, Config()) if each.check == "daemon.ready"]
    assert [each.seen for each in ready] == ["the engine is not up", "no room for session x"]
    assert {each.verdict for each in ready} == {"problem"}
    hidden = replace(found, reasons=())
    assert judged(hidden)["daemon.ready"] == "problem"


def test_a_standby_is_well_although_it_is_not_ready() -> None:
    reply = (503, {"status": "standby", "reasons": ["this daemon is a standby: another one answers"]})
    found = judged(read(fetching(ALIVE | {"/readyz": reply}, "foretick_bars_total %d\n")))
    assert found["daemon"] == "ok"
    assert "daemon.ready" not in found


def test_a_pass_that_does_not_end_needs_a_restart() -> None:
    found = read(fetching(ALIVE | {"/healthz": (503, {"status": "stuck"})}, "foretick_bars_total %d\n"))
    assert found.running
    assert judged(found)["daemon"] == "problem"


def test_metrics_are_compared_over_two_scrapes() -> None:
    text = 'foretick_engine_up 1\nforetick_records_malformed_total{reason="json"} %d\n'
    found = read(fetching(ALIVE, text))
    assert judged(found) == {
        "daemon": "ok",
        "daemon.version": "warning",
        "daemon.sessions": "ok",
        "metrics.records_malformed_total": "warning",
    }
    assert found.exposition == text % 2


def test_where_metrics_need_a_key_the_query_socket_gives_them() -> None:
    assert judged(read(fetching(ALIVE)))["metrics.source_up"] == "problem"


def test_what_a_daemon_refuses_is_skipped_with_its_reason() -> None:
    def refusing(config: Config) -> Any:
        raise QueryError("unauthenticated", "no key")

    found = judge_daemon(read(fetching(ALIVE), refusing), Config())
    (skipped,) = (each for each in found if each.verdict == "skipped")
    assert "no key" in skipped.seen


def test_sessions_are_named_by_what_is_wrong_with_them() -> None:
    config = Config(sessions=(SessionConfig("a", "V:A", stale_after=Duration(10)),))  # type: ignore[call-arg]  # a setting's
    for changed, kind in (
        ({"silent": True}, "silent"),
        ({"bars_waiting": 2}, "late"),
        ({"staleness_ns": 11}, "stale"),
        ({"data_version": 0, "staleness_ns": 11}, "empty"),
        ({"owner_failure": "timeout"}, "out of reach"),
    ):
        (found,) = judge_sessions([structs.replace(A, **changed), structs.replace(A, name="b")], config)
        assert (found.verdict, found.seen) == ("warning", f"1 of 2 are {kind}: a")
    many = [structs.replace(A, name=f"s{n}", silent=True) for n in range(7)]
    (found,) = judge_sessions(many, config)
    assert found.seen.endswith("s4 and 2 others")


def test_addresses_that_bind_everything_are_reached_on_this_machine() -> None:
    (port,) = free_ports(1)
    everywhere = Config(query=QueryConfig(endpoint=f"tcp://*:{port}"))
    with open_client(everywhere) as client:
        assert isinstance(client._calls, SocketCalls)
        assert client._calls._endpoint == f"tcp://127.0.0.1:{port}"


async def test_a_running_daemon_is_seen_as_it_is_and_goes_on() -> None:
    async with running(inproc_config(model=ModelConfig(path=UNTRAINED, layers="torch"))) as daemon:
        await daemon.advance()
        http, query = HttpConfig(port=daemon.port), QueryConfig(endpoint=daemon.endpoint)
        config = structs.replace(daemon.gateway.config, http=http, query=query)
        found = await asyncio.to_thread(read_daemon, config, http_fetch(config), sleep=lambda seconds: None)
        assert (found.status, found.ready, found.refused) == ("alive", True, "")
        assert [each.name for each in found.sessions] == ["aaa"]
        assert found.after["foretick_engine_up", frozenset()] == 1
        verdicts = {each.check: each.verdict for each in judge_daemon(found, config)}
        assert verdicts["daemon.version"] == verdicts["daemon.sessions"] == "ok"
        assert "problem" not in verdicts.values()
        machine = Machine({}, 1, 0.0, 1, 1, 1, None, False, None)
        bundle = members_of(Facts(machine, (), (), found, None), [], config, {})
        assert 'foretick_answers_total{session="aaa"}' in bundle["metrics.txt"]
        assert json.loads(bundle["sessions.json"])[0]["name"] == "aaa"
        await daemon.advance()
