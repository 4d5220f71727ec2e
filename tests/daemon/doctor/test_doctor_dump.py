"""`foretick dump` holds what is needed to help, and no secret, wherever a configuration may have one."""

import json
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from msgspec import inspect

from daemon.config.load import load_config
from daemon.config.overrides import bare
from daemon.config.schema import Config, SinkConfig
from daemon.doctor.bundle import ENVIRONMENT, members_of, write_bundle
from daemon.doctor.diagnosis import fine
from daemon.doctor.examination import Facts
from daemon.doctor.machine import Machine
from daemon.doctor.redaction import REMOVED, SECRET_FILES, Redactor
from daemon.doctor.running import Daemon
from daemon.tenants import hash_of
from feeds.connectors.kafka import KafkaSinkConnector
from feeds.kafka_security import KafkaSecurity
from tests.kit.daemon import invoke
from tests.kit.kafka import free_ports

PUBLIC_FILES = (
    *("ca_file", "certificate_file", "tls_certificate_file", "server_key_file", "client_key_files"),
    "instruments_file",
)
"""Keys whose files hold no secret."""
MACHINE = Machine({"foretick": "0.1.0"}, 2, 0.5, 1 << 34, 1 << 30, 4096, None, False, 0.001)
SECRETS = {
    "sasl": "sasl-pa55word",
    "registry_login": "registry-pa55word",
    "registry_token": "registry-t0ken-of-the-desk",
    "header": "header-t0ken-of-the-venue",
    "other_header": "another-header-t0ken",
    "url_password": "url-pa55word",
    "url_key": "url-qu3ry-key",
    "url_path": "url-path-0123456789abcdef",
    "proxy": "proxy-pa55word",
    "subscribed": "subscr1bed-signature-0123",
    "pem": "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgc2VjcmV0",
    "curve": zmq.curve_keypair()[1].decode(),
    "sink_curve": zmq.curve_keypair()[1].decode(),
    "hash": hash_of("a tenant's key"),
}


def configured(folder: Path) -> Path:
    """A configuration that holds a secret wherever one may be."""

    def file(name: str, text: str) -> Path:
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
        return folder / name

    pem = f"-----BEGIN PRIVATE KEY-----\n{SECRETS['pem']}\n-----END PRIVATE KEY-----\n"
    tenants = f'[[tenants]]\nname = "desk"\napi_keys = ["{SECRETS["hash"]}"]\n'
    headers = f"Authorization: Bearer {SECRETS['header']}\nX-Key: {SECRETS['other_header']}\n"
    http, query, venue = free_ports(3)
    text = f"""
[model]
path = "untrained"
layers = "torch"
[http]
port = {http}
tls_certificate_file = "{file("own.pem", "no certificate")}"
tls_key_file = "{file("tls.key", pem)}"
[query]
endpoint = "tcp://127.0.0.1:{query}"
secret_key_file = "{file("query.secret", SECRETS["curve"])}"
[tenants]
file = "{file("tenants.toml", tenants)}"
[recovery]
directory = "{folder / "snapshots"}"
[source]
kind = "websocket"
[source.websocket]
url = "wss://desk:{SECRETS["url_password"]}@127.0.0.1:{venue}/{SECRETS["url_path"]}/ws?api_key={SECRETS["url_key"]}"
proxy = "http://desk:{SECRETS["proxy"]}@127.0.0.1:{venue}"
subscribe = ['{{"op":"login","sign":"{SECRETS["subscribed"]}"}}']
headers_file = "{file("headers", headers)}"
[source.websocket.registry]
url = "https://desk:{SECRETS["registry_login"]}@127.0.0.1:{venue}"
token_file = "{file("token", SECRETS["registry_token"])}"
[sink.kafka]
bootstrap = "127.0.0.1:{venue}"
[sink.kafka.security]
sasl = "scram-sha-512"
credentials_file = "{file("login", f"desk{chr(10)}{SECRETS['sasl']}{chr(10)}")}"
[sink.zeromq]
endpoint = "tcp://127.0.0.1:{venue}"
[sink.zeromq.curve]
secret_key_file = "{file("sink.secret", SECRETS["sink_curve"])}"
[[sessions]]
name = "btcusdt"
symbol = "BINANCE:BTCUSDT"
retention_tokens = 1024
[[questions]]
name = "spike"
text = "Is there a spike?"
"""
    return file("foretick.toml", text)


