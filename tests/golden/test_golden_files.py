"""What the last release has written is read by this one, or refused by a sentence; so are other versions."""

import json
import logging
import re
import struct
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata

from daemon.api.messages import decode_reply, decode_request
from daemon.config.errors import ConfigError
from daemon.config.former_keys import KEYS, VALUES, plain
from daemon.config.load import load_config
from daemon.config.tenants_file import read_tenants
from daemon.engine.snapshot_store import SavedSession
from daemon.gateway.checkpoint.state import FILE, ProgressStore
from daemon.progress import Progress, StoredProgress, decode_stored
from feeds import kafka_assignor
from feeds.codec import MalformedRecord, check_version, decode_message, encode, header_encoding
from feeds.file_format import load_format
from feeds.kafka_assignor import AssignedMember, WarmUpAssignor
from feeds.payloads.payload_decoder import WireDecoder
from feeds.source import Incoming
from flash.confidence import CalibrationError, read_calibration
from metrics.store import MetricStore
from regions.offload import snapshot_format
from regions.offload.snapshot_format import ForeignSnapshot, Snapshot, SnapshotHeader
from scheduler.costs import load as load_profile

FOLDER = Path(__file__).parent / "0.1.0"
PUBLISHED: list[dict[str, Any]] = json.loads((FOLDER / "published.json").read_text())
QUERY: dict[str, list[bytes]] = msgspec.msgpack.decode((FOLDER / "query.msgpack").read_bytes())
VERSION_AT = len(snapshot_format.MAGIC)
SHAPES = {8: "1359c3f7"}
"""By the format's number, a digest of what its header says: whoever changes that raises the number."""


def headers_of(message: dict[str, Any]) -> dict[str, bytes]:
    return {name: value.encode() for name, value in message["headers"].items()}


@pytest.mark.parametrize("message", PUBLISHED, ids=lambda each: each["headers"]["schema"])
def test_published_messages_mean_what_they_meant(message: dict[str, Any]) -> None:
    """All members that they had, with their values; members that are new have defaults."""
    headers = headers_of(message)
    check_version(headers)
    found = decode_message(message["value"].encode(), header_encoding(headers))
    before, now = json.loads(message["value"]), json.loads(encode(found))
    assert {name: now.get(name) for name in before} == before


@pytest.mark.parametrize("message", PUBLISHED, ids=lambda each: each["headers"]["schema"])
def test_messages_of_another_version_are_refused(message: dict[str, Any]) -> None:
    name = message["headers"]["schema"].replace(".v1", ".v2")
    headers = headers_of(message) | {"schema": name.encode()}
    with pytest.raises(MalformedRecord, match=rf"the message is {name}; this program reads version 1"):
        check_version(headers)
    decoder, incoming = WireDecoder(1 << 20), Incoming("", 0, 0, None, message["value"].encode(), headers, 0)
    decoder.read_symbols(["BINANCE:BTCUSDT"])
    assert not decoder.columns([incoming])["taken"].any()
    (part,) = decoder.parts(incoming).parts
    assert isinstance(part.record, MalformedRecord)
    assert part.record.reason == "schema"


def test_schemas_of_others_are_theirs() -> None:
    for name in (b"desk.v2", b"trade", b"", b"urn:trade.v2", "trade.v\u00b2".encode()):
        check_version({"schema": name})


RENAMED = {"promise_ns", "promises_missed"}
"""Members of replies that have other names now; they are in the changelog."""


def without(value: Any) -> Any:
    """The value without members that have other names now."""
    if isinstance(value, dict):
        return {name: without(each) for name, each in value.items() if name not in RENAMED}
    return [without(each) for each in value] if isinstance(value, list) else value


def within(before: Any, now: Any) -> bool:
    """Whether all that was said before is still said."""
    if isinstance(before, dict):
        return isinstance(now, dict) and all(n in now and within(v, now[n]) for n, v in before.items())
    if isinstance(before, list):
        return len(before) == len(now) and all(map(within, before, now))
    return bool(before == now)


@pytest.mark.parametrize("request_", QUERY["requests"], ids=lambda each: msgspec.msgpack.decode(each)["type"])
def test_requests_of_clients_are_understood(request_: bytes) -> None:
    before = msgspec.msgpack.decode(request_)
    found = decode_request(request_)  # with the members that are not written where they say nothing
    members = {"type": found.__struct_config__.tag, **msgspec.structs.asdict(found)}
    assert within(before, json.loads(msgspec.json.encode(members)))


@pytest.mark.parametrize("reply", QUERY["replies"], ids=lambda each: msgspec.msgpack.decode(each)["type"])
def test_replies_of_an_older_daemon_are_understood(reply: bytes) -> None:
    before = without(msgspec.msgpack.decode(reply))
    now = json.loads(msgspec.json.encode(decode_reply(reply)))
    assert within(json.loads(msgspec.json.encode(before)), now)


