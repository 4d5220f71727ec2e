"""`foretick dlq`: what it lists and shows, and that each record is sent once, on a real and a mock broker."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.audit.redrive import Cluster, DeadLetterEntry, Place, RecordFilter, contents, obstacle, redrive
from daemon.cli.dlq import hexdump, home_of, readable
from daemon.gateway.dead_letters import unreadable
from feeds.codec import MalformedRecord, encode
from feeds.kafka_range import KafkaRange
from feeds.kafka_sink import KafkaSink
from feeds.kafka_source import KafkaSource
from feeds.market_data import DeadLetter, Redriven
from feeds.mock_broker import MockBroker
from feeds.source import Incoming, SinkStopped
from tests.daemon.audit.broker import run_everything, run_fill
from tests.kit.daemon import invoke
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import create_topics, producing

SECOND = 1_000_000_000
NOON = 1_723_161_600 * SECOND


def dead_letter(n: int = 0, payload: bytes = b"{", **more: object) -> DeadLetter:
    fields = {
        "error": "json: truncated",
        "reason": "json",
        "topic": "in",
        "partition": 0,
        "offset": n,
        "payload": payload,
        "key": b"V:AAA",
        "headers": {"h": b"\x00\xff"},
        "size": len(payload),
        "failed_at": NOON + n * SECOND,
    }
    return DeadLetter(**(fields | more))  # type: ignore[arg-type]  # a record's


@pytest.fixture
def mock() -> Iterator[str]:
    with MockBroker() as broker:
        for topic in ("dlq.v1", "in", "other"):
            broker.create_topic(topic, 1)
        yield broker.bootstrap


MakeTopics = Callable[[int], tuple[str, list[str]]]
"""By number of partitions: the broker's address, and the names of a DLQ topic and two others."""


