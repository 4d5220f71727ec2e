"""Batches read from bytes: as aiokafka reads them where it does, and beyond damage where it gives up."""

import random
import struct
from itertools import pairwise

import pytest
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from hypothesis import given, settings
from hypothesis import strategies as st

from feeds.kafka_batches import CODECS, BatchRecord, Damaged, broken_codecs, read_batches
from tests.kit.kafka_bytes import NAMES, Rec, batch, sized, varint

ABORT = Rec(struct.pack(">hi", 0, 0), struct.pack(">hh", 0, 0))
COMMIT = Rec(struct.pack(">hi", 0, 0), struct.pack(">hh", 0, 1))
TRANSACTIONAL, CONTROL, APPEND_TIME = 0x10, 0x20, 0x08

small = st.binary(max_size=40) | st.none()
records = st.lists(
    st.builds(
        Rec,
        value=small,
        key=small,
        headers=st.lists(st.tuples(st.text(max_size=8).map(str.encode), small), max_size=3),
        time_ms=st.integers(-(2**40), 2**40),
    ),
    min_size=1,
    max_size=12,
)
times = st.integers(-(2**62), 2**62)


def by_aiokafka(data: bytes) -> list[BatchRecord]:
    found, batches = [], MemoryRecords(data)
    while batches.has_next():
        one = batches.next_batch()
        assert one.validate_crc()
        found += [BatchRecord(r.offset, r.timestamp, r.key, r.value, list(r.headers)) for r in one]
    return found


@given(st.lists(st.tuples(records, st.sampled_from(sorted(NAMES)), times), min_size=1, max_size=4))
@settings(max_examples=60)
def test_whole_batches_are_read_as_by_aiokafka(batches):
    data, base = b"", 7
    for each, codec, first_ms in batches:
        data += batch(each, codec, base=base, first_ms=first_ms)
        base += len(each)
    read = read_batches(data, 7)
    assert read.items == by_aiokafka(data)
    assert (read.next, read.needs) == (base, 0)


def offsets(items: list[BatchRecord | Damaged]) -> list[object]:
    return [i.offset if isinstance(i, BatchRecord) else (i.first, i.last) for i in items]


@pytest.mark.parametrize("codec", sorted(NAMES))
def test_reading_begins_at_the_position(codec):
    data = batch([Rec()] * 3, codec) + batch([Rec()] * 3, codec, base=3)
    assert offsets(read_batches(data, 4).items) == [4, 5]
    assert read_batches(data, 6) == ([], 6, 0)


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (batch([Rec()] * 3, base=2, checksum=1), "checksum"),
        (batch([Rec()] * 3, 5, base=2), "codec 5"),
        (batch([Rec()] * 3, 7, base=2), "codec 7"),
        *((batch([Rec()] * 3, name, base=2, body=b"\xff" * 40), name) for name in CODECS and list(NAMES)[1:]),
        (batch([Rec()] * 3, base=2, body=b""), "out of range"),
        (batch([Rec()] * 3, base=2, body=varint(-5)), "-5 bytes"),
        (batch([Rec()] * 3, base=2, body=varint(1000) + b"x"), "1000 bytes"),
        (batch([Rec()] * 3, base=2, body=b"\xff" * 20), "ten bytes"),
    ],
)
def test_what_is_behind_and_before_a_damaged_batch_is_read(damaged, why):
    data = batch([Rec()] * 2) + damaged + batch([Rec()] * 2, base=5)
    read = read_batches(data, 0)
    assert offsets(read.items) == [0, 1, (2, 4), 5, 6]
    assert why in read.items[2].why
    assert read.next == 7
    alone = read_batches(damaged, 2)
    assert (offsets(alone.items), alone.next) == ([(2, 4)], 5)


def test_a_number_of_offsets_that_is_damaged_too_hides_no_batch():
    for delta in (-5, 0, 2**31 - 1):
        damaged = batch([Rec()] * 3, delta=delta, checksum=1)
        read = read_batches(damaged + batch([Rec()], base=3), 0)
        assert offsets(read.items) == [(0, 2), 3]


def test_a_damaged_record_costs_itself_alone():
    bad = [
        Rec(raw=b""),
        Rec(raw=varint(50) + b"short"),
        Rec(raw=sized(b"k") + sized(b"value") + varint(-1)),
        Rec(raw=sized(b"k") + sized(b"value") + varint(2**40)),
        Rec(raw=sized(b"k") + sized(b"value") + varint(0) + b"behind"),
    ]
    data = batch([Rec(), *bad, Rec()], "lz4")
    read = read_batches(data, 0)
    assert offsets(read.items) == [0, (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), 6]
    assert [each.value for each in read.items[1:6]] == [b"", b"", b"value", b"value", b"value"]
    assert not any(each.batch for each in read.items[1:6])


def test_names_of_headers_that_are_not_utf_8_are_read_with_replacements():
    (found,) = read_batches(batch([Rec(b"v", headers=[(b"\xff\xfeid", b"\xff"), (b"null", None)])]), 0).items
    assert found.headers == [("\ufffd\ufffdid", b"\xff"), ("null", None)]


