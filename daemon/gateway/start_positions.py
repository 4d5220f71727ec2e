"""Where partitions of a log are read from: at what is missing from their sessions' windows."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from functools import partial

from daemon.config.fingerprint import window_settings
from daemon.config.schema import Config, SessionConfig
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.progress import Position, Progress
from feeds.source import CommitPoint, Partition, StartPosition

log = logging.getLogger(__name__)

_NOTHING = Progress()


class StartPositions:
    """What is missing is known of sessions that came back from a snapshot, and of those whose window is."""

    def __init__(self, config: Config, source: str, tracker: OffsetTracker, progress: ProgressStore) -> None:
        self._restored: Mapping[str, Mapping[str, Position]] = {}
        self._sources = ("", source)
        self._tracker, self._progress = tracker, progress
        self._max_reread = config.recovery.reread_records
        self._settings_of = partial(window_settings, config)
        self.change(config.sessions)

    def change(self, sessions: Sequence[SessionConfig]) -> None:
        """There are these sessions from now on."""
        self._windows = {each.name: self._settings_of(each) for each in sessions}
        """Checksum of each session's settings, as in `daemon.progress.Window`."""

    def extend(self, sessions: Sequence[SessionConfig]) -> None:
        """There are these, too."""
        self._windows |= {each.name: self._settings_of(each) for each in sessions}

    def restore(self, places: Mapping[str, Mapping[str, Position]]) -> None:
        """These sessions, and no others, came back from a snapshot: where they read on, by symbol."""
        self._restored = places

    def resume(self, names: Collection[str], places: Mapping[str, Mapping[str, Position]]) -> None:
        """These sessions were reset; ``places`` as `restore`, of those that came back from a snapshot."""
        others = {name: each for name, each in self._restored.items() if name not in names}
        self._restored = {**others, **places}

    @property
    def unrestored(self) -> list[str]:
        """Sessions that read on nowhere in particular."""
        return [name for name in self.sessions if not self._restored.get(name)]

    @property
    def sessions(self) -> Set[str]:
        """All that there are."""
        return self._windows.keys()

    def after(self, stored: Mapping[Partition, CommitPoint]) -> Mapping[Partition, StartPosition]:
        """Where to begin in these partitions."""
        begin: dict[Partition, StartPosition] = {}
        asked = self._tracker.asked_for()
        new = any(self._progress.of(name) == _NOTHING for name in self.sessions)
        for partition, point in stored.items():
            live = asked.get(partition, point.offset)
            readers = self._progress.readers(point) & self.sessions
            answered_ns = max((max(self._progress.of(name).closed, default=0) for name in readers), default=0)
            if read := self._tracker.next_offset(partition):
                begin[partition] = StartPosition(read, None, answered_ns)
                continue
            firsts = [self._first_missing(name, partition, live) for name in readers]
            known = [first for first in firsts if first is not None]
            is_enough = known and len(known) == len(readers) and not new
            begin[partition] = StartPosition(min([live, *known]), None if is_enough else live, answered_ns)
        return begin

    def _offsets(self, places: Iterable[Position], partition: Partition) -> Sequence[int]:
        """Those of a partition."""
        return [
            each.offset
            for each in places
            if each.source in self._sources and (each.topic, each.partition) == partition
        ]

    def _first_missing(self, session: str, partition: Partition, live: int) -> int | None:
        """The first record that the session's window lacks, ``live`` if none; None if it is not known.

        It is where its snapshot ends, or else where its window began, if that is near enough to ``live``.
        """
        restored, window = self._restored.get(session), self._progress.of(session).window
        own: Sequence[int] = () if restored is None else self._offsets(restored.values(), partition)
        if not own and window.settings == self._windows[session]:  # also what came first behind a snapshot
            own = self._offsets(window.firsts, partition)
        first = min(own, default=live if restored else None)
        if not restored and first is not None and live - first > self._max_reread:
            log.warning(
                "the window of session %s begins %d records before offset %d of %s/%d, more than "
                "recovery.reread_records: it may come back shorter",
                session, live - first, live, *partition,
            )  # fmt: skip
            return None
        return first
