"""Whatever one message holds is its own fault: it ends as a record, a dead-letter record or a count."""

import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import pytest

from daemon.gateway.record_decoder import FEW
from feeds.payloads import payload_decoder as module
from feeds.source import YEAR_1990, YEAR_2100, Fault, Incoming, source_time_ns
from ingest.record import FLAG_GAP, REFUSAL, Records
from tests.kit import SECOND, START, TOPIC, QueueSource, incoming, trade
from tests.kit.gateway import DecoderRig

STREAM = (TOPIC, 0)
EMPTY = "foretick_messages_empty_total"


class Rig(DecoderRig):
    """Of messages that are given."""

    async def read(self, messages: list[Incoming]) -> Records:
        """The records that came of the messages."""
        await self.run(messages)
        return self.records()


@pytest.fixture
def rig() -> Iterator[Callable[[], Rig]]:
    with ExitStack() as stack:

        def make() -> Rig:
            made = Rig(QueueSource("pausing"), max_bytes=1 << 16)
            stack.callback(made.close)
            return made

        yield make


def good(offset: int) -> Incoming:
    return incoming(trade("V:AAA", START + offset * SECOND), offset)


def among(special: Incoming, count: int) -> list[Incoming]:
    """``special`` at offset 5 among ``count`` plain messages."""
    return [special if offset == 5 else good(offset) for offset in range(count)]


both_ways = pytest.mark.parametrize("count", [8, 4 * FEW], ids=["one by one", "as columns"])


@pytest.mark.parametrize(
    ("stamp_ms", "time_ns"),
    [
        (None, 0),
        (-1, 0),
        (0, 0),
        (2**63 - 1, 0),
        (-(2**63), 0),
        (10**40, 0),
        (1_709_632_800_000, 1_709_632_800_000_000_000),
        (1_709_632_800_000_000, 0),
        (YEAR_1990 // 10**6 - 1, 0),
        (YEAR_1990 // 10**6, YEAR_1990),
        (YEAR_2100 // 10**6 - 1, YEAR_2100 - 10**6),
        (YEAR_2100 // 10**6, 0),
    ],
)
def test_a_source_time_outside_1990_to_2099_is_unknown(stamp_ms, time_ns):
    assert source_time_ns(stamp_ms) == time_ns


@both_ways
async def test_a_value_that_no_field_holds_is_a_dead_letter_record(rig, count):
    r = rig()
    wrong = msgspec.structs.replace(good(5), ts_source_ns=2**70)
    packed = await r.read(among(wrong, count))
    marks = packed["kind"] == REFUSAL
    assert packed["offset"][marks].tolist() == [5], "its bar is flagged"
    assert packed["offset"][~marks].tolist() == [n for n in range(count) if n != 5]
    assert [(each.reason, each.offset) for each in r.dead_letters] == [("internal", 5)]
    assert r.store.value("foretick_records_malformed_total", reason="internal") == 1
    r.tracker.acknowledge("aaa", STREAM, count)
    assert r.tracker.to_commit()[STREAM].offset == count, "nothing holds the position back"


@both_ways
async def test_an_error_of_a_decoder_is_a_dead_letter_record(rig, count, monkeypatch):
    decode = module.decode_record

    def failing(payload, *rest, **more):
        if payload == b"{boom}":
            raise struct.error("argument out of range")
        return decode(payload, *rest, **more)

    monkeypatch.setattr(module, "decode_record", failing)
    r = rig()
    packed = await r.read(among(incoming(b"{boom}", 5), count))
    assert len(packed) == count - 1
    (dead_letter,) = r.dead_letters
    assert (dead_letter.reason, dead_letter.topic, dead_letter.partition, dead_letter.offset) == (
        "internal",
        TOPIC,
        0,
        5,
    )
    assert "argument out of range" in dead_letter.error
    assert dead_letter.payload == b"{boom}"


async def test_an_error_of_the_columns_is_read_one_by_one(rig, monkeypatch):
    r = rig()

    def failing(*_):
        raise OverflowError("Python int too large to convert to C long")

    monkeypatch.setattr(module.ColumnDecoder, "decode", failing)
    packed = await r.read([good(n) for n in range(4 * FEW)])
    assert packed["offset"].tolist() == list(range(4 * FEW))
    assert not r.dead_letters


@both_ways
async def test_what_the_source_could_not_read_is_a_dead_letter_record(rig, count):
    r = rig()
    fault = Fault("corrupt", "offsets 5 to 7 cannot be read", last=7)
    messages = [Incoming(TOPIC, 0, 5, None, b"", fault=fault) if n == 5 else good(n) for n in range(count)]
    del messages[6:8]
    packed = await r.read(messages)
    assert packed["offset"].tolist() == [n for n in range(count) if n not in (5, 6, 7)]
    (dead_letter,) = r.dead_letters
    assert (dead_letter.reason, dead_letter.offset, dead_letter.payload) == ("corrupt", 5, b"")
    assert "5 to 7" in dead_letter.error


async def test_a_range_that_cannot_be_read_is_done_to_its_end(rig):
    r = rig()
    await r.read([good(4), Incoming(TOPIC, 0, 5, None, b"", fault=Fault("corrupt", "", last=9))])
    assert r.tracker.next_offset(STREAM) == 10


@both_ways
@pytest.mark.parametrize(("null", "kind"), [(True, "tombstone"), (False, "empty")])
async def test_messages_without_a_payload_are_counted_by_name(rig, count, null, kind):
    r = rig()
    packed = await r.read(among(Incoming(TOPIC, 0, 5, b"V:AAA", b"", null=null), count))
    assert len(packed) == count - 1
    assert not r.dead_letters
    assert r.store.value(EMPTY, source="test", kind=kind) == 1
    r.tracker.acknowledge("aaa", STREAM, count)
    assert r.tracker.to_commit()[STREAM].offset == count


async def test_a_tombstone_at_the_end_moves_the_position(rig):
    r = rig()
    await r.read([good(4), Incoming(TOPIC, 0, 5, b"V:AAA", b"", null=True)])
    assert r.tracker.next_offset(STREAM) == 6


async def test_unknown_source_times_are_counted(rig):
    r = rig()
    r.source.unknown_times = 3
    await r.read([good(0)])
    assert r.store.value("foretick_source_times_unknown_total", source="test") == 3


async def test_a_gap_is_flagged_on_the_first_record_of_a_message(rig):
    r = rig()
    r.source.lost = 2
    packed = await r.read([good(0), good(1)])
    assert (packed["flags"] & FLAG_GAP != 0).tolist() == [True, False]