@pytest.fixture(params=["mock", pytest.param("apache", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest) -> MakeTopics:
    if request.param == "mock":
        mock = request.getfixturevalue("mock")
        return lambda partitions: (mock, ["dlq.v1", "in", "other"])
    real: RealKafka = request.getfixturevalue("real_kafka")
    names = [f"{name}.{uuid.uuid4().hex[:8]}" for name in ("dlq", "in", "other")]

    def make(partitions: int) -> tuple[str, list[str]]:
        asyncio.run(create_topics(real.bootstrap, dict.fromkeys(names, partitions)))
        return real.bootstrap, names

    return make


def rows(bootstrap: str, *arguments: str) -> list[dict[str, Any]]:
    result = invoke("dlq", "list", "--bootstrap", bootstrap, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def places(bootstrap: str, *arguments: str) -> list[str]:
    return [row["place"] for row in rows(bootstrap, *arguments)]


def redriven(bootstrap: str, *arguments: str) -> list[dict[str, Any]]:
    result = invoke("dlq", "redrive", "--bootstrap", bootstrap, "--json", *arguments)
    return [json.loads(line) for line in result.output.splitlines()]


def test_letters_are_listed_by_reason_stage_topic_and_time(mock: str) -> None:
    run_fill(
        mock,
        "dlq.v1",
        [
            dead_letter(0),
            dead_letter(1, reason="late", stage="process"),
            dead_letter(2, topic="answers.v1", partition=-1, offset=-1, stage="produce", reason="too_large"),
            b"no record",
        ],
    )
    assert places(mock) == ["0:0", "0:1", "0:2"]
    assert [row["reason"] for row in rows(mock, "--reason", "late", "--reason", "too_large")] == [
        "late",
        "too_large",
    ]
    assert places(mock, "--stage", "process") == ["0:1"]
    assert places(mock, "--topic", "answers.v1") == ["0:2"]
    noon = "2024-08-09T00:00:01Z"
    assert places(mock, "--from", noon, "--until", "2024-08-09T00:00:02Z") == ["0:1"]
    table = invoke("dlq", "list", "--bootstrap", mock).output
    assert "3 of 3 records" in table
    assert "in/0@0" in table
    assert "1 messages in dlq.v1 are no DLQ records" in table


def test_show_prints_the_payload_readable_and_raw(mock: str) -> None:
    packed = msgspec.msgpack.encode({"price": "1", "raw": b"\x01"})
    run_fill(mock, "dlq.v1", [dead_letter(payload=packed, headers={"encoding": b"msgpack", "b": b"\xff"})])
    output = invoke("dlq", "show", "0:0", "--bootstrap", mock).output
    assert '"price": "1"' in output
    assert "00000000  82 a5 70 72 69 63 65" in output
    assert "header:    b = base64 /w==" in output
    assert "key:       V:AAA" in output
    shown = json.loads(invoke("dlq", "show", "0:0", "--bootstrap", mock, "--json").output)
    assert msgspec.convert(shown["record"], DeadLetter) == dead_letter(
        payload=packed, headers={"encoding": b"msgpack", "b": b"\xff"}
    )
    missing = invoke("dlq", "show", "0:9", "--bootstrap", mock)
    assert (missing.exit_code, "no record at 0:9" in missing.output) == (1, True)
    assert invoke("dlq", "show", "nine", "--bootstrap", mock).exit_code == 2


def test_each_letter_is_sent_once(broker: MakeTopics) -> None:
    """The life of three records."""
    bootstrap, (dlq, source, other) = broker(2)
    run_fill(bootstrap, dlq, [dead_letter(n, payload=b"%d" % n, topic=source) for n in range(3)])
    where = ("--dlq", dlq)
    first, *others = places(bootstrap, *where)
    dry = redriven(bootstrap, *where, "--every", "--dry-run")
    assert [(row["sent"], row["to"], row["why"]) for row in dry] == [(False, source, "")] * 3
    assert run_everything(bootstrap, source) == []
    assert [(row["place"], row["sent"]) for row in redriven(bootstrap, *where, first)] == [(first, True)]
    (sent,) = run_everything(bootstrap, source)
    assert (sent.payload, sent.key) == (b"0", b"V:AAA")
    assert sent.headers == {"h": b"\x00\xff", "redriven": f"{dlq}/{first.replace(':', '@')}".encode()}
    # once more by its place is refused, and by a filter it is left out
    (refused,) = redriven(bootstrap, *where, first)
    assert (refused["sent"], "sent again before" in refused["why"]) == (False, True)
    rest = redriven(bootstrap, *where, "--reason", "json", "--to", other)
    assert [(row["place"], row["sent"]) for row in rest] == [(place, True) for place in others]
    assert redriven(bootstrap, *where, "--every") == []
    assert len(run_everything(bootstrap, source)) == 1
    assert sorted(message.payload for message in run_everything(bootstrap, other)) == [b"1", b"2"]
    assert places(bootstrap, *where) == []
    assert {row["state"] for row in rows(bootstrap, *where, "--all")} == {"sent"}
    assert [row["sent"] for row in redriven(bootstrap, *where, first, "--again")] == [True]
    assert len(run_everything(bootstrap, source)) == 2


def test_an_original_with_several_letters_is_sent_once(mock: str) -> None:
    """A record that was read again after a restart, beside another record of the same message."""
    same = [dead_letter(0, b"a"), dead_letter(0, b"b"), dead_letter(0, b"a", failed_at=NOON + SECOND)]
    answer = dead_letter(-1, b"a", partition=-1, stage="produce")
    run_fill(mock, "dlq.v1", [*same, answer, answer])
    assert [row["sent"] for row in redriven(mock, "0:2")] == [True]
    assert {row["place"]: row["state"] for row in rows(mock, "--all")} == {
        "0:0": "sent",
        "0:1": "new",
        "0:2": "sent",
        "0:3": "new",
        "0:4": "new",
    }
    run_fill(mock, "dlq.v1", [dead_letter(0, b"b")])
    told = redriven(mock, "--every")
    assert [(row["sent"], row["why"]) for row in told if not row["sent"]] == [
        (False, "the record at 0:1 has the same original")
    ]
    assert sorted(message.payload for message in run_everything(mock, "in")) == [b"a", b"a", b"a", b"b"]
    assert redriven(mock, "--every") == []


class Killed(KafkaSink):
    """A sink whose process dies after so many messages."""

    left = 0

    async def publish(self, topic, key, payload, headers):  # type: ignore[no-untyped-def]  # as above
        if not self.left:
            raise SinkStopped("killed")
        self.left -= 1
        await super().publish(topic, key, payload, headers)


async def redrive_all(bootstrap: str, sink: KafkaSink) -> int:
    """How many were sent."""
    await sink.start()
    try:
        async with KafkaRange(bootstrap) as reader:
            dead_letters = list((await contents(reader, "dlq.v1")).dead_letters.values())
            return sum(each.sent for each in await redrive(Cluster(reader, sink), "dlq.v1", dead_letters))
    finally:
        await sink.stop()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("messages", range(7))
def test_whenever_a_redrive_breaks_off_no_letter_is_sent_twice_by_the_next(mock: str, messages: int) -> None:
    run_fill(mock, "dlq.v1", [dead_letter(n, payload=b"%d" % n) for n in range(2)])

    sink = Killed("killed", mock)
    sink.left = messages
    with contextlib.nullcontext() if messages == 6 else pytest.raises(SinkStopped):
        asyncio.run(redrive_all(mock, sink))
    redriven(mock, "--every")
    arrived = [message.payload for message in run_everything(mock, "in")]
    assert len(arrived) == len(set(arrived))  # none twice
    # what may have been sent is told, and goes out on request only
    states = [row["state"] for row in rows(mock, "--all")]
    assert all(state == "sent" or (state == "claimed" and messages < 6) for state in states)
    told = redriven(mock, "0:0", "0:1")
    assert all(not row["sent"] and row["why"] for row in told)


def test_two_who_redrive_at_once_send_a_letter_once(mock: str) -> None:
    run_fill(mock, "dlq.v1", [dead_letter(n, payload=b"%d" % n) for n in range(5)])

    async def both() -> list[int]:
        return await asyncio.gather(*(redrive_all(mock, KafkaSink(name, mock)) for name in ("one", "two")))

    assert sum(asyncio.run(both())) == 5
    assert sorted(message.payload for message in run_everything(mock, "in")) == [b"%d" % n for n in range(5)]


def test_a_cut_payload_is_read_again_from_its_topic_or_not_sent(mock: str) -> None:
    run_fill(mock, "in", [b"0123456789", b"other"])
    run_fill(
        mock,
        "dlq.v1",
        [
            dead_letter(0, payload=b"0123", size=10),
            dead_letter(1, payload=b"0123", size=10),
            dead_letter(2, payload=b"0123", size=10, partition=-1, offset=-1),
        ],
    )
    told = redriven(mock, "--every")
    assert {row["place"]: row["sent"] for row in told} == {"0:0": True, "0:1": False, "0:2": False}, told
    assert [row["why"] for row in told if not row["sent"]] == [
        "the record keeps 4 of 10 bytes, and in has something else at its offset",
        "the record keeps 4 of 10 bytes, and it is in no other topic",
    ]
    assert [message.payload for message in run_everything(mock, "in")][2:] == [b"0123456789"]


TWO_SOURCES = """
[[sessions]]
name = "a"
symbol = "V:A"
[[sources]]
name = "a"
kafka = { bootstrap = "%s", topics = ["in"] }
[[sources]]
name = "b"
zeromq = { endpoint = "tcp://127.0.0.1:1" }
"""


def test_originals_go_back_to_the_cluster_of_their_source(mock: str, tmp_path: Path) -> None:
    file = tmp_path / "foretick.toml"
    with MockBroker() as far:
        far.create_topic("in", 1)
        run_fill(far.bootstrap, "in", [b"0123456789"])
        sink = f'[sink.kafka]\nbootstrap = "{mock}"\n'
        file.write_text(sink + TWO_SOURCES % far.bootstrap)
        run_fill(
            mock,
            "dlq.v1",
            [
                dead_letter(0, b"0123", size=10, source="a"),
                dead_letter(1, b"1", source="gone"),
                dead_letter(2, b"2"),
                dead_letter(-1, b"3", topic="other", partition=-1, stage="produce"),
                dead_letter(4, b"4", source="b"),
            ],
        )
        told = invoke("dlq", "redrive", "--config", str(file), "--every")
        assert "4 sent, 1 not" in told.output
        assert "0:4 not sent: its source b is not Kafka (--to" in told.output
        there = [message.payload for message in run_everything(far.bootstrap, "in")]
        assert there == [b"0123456789", b"0123456789", b"1", b"2"]
        assert [message.payload for message in run_everything(mock, "other")] == [b"3"]
        told = invoke("dlq", "redrive", "--config", str(file), "--every", "--to", "other")
        assert "1 sent, 0 not" in told.output
        assert [message.payload for message in run_everything(mock, "other")] == [b"3", b"4"]
        assert run_everything(mock, "in") == []


@pytest.mark.parametrize(
    ("source", "kafka", "to", "home", "why"),
    [
        ("a", ["a", "b"], "", "a", ""),
        ("a", ["a", "b"], "t", "a", ""),
        ("", ["a"], "", "a", ""),
        ("gone", ["a"], "t", "a", ""),
        ("", ["a", "b"], "", "", "it names no source, and there are 2 Kafka sources"),
        ("gone", ["a", "b"], "", "", "its source gone is not configured, and there are 2 Kafka sources"),
        ("gone", ["a", "b"], "t", "", ""),
        ("", [], "", "", "it names no source, and there are 0 Kafka sources"),
        ("z", ["a"], "", "", "its source z is not Kafka"),
        ("z", ["a"], "t", "", ""),
    ],
)
def test_a_letter_goes_to_its_source_the_only_one_or_where_it_is_told(
    source: str, kafka: list[str], to: str, home: str, why: str
) -> None:
    found, told = home_of(dead_letter(source=source), kafka, {"z"}, to)
    assert (found, told.partition(" (")[0]) == (home, why)


async def received(bootstrap: str, topic: str, count: int) -> list[Incoming]:
    """As the daemon gets it."""
    source, got = KafkaSource("in", bootstrap, [topic], None), list[Incoming]()
    await source.start()
    async for batch in source.batches():
        got += batch
        if len(got) >= count:
            break
    await source.stop()
    return got


def test_nulls_of_a_record_are_kept_as_empty(broker: MakeTopics) -> None:
    """Records with null keys, values and headers become records, and are sent again."""
    bootstrap, (dlq, source, _) = broker(1)

    async def produce() -> None:
        async with producing(bootstrap) as producer:
            await producer.send_and_wait(source, b"{", headers=[("trace", None), ("a", b"1"), ("a", b"2")])
            await producer.send_and_wait(source, None, key=b"k", headers=[("encoding", None)])

    asyncio.run(produce())
    got = asyncio.run(received(bootstrap, source, 2))
    assert [(each.key, each.payload, each.headers) for each in got] == [
        (None, b"{", {"trace": b"", "a": b"2"}),
        (b"k", b"", {"encoding": b""}),
    ]
    run_fill(bootstrap, dlq, [unreadable(each, MalformedRecord("json", "no")) for each in got])
    for place in ("0:0", "0:1"):
        assert invoke("dlq", "show", place, "--bootstrap", bootstrap, "--dlq", dlq).exit_code == 0
    assert [row["sent"] for row in redriven(bootstrap, "--dlq", dlq, "--every")] == [True, True]
    again = run_everything(bootstrap, source)
    assert [(each.key, each.payload) for each in again] == [(None, b"{"), (b"k", b"")] * 2
    assert [{**each.headers, "redriven": b""} for each in again[2:]] == [
        {**each.headers, "redriven": b""} for each in got
    ]


def test_without_letters_named_nothing_is_sent(mock: str, tmp_path: Path) -> None:
    run_fill(mock, "dlq.v1", [dead_letter()])
    assert invoke("dlq", "redrive", "--bootstrap", mock).exit_code == 2
    assert invoke("dlq", "redrive", "--bootstrap", mock, "0:7").exit_code == 1
    assert invoke("dlq", "redrive").exit_code == 2
    assert invoke("dlq", "list", "--bootstrap", mock, "--dlq", "nowhere").exit_code == 1
    file = tmp_path / "foretick.toml"
    file.write_text("")
    nowhere = invoke("dlq", "list", "--config", str(file))
    assert (nowhere.exit_code, "sink.kafka" in nowhere.output) == (2, True)
    file.write_text(f'[sink.kafka]\nbootstrap = "{mock}"\n')
    assert "1 of 1 records" in invoke("dlq", "list", "--config", str(file)).output


def test_what_could_not_be_read_is_never_sent_again() -> None:
    unread = msgspec.structs.replace(dead_letter(), reason="corrupt", payload=b"", size=0)
    assert "nothing to send" in obstacle(DeadLetterEntry(Place(0, 0), unread, "new"), again=True)
    part = msgspec.structs.replace(dead_letter(), reason="corrupt", payload=b"{}", size=2)
    assert obstacle(DeadLetterEntry(Place(0, 0), part, "new"), again=False) == ""


@given(
    claims=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["claimed", "sent"])), max_size=4),
    again=st.booleans(),
)
def test_only_a_letter_that_nobody_claimed_is_free(claims: list[tuple[str, str]], again: bool) -> None:
    state = "sent" if any(s == "sent" for _, s in claims) else "claimed" if claims else "new"
    told = obstacle(DeadLetterEntry(Place(0, 0), dead_letter(), state), again)  # type: ignore[arg-type]  # a state
    assert (told == "") is (again or not claims)