def test_server_sent_events_are_those_of_today() -> None:
    events = (FOLDER / "events.sse").read_text().strip().split("\n\n")
    assert len(events) > 1
    for event in events:
        lines = dict(line.split(": ", 1) for line in event.splitlines())
        found = decode_message(lines["data"].encode())
        assert lines["event"] == found.__struct_config__.tag
        assert re.fullmatch(r"[\d.]+", lines["id"])


def snapshot(version: int, folder: Path) -> Path:
    """The release's file with another version."""
    data = bytearray((FOLDER / "session.snapshot").read_bytes())
    struct.pack_into("<I", data, VERSION_AT, version)
    (path := folder / "session.snapshot").write_bytes(data)
    return path


@pytest.mark.parametrize("version", [0, 3, 4, snapshot_format.FORMAT + 1, 2**32 - 1])
def test_snapshots_of_another_version_are_refused(version: int, tmp_path: Path) -> None:
    with pytest.raises(ForeignSnapshot, match=f"format version {version}; this program reads "):
        Snapshot.open(snapshot(version, tmp_path))


def test_the_release_s_own_snapshot_is_of_such_a_version() -> None:
    """Its KV is computed again from the log."""
    with pytest.raises(ForeignSnapshot, match="format version 3"):
        Snapshot.open(FOLDER / "session.snapshot")


def shape() -> str:
    """A digest of what a snapshot's header holds, member by member, in order."""
    kinds = [SnapshotHeader, SavedSession]
    seen: dict[str, list[str]] = {}
    while kinds:
        info = msgspec.inspect.type_info(kinds.pop())
        for found in _structs(info):
            if found.cls.__name__ not in seen:
                seen[found.cls.__name__] = [f"{each.name}: {each.type!r}" for each in found.fields]
                kinds += [each.cls for field in found.fields for each in _structs(field.type)]
    return re.sub(r" at 0x\w+|<class '[^']*'>", "", repr(sorted(seen.items())))


def _structs(info: Any) -> list[Any]:
    """All structs and named tuples within a type."""
    if isinstance(info, msgspec.inspect.StructType | msgspec.inspect.NamedTupleType):
        return [info]
    inner = [getattr(info, name, None) for name in ("type", "item_type", "key_type", "value_type")]
    inner += [*getattr(info, "types", ()), *getattr(info, "item_types", ())]
    return [each for part in inner if part is not None for each in _structs(part)]


def test_whoever_changes_what_a_snapshot_holds_raises_its_version() -> None:
    assert SHAPES[snapshot_format.FORMAT] == blake2b(shape().encode(), digest_size=4).hexdigest()


def test_the_release_s_progress_is_refused_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes((FOLDER / "progress").read_bytes())
    store = MetricStore.local({"session": [], "source": [], "sink": []})
    with caplog.at_level(logging.WARNING):
        progress = ProgressStore(store, tmp_path)
    assert "release 0.1.0 wrote it; numbers of answers begin again" in caplog.text
    assert store.value("foretick_recovery_progress_refused_total") == 1
    assert progress.start(["btcusdt"]) == {"btcusdt": Progress(epoch=1)}


def test_progress_of_the_next_release_is_read_as_far_as_it_is_known() -> None:
    """Records are arrays: what later releases append is passed over."""
    now = StoredProgress(Progress(3, 812, 4872), 3, "tcp://127.0.0.1:7801")
    later = [*msgspec.to_builtins(now, builtin_types=(bytes,)), {"of": "tomorrow"}]
    assert decode_stored(msgspec.msgpack.encode(later)) == now


@pytest.mark.parametrize("path", sorted(FOLDER.glob("config-*.toml")), ids=lambda path: path.name)
def test_configurations_are_read(path: Path) -> None:
    assert load_config(path, environment={}).sessions


def test_every_key_of_the_release_is_a_key_or_has_a_sentence() -> None:
    reference = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    tables = re.findall(r"^## `\[+([\w.]+)\]+`[^\n]*\n(.*?)(?=^## |\Z)", reference, re.M | re.S)
    now = {f"{table}.{key}" for table, rows in tables for key in re.findall(r"^\| `(\w+)` \|", rows, re.M)}
    before = set((FOLDER / "keys").read_text().split())
    assert len(before) > 200
    assert before - now == KEYS.keys()


SESSION = '[[sessions]]\nname = "a"\nsymbol = "V:A"\n'


