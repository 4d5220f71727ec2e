"""The progress of sessions as text: the metadata of a Kafka offset commit, or a file of the state directory.

Kafka stores up to 4,096 bytes beside each partition's offset. The text is a mark, then base 85 of a checksum
and compressed msgpack, so a text that somebody else wrote, or half a text, is recognised.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping

import msgspec

from daemon.progress import Position, Progress, WindowStart
from feeds.decoding import Undecodable, decoded

MAX_BYTES = 4096
"""A broker's `offset.metadata.max.bytes`, by default."""
_MARK = "foretick1:"
_CRC_BYTES = 4
_MAX_UNPACKED = 1 << 22
"""Bytes that a text may unpack to: a short one must not fill the memory."""


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """`Progress`, without the names of its members."""

    epoch: int
    version: int
    sequence: int
    closed: tuple[int, ...]
    settings: int = 0
    firsts: tuple[tuple[str, str, int, int], ...] = ()
    corrected: tuple[int, ...] = ()

    @classmethod
    def of(cls, progress: Progress) -> _Row:
        """As it is written."""
        window = progress.window
        firsts = tuple((p.source, p.topic, p.partition, p.offset) for p in window.firsts)
        members = progress.epoch, progress.version, progress.sequence, progress.closed
        return cls(*members, window.settings, firsts, progress.corrected)

    def progress(self) -> Progress:
        """As it was."""
        window = WindowStart(self.settings, tuple(Position(*each) for each in self.firsts))
        return Progress(self.epoch, self.version, self.sequence, self.closed, window, self.corrected)


class _Rows(msgspec.Struct, frozen=True, array_like=True):
    """`StoredProgress`, as it is written."""

    epoch: int
    sessions: dict[str, _Row]
    owner: str = ""


_decode = msgspec.msgpack.Decoder(_Rows).decode


class StoredProgress(msgspec.Struct, frozen=True):
    """``epoch``: of the newest engine; ``sessions``: how far the answers of each are acknowledged.

    ``owner``: query address of the daemon that wrote it; empty if it told none.
    """

    epoch: int = 0
    sessions: dict[str, Progress] = {}
    owner: str = ""


class PackedProgress(msgspec.Struct, frozen=True):
    """``text``: at most `MAX_BYTES` long, ASCII; ``excluded``: sessions that found no room in it."""

    text: str
    excluded: tuple[str, ...] = ()


def pack(
    epoch: int, sessions: Mapping[str, Progress], max_bytes: int = MAX_BYTES, owner: str = ""
) -> PackedProgress:
    """As text of ``max_bytes``. Where it is too long, it does not say where windows begin; if it still is,
    the last sessions are left out.
    """
    text = _text(epoch, sessions, owner)
    if len(text) > max_bytes:
        sessions = {name: _without_window(each) for name, each in sessions.items()}
        text = _text(epoch, sessions, owner)
    if len(text) <= max_bytes:
        return PackedProgress(text)
    names = list(sessions)
    low, high = 0, len(names)
    while low < high:  # the most that fit
        middle = (low + high + 1) // 2
        if len(_text(epoch, {name: sessions[name] for name in names[:middle]}, owner)) <= max_bytes:
            low = middle
        else:
            high = middle - 1
    return PackedProgress(
        _text(epoch, {name: sessions[name] for name in names[:low]}, owner), tuple(names[low:])
    )


def unpack(text: str) -> StoredProgress:
    """What `pack` made; nothing of an empty text. Raises Undecodable for a foreign or damaged one."""
    if not text:
        return StoredProgress()
    if not text.startswith(_MARK):
        raise Undecodable("not written by foretick", readable=False)
    data = decoded(base64.b85decode, text[len(_MARK) :])
    checksum, packed = data[:_CRC_BYTES], data[_CRC_BYTES:]
    if zlib.crc32(packed).to_bytes(_CRC_BYTES) != checksum:
        raise Undecodable("the checksum does not match", readable=False)
    rows = decoded(_decode, decoded(_inflated, packed))
    sessions = {name: row.progress() for name, row in rows.sessions.items()}
    return StoredProgress(rows.epoch, sessions, rows.owner)


def _without_window(progress: Progress) -> Progress:
    return msgspec.structs.replace(progress, window=WindowStart())


def _text(epoch: int, sessions: Mapping[str, Progress], owner: str) -> str:
    rows = {name: _Row.of(progress) for name, progress in sessions.items()}
    packed = zlib.compress(msgspec.msgpack.encode(_Rows(epoch, rows, owner)))
    return _MARK + base64.b85encode(zlib.crc32(packed).to_bytes(_CRC_BYTES) + packed).decode()


def _inflated(packed: bytes) -> bytes:
    inflate = zlib.decompressobj()
    data = inflate.decompress(packed, _MAX_UNPACKED)
    if not inflate.eof:
        raise ValueError("cut off, or too long")
    return data