@given(
    st.lists(
        st.tuples(st.sampled_from(["json", "late"]), st.sampled_from(["read", "process"]), st.integers(0, 9))
    )
)
def test_filters_choose_what_a_plain_comparison_does(kinds: list[tuple[str, str, int]]) -> None:
    dead_letters = [
        DeadLetterEntry(Place(0, n), dead_letter(reason=reason, stage=stage), failed_at=at)
        for n, (reason, stage, at) in enumerate(kinds)
    ]
    wanted = RecordFilter(reasons=["late"], stages=["process"], after=3, before=7)
    assert [wanted(each) for each in dead_letters] == [
        reason == "late" and stage == "process" and 3 <= at < 7 for reason, stage, at in kinds
    ]


@given(st.binary(max_size=80), st.sampled_from([b"json", b"msgpack", b"\xff"]))
def test_any_payload_can_be_shown(payload: bytes, encoding: bytes) -> None:
    shown = readable(
        DeadLetterEntry(Place(0, 0), dead_letter(payload=payload, headers={"encoding": encoding}))
    )
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    lines = hexdump(payload).splitlines()
    assert b"".join(bytes.fromhex(line[10:57].strip()) for line in lines) == payload


def test_a_note_is_no_letter_and_is_read_as_what_it_is() -> None:
    note = Redriven(partition=0, offset=1, to="in", claim="c", state="claimed", at=1)
    assert msgspec.json.decode(encode(note)) == {
        "type": "redriven", "partition": 0, "offset": 1, "to": "in", "claim": "c", "state": "claimed", "at": 1
    }  # fmt: skip
