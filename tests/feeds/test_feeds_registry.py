"""A schema registry behind a login and TLS, and settings that cannot be used."""

import asyncio
import base64
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from feeds.connector import SettingError
from feeds.payloads.settings import FormatRule, MessageSource, RegistrySettings
from tests.kit import until
from tests.kit.kafka import make_certificates

SCHEMA = '{"type": "string"}'
LINES = """
description = "trades, a line each"
container = "csv"
header = false
[[records]]
kind = "trade"
venue = "X"
time = { field = 0, format = "epoch-ms" }
fields = { symbol = 1, price = 2, size = 3 }
"""
BASIC = "Basic " + base64.b64encode(b"desk:tick tock").decode()


class Guarded(BaseHTTPRequestHandler):
    """Tells one schema to whoever shows one of the ``accepted`` headers."""

    accepted = (BASIC, "Bearer abc")
    refused = 0

    def do_GET(self) -> None:
        if self.headers["Authorization"] not in self.accepted:
            type(self).refused += 1
            self.send_response(401)
            body = b'{"error_code": 40101, "message": "who are you?"}'
        else:
            self.send_response(200)
            body = json.dumps([] if self.path.endswith("/subjects") else {"schema": SCHEMA}).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


Serve = Callable[[bool], str]


@pytest.fixture
def serve(certificates: Path) -> Iterator[Serve]:
    """Start it, with TLS or without; returns its URL."""
    started: list[ThreadingHTTPServer] = []

    def start(tls: bool) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Guarded)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates / "broker.pem", certificates / "broker.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"

    yield start
    for each in started:
        each.shutdown()
        each.server_close()


def secret(folder: Path, text: str) -> str:
    path = folder / "secret"
    path.touch(0o600)
    path.write_text(text)
    return str(path)


async def test_it_logs_in_by_password_over_tls(serve: Serve, certificates: Path, tmp_path: Path) -> None:
    login = secret(tmp_path, "desk\ntick tock\n")
    ca = str(certificates / "ca.pem")
    found = RegistrySettings(url=serve(True), credentials_file=login, ca_file=ca).open()
    assert found is not None
    await asyncio.wait_for(found.load([1]), 20)
    assert found.get(1).text == SCHEMA
    unknown = RegistrySettings(url=serve(True), credentials_file=login).open()
    assert unknown is not None
    loading = asyncio.create_task(unknown.load([1]))
    await until(lambda: unknown.failed > 0)
    loading.cancel()


async def test_it_logs_in_by_token_and_waits_while_it_is_refused(serve: Serve, tmp_path: Path) -> None:
    url = serve(False)
    found = RegistrySettings(url=url, token_file=secret(tmp_path, "abc\n")).open()
    assert found is not None
    await asyncio.wait_for(found.load([1]), 20)
    assert found.get(1).kind == "AVRO"
    source = MessageSource(registry=RegistrySettings(url=url, token_file=str(tmp_path / "secret")))
    (answers,) = await asyncio.to_thread(lambda: list(source.check_formats()))
    assert (answers.ok, answers.key) == (True, "registry.url")
    stranger = MessageSource(registry=RegistrySettings(url=url))
    (refused,) = await asyncio.to_thread(lambda: list(stranger.check_formats()))
    assert (refused.ok, refused.key, "does not answer" in refused.message) == (False, "registry.url", True)
    before = Guarded.refused
    nameless = RegistrySettings(url=url).open()
    assert nameless is not None
    loading = asyncio.create_task(nameless.load([1]))
    await until(lambda: nameless.failed > 1)
    assert Guarded.refused > before
    assert not loading.done()
    loading.cancel()


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"credentials_file": "missing"}, "registry.credentials_file"),
        ({"token_file": "missing"}, "registry.token_file"),
        ({"ca_file": "missing"}, "registry.url"),
    ],
)
def test_what_cannot_be_used_is_named(more: dict[str, str], key: str) -> None:
    source = MessageSource(registry=RegistrySettings(url="http://127.0.0.1:1", **more))
    (finding,) = source.check_formats()
    assert (finding.ok, finding.key) == (False, key)


def test_a_login_of_one_line_is_refused(tmp_path: Path) -> None:
    login = secret(tmp_path, "desk")
    with pytest.raises(SettingError, match="two lines"):
        RegistrySettings(url="http://127.0.0.1:1", credentials_file=login).open()


def test_a_format_that_is_missing_is_named() -> None:
    source = MessageSource(formats=(FormatRule("none.toml"),))
    (finding,) = source.check_formats()
    assert finding.key == "formats[0].format"
    assert "none.toml" in finding.message
    assert list(MessageSource().check_formats()) == []


def test_only_documents_without_a_schema_are_asked_for_a_field(tmp_path: Path) -> None:
    lines = tmp_path / "lines.toml"
    lines.write_text(LINES)
    source = MessageSource(formats=(FormatRule(str(lines), field="type=halt"),))
    (finding,) = source.check_formats()
    assert (finding.ok, finding.key) == (False, "formats[0].field")
