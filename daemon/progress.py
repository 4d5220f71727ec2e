"""Where a session stands: what a restart goes on from."""

from __future__ import annotations

import msgspec


class Position(msgspec.Struct, frozen=True):
    """A record in a log. ``source``: empty where there is one source only."""

    source: str
    topic: str
    partition: int
    offset: int


class Progress(msgspec.Struct, frozen=True):
    """How far a session's answers are acknowledged; the source stores it together with the offsets.

    ``epoch`` counts the engines that have read this session: version and sequence numbers are unique within
    one. ``version``, ``sequence``: of the newest version, and the newest answer, such that it and all before
    it are acknowledged. ``closed``: opening (ns) of the newest bar of that version, by the session's symbols;
    bars up to there make no answers when they are read again. ``begins``: the first record of that version's
    window, one in each partition; empty where it is not known.
    """

    epoch: int = 0
    version: int = 0
    sequence: int = 0
    closed: tuple[int, ...] = ()
    begins: tuple[Position, ...] = ()


def order(progress: Progress) -> tuple[int, int, int]:
    """By it, one that is further comes later."""
    return progress.epoch, progress.version, progress.sequence