def test_fewer_records_than_counted():
    read = read_batches(batch([Rec(), Rec()], count=5, delta=4), 0)
    assert offsets(read.items) == [0, 1, (2, 4)]
    assert read.next == 5


def test_offsets_that_compaction_removed_are_no_damage():
    body = Rec(b"a").packed(0) + Rec(b"b").packed(7)
    read = read_batches(batch([], body=body, count=2, delta=9, base=10), 10)
    assert (offsets(read.items), read.next) == ([10, 17], 20)


def test_an_offset_outside_its_batch_is_damage():
    body = Rec(b"a").packed(0) + Rec(b"b").packed(5) + Rec(b"c").packed(0) + Rec(b"d").packed(3)
    read = read_batches(batch([], body=body, count=4, delta=3), 0)
    assert offsets(read.items) == [0, (1, 1), (2, 2), 3]


def test_transactions_that_were_given_up_are_left_out():
    data = (
        batch([Rec(b"a")], base=0, attributes=TRANSACTIONAL, producer=5)
        + batch([Rec(b"other")], base=1, attributes=TRANSACTIONAL, producer=6)
        + batch([ABORT], base=2, attributes=TRANSACTIONAL | CONTROL, producer=5)
        + batch([COMMIT], base=3, attributes=TRANSACTIONAL | CONTROL, producer=6)
        + batch([Rec(b"b")], base=4, attributes=TRANSACTIONAL, producer=5)
        + batch([COMMIT], base=5, attributes=TRANSACTIONAL | CONTROL, producer=5)
    )
    read = read_batches(data, 0, [(5, 0)])
    assert ([each.value for each in read.items], read.next) == ([b"other", b"b"], 6)


def test_the_time_of_appending_is_that_of_all():
    data = batch([Rec(time_ms=5), Rec(time_ms=9)], attributes=APPEND_TIME, newest_ms=77)
    assert [each.timestamp for each in read_batches(data, 0).items] == [77, 77]


@pytest.mark.parametrize(("magic", "codec"), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)])
def test_formats_before_0_11_are_read(magic, codec):
    builder = LegacyRecordBatchBuilder(magic, codec, 1 << 16)
    for n in range(3):
        builder.append(n, 1000 + n, b"k", b"v%d" % n)
    data = bytes(builder.build())
    if codec:  # as a broker numbers a packed set
        data = struct.pack(">q", 2) + data[8:]
    read = read_batches(data, 0)
    assert [each.value for each in read.items] == [b"v0", b"v1", b"v2"]
    assert [each.timestamp for each in read.items] == ([1000, 1001, 1002] if magic else [None] * 3)
    broken = bytearray(data)
    broken[-1] ^= 0xFF
    damaged = read_batches(bytes(broken), 0)
    assert isinstance(damaged.items[-1], Damaged)
    assert (damaged.items[-1].last, damaged.next) == (2, 3)


def test_a_batch_that_is_not_whole_says_what_it_needs():
    data = batch([Rec(b"x" * 1000)])
    assert read_batches(data[:500], 0) == ([], 0, len(data))
    more = batch([Rec()]) + batch([Rec(b"x" * 1000)], base=1)[:200]
    assert (offsets(read_batches(more, 0).items), read_batches(more, 0).next) == ([0], 1)


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 4])
def test_a_batch_without_a_length_costs_an_offset_at_a_time(length):
    read = read_batches(struct.pack(">qi", 3, length) + bytes(60), 3)
    assert (offsets(read.items), read.next) == ([(3, 3)], 4)


@given(st.integers(0, 2**32), st.integers(1, 30), st.sampled_from(sorted(NAMES)))
@settings(max_examples=150)
def test_whatever_is_damaged_each_offset_has_one_outcome_and_reading_goes_on(seed, count, codec):
    chance = random.Random(seed)
    data = bytearray(batch([Rec(b"%d" % n * 5, b"k") for n in range(count)], codec, base=10))
    whole = batch([Rec(b"next")], base=10 + count)
    for _ in range(chance.randint(1, 4)):  # its first offset and length are the broker's own
        data[chance.randrange(12, len(data))] = chance.randrange(256)
    read = read_batches(bytes(data) + whole, 10)
    spans = [(i.offset, i.offset) if isinstance(i, BatchRecord) else (i.first, i.last) for i in read.items]
    assert all(before[1] < after[0] for before, after in pairwise(spans))
    assert read.items[-1] == BatchRecord(10 + count, 1_709_632_800_000, None, b"next", [])
    assert read.next == 11 + count


@given(st.binary(max_size=300), st.integers(0, 2**40))
def test_any_bytes_raise_nothing_and_never_lead_back(data, position):
    read = read_batches(data, position)
    assert read.next >= position
    assert read.next > position or not read.items


def test_the_codecs_bring_back_what_they_packed():
    assert broken_codecs() == {}


def test_a_codec_that_is_missing_or_wrong_is_named():
    def missing(_: bytes) -> bytes:
        raise NotImplementedError("LZ4 codec is not available")

    broken = broken_codecs({3: ("lz4", missing, missing), 4: ("zstd", bytes, lambda _: b"other")})
    assert "LZ4 codec is not available" in broken["lz4"]
    assert broken["zstd"] == "it brings back something else"