@pytest.mark.parametrize("key", KEYS)
def test_keys_that_are_no_more_name_what_stands_in_their_place(key: str, tmp_path: Path) -> None:
    table, _, name = key.partition(".")
    text = f"{SESSION}{name} = 1\n" if table == "sessions" else f"[{table}]\n{name} = 1\n{SESSION}"
    (path := tmp_path / "foretick.toml").write_text(text)
    with pytest.raises(
        ConfigError, match=re.escape(f"there is no such key any more: {KEYS[key]}")
    ) as refused:
        load_config(path, environment={})
    assert plain(refused.value.problems[0].key) == key
    number = ".0" if table == "sessions" else ""
    path.write_text(SESSION)
    with pytest.raises(ConfigError, match=re.escape(KEYS[key])):
        load_config(path, {}, {f"{table}{number}.{name}": "1"})


@pytest.mark.parametrize(
    ("key", "old", "new"), [(k, a, b) for k, each in VALUES.items() for a, b in each.items()]
)
def test_values_that_were_renamed_say_so(key: str, old: str, new: str) -> None:
    at = key.replace("sessions.", "sessions.0.")
    given = {"sessions": [{"name": "a", "symbol": "V:A"}], at: old}
    with pytest.raises(ConfigError, match=f"{old} is named {new} now"):
        load_config(None, {}, given)


def test_other_files_of_the_administrator_are_read() -> None:
    for path in FOLDER.glob("tenants-*.toml"):
        assert read_tenants(str(path))
    for path in FOLDER.glob("format-*.toml"):
        assert load_format(path).description
    assert load_profile(FOLDER / "profile.json")


def test_calibrations_are_read_and_other_versions_refused(tmp_path: Path) -> None:
    text = json.loads((FOLDER / "calibration.json").read_text())
    found = read_calibration(FOLDER / "calibration.json", text["model"], text["lines"])
    assert len(found.questions) == 1
    (other := tmp_path / "calibration.json").write_text(json.dumps(text | {"version": 2}))
    with pytest.raises(CalibrationError, match="version 2"):
        read_calibration(other, text["model"], text["lines"])


# A rolling restart within a group: members of two builds, whose claims differ.

PARTITIONS = [("md.trades.v1", number) for number in range(4)]
CLUSTER = SimpleNamespace(partitions_for_topic=lambda topic: range(4))


def joined(*names: str) -> dict[str, WarmUpAssignor]:
    return {name: WarmUpAssignor() for name in names}


def as_sent(assignor: WarmUpAssignor, build: str) -> ConsumerProtocolMemberMetadata:
    """Its claims, as a build sends them that knows one member less, or one more, than this."""
    metadata = assignor.metadata(["md.trades.v1"])
    claims = msgspec.msgpack.decode(metadata.user_data)
    claims = {"older": claims[:-1], "newer": [*claims, {"of": "tomorrow"}], "same": claims}[build]
    return ConsumerProtocolMemberMetadata(
        metadata.version, metadata.subscription, msgspec.msgpack.encode(claims)
    )


@pytest.mark.parametrize("other", ["older", "newer"])
@pytest.mark.parametrize("leader", ["one", "two"])
def test_members_of_two_builds_agree_while_they_are_restarted_one_by_one(other: str, leader: str) -> None:
    """Whoever leads: every partition has one owner, and nobody loses one while the other is not ready."""
    members = joined("one", "two")
    builds = {"one": "same", "two": other}
    for generation in range(3):
        sent = {name: as_sent(each, builds[name]) for name, each in members.items()}
        found = members[leader].assign(CLUSTER, sent)
        before = {name: each.plan.partitions for name, each in members.items()}
        for name, each in members.items():
            each.on_assignment(_received(found[name]))
            each.note_joined(generation)
            each.note_ready(each.plan.warm)
        owned = [p for each in members.values() for p in each.plan.partitions]
        assert sorted(owned) == PARTITIONS
        assert generation == 0 or all(
            before[name] <= each.plan.partitions | members[_other(name)].plan.moved
            for name, each in members.items()
        )
    assert all(len(each.plan.partitions) == 2 for each in members.values())


def _other(name: str) -> str:
    return {"one": "two", "two": "one"}[name]


def _received(assignment: Any) -> Any:
    parts = [SimpleNamespace(topic=t, partition=n) for t, ns in assignment.assignment for n in ns]
    return SimpleNamespace(partitions=lambda: parts, user_data=assignment.user_data)


def test_a_member_of_the_release_claims_nothing_and_gets_partitions() -> None:
    """Kafka lets it into the group only with an assignor of the same name, and its name is another."""
    metadata = ConsumerProtocolMemberMetadata.decode((FOLDER / "member.bin").read_bytes())
    claimed = kafka_assignor._member(metadata)
    assert claimed == AssignedMember(topics=frozenset(["md.trades.v1"]))
