"""Snapshots of sessions on disk: what they hold, which may be used, and the room they take.

A session has two files, so one is whole whatever happens. The newest one that is no newer than the session's
acknowledged answers is used: bars after it are read again from the source's log, and those that were answered
are not asked again. Files are written in turn, but where acknowledgements are not stored for a while, the
last one that a restart can use stays. A source without a log has nothing to read again, so there the tape has
a gap behind the snapshot.
"""

import logging
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec
from msgspec import structs

from daemon.config.fingerprint import quality_settings
from daemon.config.schema import Config, SessionConfig
from daemon.engine.labelled_bars import RuleLabelState
from daemon.engine.provenance import ProvenanceLog
from daemon.progress import Position, Progress, covers
from daemon.protocol import NameStream
from feeds.connector import SettingError
from flash.evaluator import AskedState
from flash.late_labels import AdaptationState
from ingest.bar_kernel import BAR, FEED, OPEN, SESSION
from ingest.compact import Anchor, CompactSpec
from ingest.lines import LineSpec
from ingest.plane import TapeRecord
from ingest.plane_state import PlaneState, RollupState
from ingest.record import LowWatermarks
from metrics.store import MetricStore
from regions.offload.snapshot_format import (
    ForeignSnapshot,
    Snapshot,
    SnapshotError,
    SnapshotHeader,
    read_header,
)
from regions.tape import Retention
from support.durable_file import remove_abandoned, temporaries

log = logging.getLogger(__name__)

SUFFIX = ".snapshot"
GENERATIONS = 2


class NewerSnapshot(SnapshotError):
    """A snapshot with answers that are not acknowledged: they would never be given."""


class SnapshotNoRoom(SnapshotError):
    """A snapshot that the files' limit, or the pool, has no room for."""


class PartsState(msgspec.Struct, frozen=True):
    """What the engine's parts keep of a session (`daemon.engine.session_parts`).

    ``newest``: the newest record of its version, without its ``anchor``, whose volume may have more than 64
    bits (`Anchor.numbers`, decimals and scale). ``stale_records``: evicted since its window was prefilled
    last. ``lineage``: of its window and its state. ``labels``: what rules wait for.
    """

    newest: TapeRecord
    stale_records: int
    rolled: RollupState | None
    asked: AskedState
    adapted: AdaptationState
    lineage: ProvenanceLog
    labels: RuleLabelState | None = None
    anchor: tuple[str, str, str, int, int] | None = None

    @property
    def record(self) -> TapeRecord:
        """The newest record, with its anchor. Raises ValueError where that is none."""
        if self.anchor is None:
            return self.newest
        return structs.replace(self.newest, anchor=Anchor.of(*self.anchor))


class SavedSession(msgspec.Struct, frozen=True):
    """A session without its tape.

    ``settings``: digest of what the state depends on. ``closed``, ``written``: as in `Progress`.
    ``positions``: by symbol, the next record to read; None where the source cannot read it again, or the
    symbol had no record. ``others``: the same of further streams of the symbols. ``has_log``: the sources can
    read again. ``bars``: those it had so far. ``header``, ``rollup``: of its frozen prefix. ``streams``: the
    names of the streams that its lineage has.
    """

    settings: str
    closed: tuple[int, ...]
    positions: tuple[Position | None, ...]
    has_log: bool
    plane: PlaneState
    bars: int
    header: str | None
    rollup: tuple[int, ...]
    parts: PartsState
    streams: tuple[NameStream, ...]
    epoch: int = 0
    """In which it was answered."""
    written: LowWatermarks = ()
    others: tuple[Position, ...] = ()

    @property
    def halted(self) -> bool:
        """Whether trading was halted."""
        return bool(self.plane.builder.session.array(SESSION)["halted"][0])


class _Epoch(msgspec.Struct):
    """That of a `SavedSession`, whatever else is in it."""

    epoch: int = 0


class UsableSnapshot(NamedTuple):
    """A snapshot that may be used."""

    snapshot: Snapshot
    state: SavedSession


class SnapshotFiles:
    """The files in one directory, unfinished ones among them: at most ``max_bytes`` together, but for other
    daemons' at the same time.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory, self._max_bytes = directory, max_bytes

    def prepare(self) -> None:
        """Make the directory, which only its owner can read, and remove what killed engines left unfinished.

        Raises SettingError.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            why = f"cannot make {self.directory}: {error.strerror}"
            raise SettingError("recovery.directory", why) from error
        self._clean()

    def newest_first(self, session: str) -> list[Path]:
        """The files of a session. One without a whole header comes first, to be refused and counted."""
        found = {path: _generation(path) for path in self._generations(session) if path.exists()}
        return sorted(found, key=lambda path: (found[path][0] < 0, found[path]), reverse=True)

    def oldest_first(self, session: str) -> list[Path]:
        """Both files of a session; one that is missing, or without a whole header, comes first."""
        return sorted(self._generations(session), key=_generation)

    def make_room(self, path: Path, size: int) -> None:
        """Make room for ``path`` of ``size`` bytes by removing files of which their session has a newer one.

        The oldest go first. Raises SnapshotNoRoom, with nothing removed, where that is not enough.
        """
        others, beyond = self._beyond(path, size)
        if beyond > 0:
            self._clean()
            others, beyond = self._beyond(path, size)
        if beyond <= 0:
            return
        newest = {each.stem.rpartition(".")[0]: each for each in sorted(others, key=_generation)}
        going = [each for each in sorted(others, key=_written_ns) if each not in newest.values()]
        if sum(others[each] for each in going) < beyond:
            raise SnapshotNoRoom(f"{path} of {size} bytes: recovery.max_bytes is {self._max_bytes}")
        for each in going:
            if beyond > 0:
                each.unlink(missing_ok=True)
                beyond -= others[each]

    def remove(self, session: str) -> None:
        """Remove the files of a session that is gone for good."""
        for path in self._generations(session):
            path.unlink(missing_ok=True)

    def _generations(self, session: str) -> list[Path]:
        name = quote(session, safe="")
        return [self.directory / f"{name}.{number}{SUFFIX}" for number in range(GENERATIONS)]

    def _beyond(self, path: Path, size: int) -> tuple[dict[Path, int], int]:
        """(the other files with their sizes, bytes that are too many once ``path`` is written)."""
        found = self.directory.glob(f"*{SUFFIX}")
        others = {each: _size(each) for each in found if each != path and not each.name.startswith(".")}
        unfinished = sum(map(_size, temporaries(self.directory, f"*{SUFFIX}")))
        return others, sum(others.values()) + unfinished + size - self._max_bytes

    def _clean(self) -> None:
        remove_abandoned(self.directory, f"*{SUFFIX}")


