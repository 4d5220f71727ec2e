"""Batches of Kafka records, read from the broker's bytes so that damage costs only what is damaged.

aiokafka reads batches quicker, and gives up at the first that it cannot read, without naming its offsets.
Here each record is read that can be, and the offsets are named of those that cannot. Names of headers that
are not UTF-8 are no damage: Kafka's own client replaces their characters, too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from aiokafka import codec
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c

_HEADER = struct.Struct(">qiibIhiqqqhii")
"""Base offset, length behind it, epoch, magic, checksum, attributes, last offset's delta, first and newest
time, producer, its epoch, its sequence, number of records.
"""
_FRAME = struct.Struct(">qi")
_MAGIC_AT, _CHECKED_FROM = 16, 21
_CODEC, _APPEND_TIME, _TRANSACTIONAL, _CONTROL = 0x07, 0x08, 0x10, 0x20
_ABORT = b"\0\0\0\0"
"""Key of the mark that ends a transaction without its records: version and type, int16 each."""

Codec = tuple[str, Callable[[bytes], bytes], Callable[[bytes], bytes]]
CODECS: Mapping[int, Codec] = {
    1: ("gzip", codec.gzip_encode, codec.gzip_decode),
    2: ("snappy", codec.snappy_encode, codec.snappy_decode),
    3: ("lz4", codec.lz4_encode, codec.lz4_decode),
    4: ("zstd", codec.zstd_encode, codec.zstd_decode),
}
"""By their numbers in attributes: name, and what packs and unpacks."""


class BatchRecord(NamedTuple):
    """A record. ``timestamp``: ms, None where its format has none; ``value``: None is a tombstone."""

    offset: int
    timestamp: int | None
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class Damaged(NamedTuple):
    """Offsets ``first`` to ``last``, which cannot be read. ``value``: what there is of a single record.

    ``batch``: a batch, or the rest of one.
    """

    first: int
    last: int
    why: str
    value: bytes = b""
    batch: bool = True


class ReadResult(NamedTuple):
    """What was read, in order, and the offset to read next.

    ``needs``: where nothing was, the bytes that the first batch takes.
    """

    items: list[BatchRecord | Damaged]
    next: int
    needs: int = 0


def broken_codecs(codecs: Mapping[int, Codec] = CODECS) -> dict[str, str]:
    """Codecs that do not bring back what they packed, and why."""
    text, broken = b"foretick " * 100, {}
    for name, pack, unpack in codecs.values():
        try:
            if unpack(pack(text)) != text:
                broken[name] = "it brings back something else"
        except Exception as error:
            broken[name] = f"{_text(error)} (pip install cramjam)"
    return broken


def read_batches(data: bytes, position: int, aborted: Sequence[tuple[int, int]] | None = None) -> ReadResult:
    """Read the whole batches in ``data``, a broker's answer to a fetch at offset ``position``.

    ``aborted``: producer and first offset of each transaction in it that was given up.
    """
    reading = _Reading(position, sorted(aborted or (), key=lambda each: each[1]))
    at, last_frame = 0, len(data) - _FRAME.size
    while at <= last_frame:
        base, length = _FRAME.unpack_from(data, at)
        behind = at + _FRAME.size + length
        if length <= _MAGIC_AT - _FRAME.size:  # nothing says where the next one begins
            reading.damage(None, f"a batch cannot have {length} bytes")
            break
        if behind > len(data):
            return ReadResult(reading.items, reading.next, 0 if at else behind)
        following = _FRAME.unpack_from(data, behind)[0] if behind <= last_frame else None
        reading.batch(base, data[at:behind], following)
        at = behind
    return ReadResult(reading.items, reading.next)


class _Reading:
    """What was read so far. ``next``: the offset behind it."""

    def __init__(self, position: int, aborted: list[tuple[int, int]]) -> None:
        self.items: list[BatchRecord | Damaged] = []
        self.next = position
        self._aborted, self._given_up = aborted, set[int]()

    def damage(self, behind: int | None, why: str) -> None:
        """Note that nothing can be read before offset ``behind``; where that is not known, one offset is."""
        behind = max(self.next + 1, behind or 0)
        self.items.append(Damaged(self.next, behind - 1, why))
        self.next = behind

    def batch(self, base: int, data: bytes, following: int | None) -> None:
        """Read one batch. ``following``: the offset that the next one begins with, where there is one."""
        try:
            if data[_MAGIC_AT] < 2:
                self._old(base, data)
            else:
                self._new(data, following)
        except Exception as error:  # whatever is wrong with it ends with it
            self.damage(following, _text(error))

    def _old(self, last: int, data: bytes) -> None:
        """A message of the formats before Kafka 0.11, or a packed set of them, the last of this offset."""
        if last < self.next:
            return
        try:
            batch = MemoryRecords(data).next_batch()
            if batch is None or not batch.validate_crc():
                raise ValueError("its checksum is wrong")
            found = [BatchRecord(each.offset, each.timestamp, each.key, each.value, ()) for each in batch]
        except Exception as error:
            self.damage(last + 1, _text(error))
            return
        self.items += [each for each in found if each.offset >= self.next]
        self.next = last + 1

    def _new(self, data: bytes, following: int | None) -> None:
        base, _, _, _, checksum, attributes, delta, first_ms, newest_ms, producer, _, _, count = (
            _HEADER.unpack_from(data)
        )
        behind = base + delta + 1
        if calc_crc32c(data[_CHECKED_FROM:]) != checksum:  # then the number of its offsets may be wrong
            self.damage(behind if following is None else following, "its checksum is wrong")
            return
        if behind <= self.next:
            return
        while self._aborted and self._aborted[0][1] <= base:
            self._given_up.add(self._aborted.pop(0)[0])
        if attributes & _CONTROL:
            if any(each.key == _ABORT for each in _records(data[_HEADER.size :], 1)):
                self._given_up.discard(producer)
        elif not (attributes & _TRANSACTIONAL and producer in self._given_up):
            try:
                body = _unpacked(data[_HEADER.size :], attributes & _CODEC)
            except Exception as error:
                self.damage(behind, _text(error))
                return
            stamp_ms = newest_ms if attributes & _APPEND_TIME else None
            self._take(_records(body, count), base, behind, (first_ms, stamp_ms))
        self.next = max(self.next, behind)

    def _take(
        self, records: Iterator[_Record], base: int, behind: int, times: tuple[int, int | None]
    ) -> None:
        """Records of a batch of offsets ``base`` to before ``behind``.

        ``times``: what records' times count from, and the time of all of them, where they have one.
        """
        newest, (first_ms, stamp_ms) = base - 1, times
        for record in records:
            if record.lost:  # where those behind it begin is not known
                if behind > self.next:
                    self.damage(behind, record.why)
                return
            offset, why = base + record.delta, record.why
            if not newest < offset < behind:
                offset, why = newest + 1, why or f"its offset {offset} is not one of its batch"
            newest = offset
            if offset < self.next:
                continue
            self.next = offset + 1
            if why:
                self.items.append(Damaged(offset, offset, why, record.value or b"", batch=False))
            else:
                time_ms = first_ms + record.delta_ms if stamp_ms is None else stamp_ms
                self.items.append(BatchRecord(offset, time_ms, record.key, record.value, record.headers))


class _Record(NamedTuple):
    """A record as it stands in a batch. ``why``: what cannot be read of it; ``lost``: not even its end."""

    delta_ms: int = 0
    delta: int = -1
    key: bytes | None = None
    value: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    why: str = ""
    lost: bool = False


def _records(body: bytes, count: int) -> Iterator[_Record]:
    at = 0
    for _ in range(count):
        try:
            length, at = _varint(body, at)
            if not 0 <= length <= len(body) - at:
                raise ValueError(f"a record of {length} bytes is not whole")
        except (IndexError, ValueError) as error:
            yield _Record(why=_text(error), lost=True)
            return
        yield _record(body[at : at + length])
        at += length


def _record(data: bytes) -> _Record:
    delta_ms, delta, key, value = 0, -1, None, None
    try:
        delta_ms, at = _varint(data, 1)
        delta, at = _varint(data, at)
        key, at = _bytes(data, at)
        value, at = _bytes(data, at)
        headers, at = _headers(data, at)
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes are behind its end")
    except (IndexError, ValueError) as error:
        return _Record(delta_ms, delta, key, value, why=_text(error))
    return _Record(delta_ms, delta, key, value, headers)


def _headers(data: bytes, at: int) -> tuple[list[tuple[str, bytes | None]], int]:
    count, at = _varint(data, at)
    if count < 0:
        raise ValueError(f"{count} headers")
    headers = []
    for _ in range(count):
        name, at = _bytes(data, at)
        value, at = _bytes(data, at)
        headers.append(((name or b"").decode(errors="replace"), value))
    return headers, at


def _bytes(data: bytes, at: int) -> tuple[bytes | None, int]:
    """A text of bytes after its length; None where that is negative."""
    length, at = _varint(data, at)
    if length > len(data) - at:
        raise ValueError(f"{length} bytes are not there")
    return (None, at) if length < 0 else (data[at : at + length], at + length)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A signed integer of up to ten bytes, and where the next value begins. Raises IndexError, ValueError."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7
        if shift >= 70:
            raise ValueError("an integer of more than ten bytes")


def _unpacked(body: bytes, number: int) -> bytes:
    if not number:
        return body
    if number not in CODECS:
        raise ValueError(f"it is packed by codec {number}, which is not known")
    name, _, unpack = CODECS[number]
    try:
        return unpack(body)
    except Exception as error:
        raise ValueError(f"{name} cannot unpack it: {_text(error)}") from None


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