def unpacked(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_no_secret_is_in_a_bundle_even_where_the_log_and_the_metrics_have_it(tmp_path: Path) -> None:
    config = load_config(configured(tmp_path), {})
    lines = [f"ERROR refused: {secret}, and again {secret}" for secret in SECRETS.values()]
    text = "".join(f'foretick_bars_total{{session="{secret}"}} 1\n' for secret in SECRETS.values())
    facts = Facts(MACHINE, (), (), Daemon("alive", exposition=text), tuple(lines))
    found = [fine("check", f"saw {secret}") for secret in SECRETS.values()]
    environment = {f"FORETICK_KEY_{name}": secret for name, secret in SECRETS.items()} | {
        "LANG": SECRETS["sasl"]
    }
    write_bundle(tmp_path / "b.zip", members_of(facts, found, config, environment))
    packed = (tmp_path / "b.zip").read_bytes()
    members = unpacked(tmp_path / "b.zip")
    for name, secret in SECRETS.items():
        assert secret.encode() not in packed, name
        assert [member for member, shown in members.items() if secret in shown] == [], name
    assert members["log.txt"].count(REMOVED) >= 2 * len(SECRETS)
    assert stat.S_IMODE((tmp_path / "b.zip").stat().st_mode) == 0o600


def test_the_command_writes_the_bundle_without_a_daemon_and_never_over_another_file(tmp_path: Path) -> None:
    config, bundle = configured(tmp_path), tmp_path / "b.zip"
    arguments = ["dump", "--config", str(config), "--unit", "no-such-unit", "--output", str(bundle)]
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    members = unpacked(bundle)
    shown_secrets = {name for name, secret in SECRETS.items() for text in members.values() if secret in text}
    assert shown_secrets == set()
    shown = json.loads(members["configuration.json"])
    assert shown["sessions"][0]["symbol"] == "BINANCE:BTCUSDT"
    assert shown["sink"]["kafka"]["security"]["credentials_file"] == str(tmp_path / "login")
    assert shown["source"]["websocket"]["url"].startswith(f"wss://{REMOVED}@127.0.0.1:")
    verdicts = {each["check"]: each["verdict"] for each in json.loads(members["findings.json"])}
    assert verdicts["sink.kafka"] == verdicts["http.tls_certificate_file"] == "problem"
    assert verdicts["source.websocket.url"] == "warning"
    assert "torch" in json.loads(members["packages.json"])
    again = invoke(*arguments)
    assert again.exit_code == 2
    assert "cannot be written: File exists" in again.stderr


def test_only_listed_variables_are_shown(tmp_path: Path) -> None:
    facts = Facts(MACHINE, (), (), Daemon("absent"), None)
    members = members_of(facts, [], Config(), {"TZ": "UTC", "AWS_SECRET_ACCESS_KEY": "x", "PATH": "/bin"})
    assert json.loads(members["environment.json"]) == {"TZ": "UTC"}
    assert not {name for name in ENVIRONMENT if re.search("KEY|SECRET|PASS|TOKEN", name)}
    assert {"log.txt", "metrics.txt"}.isdisjoint(members)


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer abcdefgh",
        'headers {"authorization": "Basic abcdefgh"}',
        "login with password=abcdefgh failed",
        "connecting to https://abcdefgh@venue/ws",
        "api_key: abcdefgh",
        "sent Bearer abcdefgh to the venue",
        "Authorization: Token abcdefgh",
        "Cookie: session=1234; id=abcdefgh",
        "passphrase: 1234 abcdefgh",
        "GET /ws?listenKey=abcdefgh",
        "listen_key=abcdefgh",
        "access_token=abcdefgh",
        "{'password': 'abcdefgh'}",
        "{b'password': b'abcdefgh'}",
        'token="a b c abcdefgh"',
        "token='a b c abcdefgh'",
        'token="a \\" b abcdefgh"',
        '{"message": "sent {\\"token\\": \\"1 abcdefgh\\"}"}',
        "wss://feed.example/v2/9f8e7d6c5b4a3928abcdefgh/stream refused",
        "https://[::1]:8443/9f8e7d6c5b4a3928abcdefgh, again",
        "https://desk@hook.example//9f8e7d6c5b4a3928abcdefgh?x=1",
    ],
)
def test_what_looks_like_a_secret_is_removed_although_no_file_has_it(line: str) -> None:
    assert "abcdefgh" not in Redactor(()).clean(line)


def test_words_about_tokens_stay() -> None:
    line = "btcusdt: 4096 tokens, the token budget, retention_tokens: 4096, a secret file, key columns"
    assert Redactor.of(Config()).clean(line) == line


@pytest.mark.parametrize(
    "url",
    [
        "https://registry-1.markets-eu-2.venue.example:8081/apis/ccompat/v7/subjects?topic=trades",
        "wss://venue.example/ws/1000shibusdt_240927@depth20@100ms",
        "wss://venue.example/derivatives-market-data/v2",
    ],
)
def test_hosts_and_streams_in_urls_stay(url: str) -> None:
    assert Redactor(()).clean(f"connected to {url}.") == f"connected to {url}."


def test_only_the_secret_is_removed_from_a_line() -> None:
    line = "GET wss://feed.example/{}/stream?listenKey={}&x=1 'token': {}, 200"
    secrets = "9f8e7d6c5b4a3928abcdefgh", "abcdefgh", "'a b'"
    assert Redactor(()).clean(line.format(*secrets)) == line.format(REMOVED, REMOVED, REMOVED)


def test_a_secret_is_found_as_json_and_urls_write_it(tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text('desk\npa"ss wörd\n')
    security = KafkaSecurity(sasl="scram-sha-256", credentials_file=str(login))
    redactor = Redactor.of(Config(sink=SinkConfig(kafka=KafkaSinkConnector("b:1", security=security))))
    for shown in ('pa"ss wörd', json.dumps('pa"ss wörd')[1:-1], "pa%22ss%20w%C3%B6rd"):
        assert redactor.clean(f"desk, {shown}.") == f"desk, {REMOVED}."


def test_every_key_that_may_lead_to_a_secret_is_known() -> None:
    """A new key whose name sounds so is put into one of the two lists, or handled apart."""
    apart = {"file", "url", "proxy", "subscribe", "header"}
    sounds = re.compile("file|url|proxy|secret|password|credential|subscribe|header|_key")
    names = {name for name in _names(Config) if sounds.search(name)}
    assert names <= {*SECRET_FILES, *PUBLIC_FILES, *apart, "profile"}
    assert {*SECRET_FILES, *PUBLIC_FILES, *apart} <= names


def _names(struct: type[msgspec.Struct]) -> Iterator[str]:
    """The keys of a table and of those in it whose values are text or lists of it."""
    for field in msgspec.structs.fields(struct):
        yield field.encode_name
        inner = bare(inspect.type_info(field.type))
        if isinstance(inner, inspect.VarTupleType):
            inner = bare(inner.item_type)
        if isinstance(inner, inspect.StructType):
            yield from _names(inner.cls)
