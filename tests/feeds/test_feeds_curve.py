"""CURVE over real sockets: who has the keys gets all, who has not gets nothing and is counted."""

import asyncio
import stat
from pathlib import Path

import pytest
import zmq

from feeds.connector import SettingError
from feeds.connectors.zeromq import ZmqSinkConnector, ZmqSourceConnector
from feeds.curve import CurveKeys, Keys, make_keys
from feeds.zmq_feed import ZmqSink, ZmqSource
from tests.kit import until
from tests.kit.daemon import invoke

ANYWHERE = "tcp://127.0.0.1:*"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name in ("server", "friend", "stranger"):
        make_keys(tmp_path / name)
    return tmp_path


def connecting(folder: Path, name: str, server: str = "server") -> CurveKeys:
    return CurveKeys(str(folder / f"{name}.secret"), str(folder / f"{server}.public"))


def sink_of(folder: Path, *clients: str) -> ZmqSink:
    curve = CurveKeys(
        str(folder / "server.secret"), client_key_files=tuple(str(folder / f"{c}.public") for c in clients)
    )
    sink = ZmqSinkConnector(endpoint=ANYWHERE, curve=curve).open("out", 1.0).sink
    assert isinstance(sink, ZmqSink)
    return sink


def source_of(endpoint: str, curve: CurveKeys) -> ZmqSource:
    source = ZmqSourceConnector(endpoint=endpoint, curve=curve).open("in", 1.0)
    assert isinstance(source, ZmqSource)
    return source


async def first(source: ZmqSource) -> bytes:
    async for batch in source.batches():
        return batch[0].payload
    return b""


async def keep_publishing(sink: ZmqSink) -> None:
    while True:
        await sink.publish("t", None, b"answer", {})
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("clients", [(), ("friend",)])
async def test_only_who_has_the_keys_gets_answers(keys: Path, clients: tuple[str, ...]) -> None:
    sink = sink_of(keys, *clients)
    await sink.start()
    publishing = asyncio.ensure_future(keep_publishing(sink))
    friend = source_of(sink.endpoint, connecting(keys, "friend"))
    outsiders = [
        source_of(sink.endpoint, CurveKeys()),  # in the clear
        source_of(sink.endpoint, connecting(keys, "friend", "stranger")),  # takes another for the server
    ]
    if clients:
        outsiders.append(source_of(sink.endpoint, connecting(keys, "stranger")))
    for source in (friend, *outsiders):
        await source.start()
    reading = [asyncio.ensure_future(first(source)) for source in outsiders]
    assert await asyncio.wait_for(first(friend), 60) == b"answer"
    await until(lambda: sink.handshakes_failed >= len(outsiders))
    assert not any(each.done() for each in reading)
    publishing.cancel()
    for source in (friend, *outsiders):
        await source.stop()
    assert await asyncio.gather(*reading) == [b""] * len(outsiders)
    await sink.stop()


async def test_a_feed_that_binds_admits_its_publishers_only(keys: Path) -> None:
    curve = CurveKeys(str(keys / "server.secret"), client_key_files=(str(keys / "friend.public"),))
    source = ZmqSourceConnector(endpoint=ANYWHERE, bind=True, curve=curve).open("in", 1.0)
    assert isinstance(source, ZmqSource)
    await source.start()
    for name in ("friend", "stranger"):
        sink = ZmqSinkConnector(endpoint=source.endpoint, bind=False, curve=connecting(keys, name))
        route = sink.open("out", 1.0)
        await route.sink.start()
        assert isinstance(route.sink, ZmqSink)
        publishing = asyncio.ensure_future(keep_publishing(route.sink))
        if name == "friend":
            assert await asyncio.wait_for(first(source), 10) == b"answer"
            assert source.handshakes_failed == 0
        else:
            await until(lambda: source.handshakes_failed > 0)
        publishing.cancel()
        await route.sink.stop()
    await source.stop()


def test_keys_are_written_for_their_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    done = invoke("keys", str(tmp_path / "desk"))
    assert done.exit_code == 0, done.output
    public, secret = tmp_path / "desk.public", tmp_path / "desk.secret"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (public, secret)} == {0o600}
    assert zmq.curve_public(secret.read_text().strip().encode()) == public.read_text().strip().encode()
    before = secret.read_bytes()
    again = invoke("keys", str(tmp_path / "desk"))
    assert again.exit_code == 2
    assert "desk.public: File exists" in again.output
    public.unlink()
    assert invoke("keys", str(tmp_path / "desk")).exit_code == 2
    assert secret.read_bytes() == before
    assert not public.exists()


@pytest.mark.parametrize(
    ("settings", "bind", "key", "says"),
    [
        ({"server_key_file": "server.public"}, False, "server_key_file", "needs secret_key_file"),
        ({"client_key_files": ("a",)}, True, "client_key_files", "needs secret_key_file"),
        ({"secret_key_file": "friend.secret"}, False, "server_key_file", "missing"),
        ({"secret_key_file": "none"}, True, "secret_key_file", "No such file"),
        ({"secret_key_file": "open.secret"}, True, "secret_key_file", "mode 0644"),
        ({"secret_key_file": "no.key"}, True, "secret_key_file", "holds no key"),
        (
            {"secret_key_file": "friend.secret", "server_key_file": "server.public"},
            *(True, "server_key_file", "this one binds"),
        ),
        (
            {"secret_key_file": "friend.secret", "client_key_files": ("a",)},
            *(False, "client_key_files", "this one connects"),
        ),
        (
            {"secret_key_file": "friend.secret", "server_key_file": "none"},
            *(False, "server_key_file", "cannot be read"),
        ),
    ],
)
def test_unusable_keys_name_their_setting(
    keys: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    bind: bool,
    key: str,
    says: str,
) -> None:
    monkeypatch.chdir(keys)
    (keys / "open.secret").write_text((keys / "friend.secret").read_text())
    (keys / "open.secret").chmod(0o644)
    (keys / "no.key").write_text("x\n")
    (keys / "no.key").chmod(0o600)
    connector = ZmqSinkConnector(endpoint=ANYWHERE, bind=bind, curve=CurveKeys(**settings))  # type: ignore[arg-type]  # as parametrized
    with pytest.raises(SettingError, match=says) as raised:
        connector.open("out", 1.0)
    assert raised.value.key == f"curve.{key}"
    (found,) = connector.check()
    assert (found.key, found.ok) == (f"curve.{key}", False)


def test_a_key_is_not_shown(keys: Path) -> None:
    found = CurveKeys(str(keys / "server.secret")).read(bind=True)
    assert isinstance(found, Keys)
    assert found.secret.decode() not in repr(found)
