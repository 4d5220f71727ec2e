"""Where a session stands: what a restart goes on from."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from feeds.decoding import decoded
from ingest.record import LowWatermarks


class Position(msgspec.Struct, frozen=True, array_like=True):
    """A record in a log. ``source``: empty where there is one source only."""

    source: str
    topic: str
    partition: int
    offset: int


class WindowStart(msgspec.Struct, frozen=True, array_like=True):
    """Where a session's window begins in the log: its first record in each partition; empty if not known.

    ``settings``: checksum of those that decide which records a window has.
    """

    settings: int = 0
    firsts: tuple[Position, ...] = ()


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far a session's answers are acknowledged; the source stores it together with the offsets.

    ``epoch`` counts the engines that have read this session: version and sequence numbers are unique within
    one. ``version``, ``sequence``: of the newest version, and the newest answer, such that it and all before
    it are acknowledged. ``closed``: opening (ns) of the newest bar of that version, by the session's symbols;
    bars up to there make no answers when they are read again. ``window``: of that version. ``written``: by
    the number of the stream, offset of the newest record that has a line of its own in that version or one
    before: an event, or a late record that corrected a bar (``late = "amend"``). ``signals``: what is known
    for signals at that version, `flash.signals.SessionSignals` in msgpack; empty without any.
    """

    epoch: int = 0
    version: int = 0
    sequence: int = 0
    closed: tuple[int, ...] = ()
    window: WindowStart = WindowStart()
    written: LowWatermarks = ()
    signals: bytes = b""


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """What a pattern has opened a session for."""

    symbol: str
    price_decimals: int


class StoredProgress(msgspec.Struct, frozen=True, array_like=True):
    """A session's progress as it is stored, in msgpack.

    ``epoch``: of the newest engine of the daemon that wrote it; ``owner``: its query address, empty if it
    told none; ``event``: in the engine's record, the id of its newest event. ``opened``: of a session that a
    pattern has opened.
    """

    progress: Progress = Progress()
    epoch: int = 0
    owner: str = ""
    event: Annotated[str, Meta(pattern=r"^$|^[0-9a-f]{1,16}\.[0-9]{1,19}$")] = ""
    opened: Opened | None = None


def stored_name(writer: str, session: str) -> str:
    """The name of a session's record, its ``writer``'s own; without a session, of that of its engine."""
    return f"{writer}/{session}"


def session_of(name: str) -> str:
    """The session of a record with this name; "" of an engine's."""
    return name.partition("/")[2]


encode_stored = msgspec.msgpack.Encoder().encode
_decode_stored = msgspec.msgpack.Decoder(StoredProgress).decode


def decode_stored(data: bytes) -> StoredProgress:
    """What `encode_stored` made. Raises Undecodable for a foreign or damaged record."""
    return decoded(_decode_stored, data)


def covers(progress: Progress, closed: Sequence[int], written: LowWatermarks) -> bool:
    """Whether answers up to these newest bars, and these newest lines of one record, are acknowledged."""
    known = progress.closed
    if not closed or len(closed) != len(known) or not all(map(int.__le__, closed, known)):
        return False
    found = dict(progress.written)
    return all(offset <= found.get(stream, -1) for stream, offset in written)


def furthest(*known: LowWatermarks) -> LowWatermarks:
    """The newest offset of each stream."""
    return tuple(sorted({stream: max(of[stream] for of in map(dict, known) if stream in of)
                         for each in known for stream, _ in each}.items()))  # fmt: skip


def order(progress: Progress) -> tuple[int, int, int]:
    """By it, one that is further comes later."""
    return progress.epoch, progress.version, progress.sequence
