"""Where a session stands: what a restart goes on from."""

from __future__ import annotations

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """How far a session's answers are acknowledged; the source stores it together with the offsets.

    ``epoch`` counts the engines that have read this session: version and sequence numbers are unique within
    one. ``version``, ``sequence``: of the newest version, and the newest answer, such that it and all before
    it are acknowledged. ``closed``: opening (ns) of the newest bar of that version, by the session's symbols;
    bars up to there make no answers when they are read again.
    """

    epoch: int = 0
    version: int = 0
    sequence: int = 0
    closed: tuple[int, ...] = ()


def order(progress: Progress) -> tuple[int, int, int]:
    """By it, one that is further comes later."""
    return progress.epoch, progress.version, progress.sequence


class Position(msgspec.Struct, frozen=True):
    """The next record to read of one symbol: everything before is in its session's snapshot."""

    source: str
    topic: str
    partition: int
    offset: int
