"""The newest record of each data version that an open request reads: its answer is dated by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from daemon.engine.tape_feeder import Appended, newest
from ingest.plane import TapeRecord
from regions.tape import Tape
from scheduler.request import Request
from scheduler.tapes import TapeItem


class VersionRecords:
    """By session and version: of the newest version, and of those that the requests of ``readers`` read."""

    def __init__(self) -> None:
        self.readers: list[Callable[[], Iterable[Request]]] = []
        self._kept: defaultdict[str, dict[int, TapeRecord]] = defaultdict(dict)

    def on_commit(self, tape: Tape, version: int, records: Sequence[TapeItem[Appended]]) -> None:
        """Note the new version's newest record, and forget those that no request reads."""
        kept = self._kept[tape.name]
        running = [request for reader in self.readers for request in reader()]
        read = {request.version for request in running if request.session == tape.name}
        for old in [each for each in kept if each not in read]:
            del kept[old]
        kept[version] = newest(records)

    def of(self, session: str, version: int) -> TapeRecord | None:
        """The newest record of ``version``; None for a session without input since the engine's start."""
        return self._kept[session].get(version)

    def restore(self, session: str, version: int, record: TapeRecord) -> None:
        """A session goes on from ``version``, whose ``record`` has times of another process."""
        self._kept[session] = {version: replace(record, ts_ring=0)}

    def remove(self, session: str) -> None:
        """A session is removed."""
        self._kept.pop(session, None)