class Recovery:
    """Finds the snapshots that sessions may go on from, and counts the others."""

    def __init__(self, config: Config) -> None:
        self._bars, self._quality = config.bars, quality_settings(config)
        self._events = config.events
        self.enabled = config.recovery.interval > 0
        self.files = SnapshotFiles(config.recovery.path, config.recovery.max_bytes)
        self.refused: list[str] = []
        """The reason of each snapshot that was refused; the reader of this list empties it."""

    def settings(self, session: SessionConfig, line: LineSpec | CompactSpec, retention: Retention) -> str:
        """Digest of the settings that a session's state depends on, and of the layout of its rows."""
        rows = [each.descr for each in (SESSION, FEED, OPEN, BAR)]
        rollup = session.rollup, session.rollup_every, session.rollup_tokens
        bars = session.bars(self._bars), self._quality, self._events
        parts = session.symbols, bars, line, retention, session.semantics, rollup, rows
        return blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def usable(self, session: str, settings: str, progress: Progress) -> Iterator[UsableSnapshot]:
        """Snapshots of a session that it may go on from, the newest first."""
        if not self.enabled:
            return
        for path in self.files.newest_first(session):
            try:
                snapshot = Snapshot.open(path)
                yield UsableSnapshot(snapshot, _checked(path, snapshot.header, session, settings, progress))
            except SnapshotError as error:
                self.refuse(session, error)

    def next(self, session: str, settings: str, progress: Progress) -> Path:
        """The file to write next: the older one, but not the only one that a restart at ``progress`` can use.

        Of the files their headers are read.
        """
        older, newer = self.files.oldest_first(session)

        def usable(path: Path) -> bool:
            try:
                _checked(path, read_header(path), session, settings, progress)
            except SnapshotError:
                return False
            return True

        return newer if usable(older) and not usable(newer) else older

    def refuse(self, session: str, error: SnapshotError) -> None:
        """Note why a snapshot is not used."""
        log.warning("session %s does not go on from a snapshot: %s", session, error)
        self.refused.append(reason_of(error))

    def count(self, store: MetricStore) -> None:
        """Count the snapshots refused since the last call."""
        for reason in self.refused:
            store.inc("foretick_snapshots_refused_total", reason=reason)
        self.refused.clear()


def reason_of(error: SnapshotError) -> str:
    """The reason as metrics name it."""
    if isinstance(error, ForeignSnapshot):
        return "foreign"
    if isinstance(error, NewerSnapshot):
        return "newer"
    return "no_room" if isinstance(error, SnapshotNoRoom) else "torn"


def state_of(path: Path, header: SnapshotHeader, session: str, settings: str) -> SavedSession:
    """The state in a snapshot. Raises ForeignSnapshot for another session, or one with other settings."""
    if header.session != session:
        raise ForeignSnapshot(f"{path} is of session {header.session}, not {session}")
    try:
        state = msgspec.msgpack.decode(header.owner, type=SavedSession)
    except msgspec.MsgspecError as error:
        raise ForeignSnapshot(f"{path} has a state that cannot be read: {error}") from error
    if state.settings != settings:
        raise ForeignSnapshot(f"{path} is foreign: the session's settings have changed")
    return state


def _checked(
    path: Path, header: SnapshotHeader, session: str, settings: str, progress: Progress
) -> SavedSession:
    """As `state_of`. Raises SnapshotError unless the session may go on from it."""
    state = state_of(path, header, session, settings)
    # not by its version: another engine may have answered the same bars since, under lower numbers
    if not covers(progress, state.closed, state.written):
        raise NewerSnapshot(f"{path} is newer than the answers that are acknowledged")
    return state


def _generation(path: Path) -> tuple[int, int, int]:
    """Epoch, version, and time of writing (ns): the newer one of a session's files is greater.

    A former owner of the session may have written later, so the time counts last. Epoch -1: the header is not
    whole; -2: there is no file.
    """
    written_ns = _written_ns(path)
    if not written_ns:
        return -2, 0, 0
    try:
        header = read_header(path)
        epoch = msgspec.msgpack.decode(header.owner, type=_Epoch).epoch
    except (SnapshotError, msgspec.MsgspecError):
        return -1, 0, written_ns
    return epoch, header.state.version, written_ns


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another daemon's, which has its name by now
        return 0


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
