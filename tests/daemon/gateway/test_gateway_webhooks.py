"""Webhooks: signatures, retries, restarts, and that whom they call never holds answers up."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from daemon.config.schema import SinkConfig, WebhookConfig
from daemon.gateway.webhooks import WebhookSink
from daemon.gateway.wiring import make_gateway
from feeds.connector import SettingError, SinkRoute
from feeds.connectors.kafka import KafkaSinkConnector
from feeds.durations import Duration
from feeds.source import PublishRefused, SinkStopped
from feeds.webhook_signatures import read_keys, signed
from metrics.store import MetricStore
from tests.daemon.gateway.test_gateway_publish import Rig
from tests.daemon.gateway.test_gateway_signals import config, say
from tests.kit import MemorySink, QueueSource, until

KEY = b"0123456789abcdef01234567"


class Receiver:
    """Answers requests with ``statuses``, the last one from then on; 0 hangs."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = list(statuses)
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.requests]

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.create_task(self._converse(reader, writer)))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:]
                headers = {n.lower(): v for n, v in (line.split(": ", 1) for line in head if line)}
                self.requests.append((headers, await reader.readexactly(int(headers["content-length"]))))
                status = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
                if not status:
                    await asyncio.Event().wait()
                more = f"location: {self.url}/elsewhere\r\n" if status == 307 else ""
                writer.write(f"HTTP/1.1 {status} X\r\n{more}content-length: 0\r\n\r\n".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def receiving(*statuses: int) -> AsyncIterator[Receiver]:
    receiver = Receiver(*statuses)
    server = await asyncio.start_server(receiver.accept, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        await receiver.close()


@asynccontextmanager
async def hooked(url: str, directory: Path | None = None, **more: Any) -> AsyncIterator[WebhookSink]:
    store = MetricStore.local({"session": [], "source": [], "sink": [], "webhook": ["desk"]})
    settings = WebhookConfig("desk", url, "secret", **more)
    sink = WebhookSink(settings, [KEY], store, directory, first_s=0.01)
    await sink.start()
    try:
        yield sink
    finally:
        await sink.stop()


async def put(sink: WebhookSink, *ids: str, name: str = "turn") -> None:
    for each in ids:
        body = json.dumps({"type": "signal", "signal_id": each, "name": name}).encode()
        await sink.publish("signals", b"V:AAA", body, {"signal_id": each.encode()})


def kept(directory: Path) -> list[str]:
    return [each.name for each in directory.glob("*.json")]


def counts(sink: WebhookSink) -> dict[str, float]:
    outcomes = ("delivered", "failed", "given_up", "dropped")
    name = "foretick_webhook_attempts_total"
    found = {each: sink._store.value(name, webhook="desk", outcome=each) for each in outcomes}
    return {each: n for each, n in found.items() if n}


def test_a_signature_is_that_of_the_specification() -> None:
    """The example of the specification's own libraries."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = signed([key, KEY], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    first, second = headers["webhook-signature"].split()
    assert first == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert second.startswith("v1,")
    assert headers["webhook-timestamp"] == "1614265330"


@pytest.mark.parametrize("text", ["", "whsec_c2hvcnQ=", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_%%%"])
def test_a_secret_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SettingError, match=r"secret_file: ") as raised:
        read_keys("secret_file", str(path))
    assert not text or text not in str(raised.value)


async def test_a_request_is_the_signal_and_proves_who_sends_it(tmp_path: Path) -> None:
    async with receiving(200) as receiver, hooked(receiver.url, tmp_path) as sink:
        await put(sink, "turn:aaa:1")
        await until(lambda: counts(sink) == {"delivered": 1})
        ((headers, body),) = receiver.requests
        content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        digest = base64.b64encode(hmac.new(KEY, content, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{digest}"
        assert json.loads(body)["signal_id"] == headers["webhook-id"] == "turn:aaa:1"
        assert not kept(tmp_path)


async def test_what_is_refused_is_sent_again_with_its_id_and_redirects_are_not_followed(caplog) -> None:
    async with receiving(500, 307, 200) as receiver, hooked(receiver.url) as sink:
        await put(sink, "a")
        await until(lambda: counts(sink) == {"delivered": 1, "failed": 2})
        assert receiver.ids() == ["a"] * 3
    assert caplog.text.count("takes no signals; they are sent again: status 500") == 1


async def test_a_signal_is_given_up_after_the_last_attempt(tmp_path: Path, caplog) -> None:
    async with receiving(503) as receiver, hooked(receiver.url, tmp_path, max_attempts=3) as sink:
        await put(sink, "a")
        await until(lambda: counts(sink) == {"failed": 2, "given_up": 1})
        assert len(receiver.requests) == 3
        assert not kept(tmp_path)
    assert "a is given up: status 503" in caplog.text


async def test_one_request_that_hangs_holds_back_no_other(tmp_path: Path) -> None:
    async with receiving(0, 200) as receiver, hooked(receiver.url, tmp_path) as sink:
        await put(sink, "a")
        await until(lambda: receiver.requests)
        await asyncio.wait_for(put(sink, "b", "c"), 5)
        await until(lambda: counts(sink) == {"delivered": 2})
        assert len(kept(tmp_path)) == 1


async def test_a_request_that_hangs_is_ended_and_sent_again() -> None:
    async with receiving(0, 200) as receiver, hooked(receiver.url, timeout=Duration(50_000_000)) as sink:
        await put(sink, "a")
        await until(lambda: counts(sink) == {"delivered": 1, "failed": 1})
        assert receiver.ids() == ["a", "a"]


async def test_what_waits_is_sent_after_a_restart_and_damaged_files_are_left(tmp_path: Path, caplog) -> None:
    async with hooked("http://127.0.0.1:1/hook", tmp_path) as sink:
        await put(sink, "a", "b", "a")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(SinkStopped):
        await put(sink, "c")
    async with receiving(200) as receiver, hooked(receiver.url, tmp_path) as sink:
        await until(lambda: counts(sink) == {"delivered": 2})
        assert sorted(receiver.ids()) == ["a", "b"]
    assert kept(tmp_path) == ["x.json"]
    assert "x.json is no signal" in caplog.text


async def test_too_many_are_refused_and_names_select() -> None:
    async with receiving(0) as receiver, hooked(receiver.url, max_waiting=1, signals=("turn",)) as sink:
        await put(sink, "other", name="other")
        await put(sink, "a")
        with pytest.raises(PublishRefused, match="webhook desk"):
            await put(sink, "b")
        assert counts(sink) == {"dropped": 1}
        assert receiver.ids() in ([], ["a"])


async def test_a_webhook_without_a_disk_goes_on_in_memory(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    async with receiving(200) as receiver, hooked(receiver.url, tmp_path / "file") as sink:
        await put(sink, "a")
        await until(lambda: counts(sink) == {"delivered": 1})
    assert "a is kept in memory alone" in caplog.text


async def test_answers_and_offsets_go_on_while_a_webhook_hangs(tmp_path: Path) -> None:
    sink = MemorySink()
    async with receiving(0) as receiver, hooked(receiver.url, tmp_path, max_waiting=1) as hook:
        routes = SinkRoute(sink, "answers.v1", dead_letters="dlq.v1"), SinkRoute(hook, "", signals="signals")
        r = Rig(*routes, config=config())
        for version, text in enumerate(["DOWN", "UP", "DOWN", "UP"], 1):
            say(r, "aaa", version, trend=text, other="UP")
        await until(lambda: r.publisher.progress.of("aaa").version == 4)
        await until(lambda: len(sink.messages("answers.v1")) == 8)
        (record,) = sink.messages("dlq.v1")
        assert json.loads(record.payload)["type"] == "signal"
        await r.publisher.outbox.delivery.stop(0.0)


async def test_a_daemon_whose_configuration_has_a_webhook_exports_what_it_counts(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"whsec_{base64.b64encode(KEY).decode()}\n")
    (tmp_path / "secret").chmod(0o600)
    webhook = WebhookConfig("desk", "http://127.0.0.1:1/hook", str(tmp_path / "secret"))
    sinks = SinkConfig(kafka=KafkaSinkConnector(bootstrap="127.0.0.1:1", topic="answers.v1"))
    gateway = make_gateway(replace(config(), webhooks=(webhook,), sink=sinks), source=QueueSource())
    try:
        exported = gateway.status.metrics().decode()
    finally:
        gateway.store.close()
        gateway.store.unlink()
    assert 'foretick_webhook_waiting{webhook="desk"} 0' in exported
    assert 'foretick_publish_retries_total{sink="kafka"} 0' in exported
