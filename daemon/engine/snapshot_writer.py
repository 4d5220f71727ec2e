"""Snapshots of sessions, taken while the engine serves.

One session at a time, every `recovery.interval` if it changed. A cut needs a moment at which no bar is
between data plane and tape: an idle session has it always, a busy one is given no bars until those in the
scheduler are on its tape. The cut refers to the window's blocks, which do not change; another thread writes
the file. All else runs on the thread that steps the scheduler.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from daemon import protocol
from daemon.config.schema import Config, SessionConfig
from daemon.engine.build import Built, retention_of
from daemon.engine.session_parts import SessionParts
from daemon.engine.snapshot_store import SavedSession, SnapshotNoRoom, reason_of
from daemon.engine.tape_feeder import TapeFeeder
from daemon.progress import Position, Progress
from daemon.session_life import ELSEWHERE
from ingest.plane_state import Taken
from ingest.record import stream_number
from metrics.store import MetricStore
from regions.extents import SlotRange
from regions.frozen import SharedBlocks
from regions.kv_tensors import KVPool
from regions.offload.snapshot_format import SnapshotError, SnapshotHeader, write_snapshot
from regions.tape import Tape
from scheduler.lifecycle import STOPPING
from scheduler.request import Failure
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItems

log = logging.getLogger(__name__)

SOON_NS = 10**9
"""A cut that is not possible now is tried again after this time."""


@dataclass(frozen=True, eq=False, slots=True)
class _Cut:
    """A session at one version, with references to its KV."""

    tape: Tape
    header: SnapshotHeader
    ranges: tuple[SlotRange, ...]
    blocks: SharedBlocks
    settings: str


@dataclass(eq=False, slots=True)
class _Session:
    config: SessionConfig
    due: int
    saved: int
    """Version of its newest snapshot."""
    written: float = 0.0
    """When that was written, wall clock, s; 0: not by this engine."""
    failing: bool = False
    """The last one could not be written, which is logged once."""
    incomplete: bool = False
    """The engine's end took bars that never reached its tape."""

    def wait(self, until_ns: int) -> None:
        """Its next snapshot is due then."""
        self.due = until_ns

    def miss(self) -> None:
        """Bars never reached its tape."""
        self.incomplete = True

    def save(self, version: int) -> None:
        """It has a new snapshot."""
        self.failing, self.saved, self.written = False, version, time.time()

    def fail(self) -> bool:
        """It has no new snapshot; whether it had one the last time."""
        before, self.failing = self.failing, True
        return not before


@dataclass(eq=False)
class Snapshots:
    """Takes and writes the snapshots of all sessions. ``clock``: monotonic, ns."""

    config: Config
    built: Built
    scheduler: Scheduler
    input: TapeFeeder
    parts: SessionParts
    store: MetricStore
    clock: Callable[[], int] = time.monotonic_ns
    _sessions: dict[Tape, _Session] = field(default_factory=dict)
    _streams: dict[int, protocol.NameStream] = field(default_factory=dict)
    _progress: dict[str, Progress] = field(default_factory=dict)
    """What a restart of the daemon would find, by session."""
    _wanted: Tape | None = None
    """It is given no bars until it is cut."""
    _writing: threading.Thread | None = None
    _keeping: set[Tape] = field(default_factory=set)
    """Of removed sessions that may have a file written now, and keep theirs."""

    def __post_init__(self) -> None:
        for session in self.config.sessions:
            self.set(session, self.built.tapes[session.name])
            if (resume_input := self.resume(session.name)) is not None:
                resume_input()
        if self.config.recovery.interval:
            self.scheduler.subscribe(self.on_commit, self.on_drop)

    def set(self, session: SessionConfig, tape: Tape) -> None:
        """A session came, or its settings changed."""
        self.built.recovery.count(self.store)
        if self.config.recovery.interval:
            due = self.clock() + self.config.recovery.interval
            self._sessions[tape] = _Session(session, due, saved=tape.version)

    def forget(self, tape: Tape, *, keeps: bool = False) -> None:
        """A session is removed, and its files with it, unless it ``keeps`` them."""
        if self._sessions.pop(tape, None) is not None and not keeps:
            self.built.recovery.files.remove(tape.name)
        if keeps and self._writing is not None:
            self._keeping.add(tape)
        if self._wanted is tape:
            self._wanted = None

    def name_stream(self, stream: protocol.NameStream) -> None:
        """Records come from this stream. Any thread."""
        self._streams[stream_number(stream.source, stream.topic, stream.partition)] = stream

    def note_progress(self, progress: dict[str, Progress]) -> None:
        """A restart of the daemon would go on from there. Any thread."""
        self._progress.update(progress)

    def resume(self, name: str) -> Callable[[], None] | None:
        """Have all of a session but its input go on from the snapshot that its tape came back from.

        Returns what is to be called before its first record, on any thread; None without a snapshot.
        """
        state, tape = self.built.restored.get(name), self.built.tapes[name]
        if state is None:
            return None
        self.parts.restore(tape, state.parts, has_log=state.has_log)
        for each in state.streams:
            self._streams.setdefault(stream_number(each.source, each.topic, each.partition), each)
        self.store.inc("foretick_snapshots_restored_total", session=name)
        log.info("session %s goes on from a snapshot, at version %d", name, tape.version)
        return partial(self.input.restore, name, state)

    def resumed(self, session: SessionConfig) -> tuple[dict[str, Position], tuple[protocol.NameStream, ...]]:
        """Where to read a session on, by symbol, and of further streams by those, and the streams that its
        snapshot names, if any.
        """
        state = self.built.restored.get(session.name)
        if state is None:
            return {}, ()
        found = zip(session.symbols, state.positions, strict=True)
        places = {symbol: position for symbol, position in found if position is not None}
        for each in sorted(state.others, key=lambda each: each.offset, reverse=True):
            places[f"{each.source}/{each.topic}/{each.partition}"] = each  # the least one stays
        return places, state.streams

    def __call__(self) -> float | None:
        """The worker's idle hook: begin the next snapshot; seconds until another one is due."""
        now = self.clock()
        waiting = self._next()
        if waiting is None or self._writing is not None:
            return None
        due = self._sessions[waiting].due
        if due > now:
            return (due - now) / 1e9
        self._want(waiting)
        return 0.0 if self._writing is None else None

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """Under load the worker is never idle: begin what is due, and go on with what has begun."""
        if tape is self._wanted:
            self.scheduler.run_between(self._try)
            return
        if self._wanted is None and self._writing is None:
            waiting = self._next()
            if waiting is not None and self._sessions[waiting].due <= self.clock():
                self.scheduler.run_between(partial(self._want, waiting))

    def on_drop(self, tape: Tape, records: TapeItems, failure: Failure) -> None:
        """The tape has a gap; at the engine's end these bars will be read again."""
        if failure == STOPPING and tape in self._sessions:
            self._sessions[tape].miss()
        if tape is self._wanted:
            self.scheduler.run_between(self._try)

    def note(self) -> None:
        """Update the metrics that grow by themselves. Any thread."""
        now = time.time()
        for session in list(self._sessions.values()):
            if session.written:
                age = now - session.written
                self.store.set("foretick_snapshot_age_seconds", age, session=session.config.name)

    def close(self, within_s: float) -> None:
        """Write what changed, after the scheduler and the data plane have ended."""
        deadline = time.monotonic() + within_s
        if self.built.tiers.residency is not None:
            self.built.tiers.residency.finish(within_s)
        if self._writing is not None:
            self._writing.join(max(0.0, deadline - time.monotonic()))
        for tape, session in self._sessions.items():
            if session.incomplete or not self._changed(tape) or time.monotonic() > deadline:
                continue
            cut = self._cut(tape)
            if cut is not None:
                self._written(cut, self._write(cut))

    def _next(self) -> Tape | None:
        """The changed session whose snapshot is due first."""
        changed = [(each.due, tape) for tape, each in self._sessions.items() if self._changed(tape)]
        return min(changed, key=lambda item: item[0])[1] if changed else None

    def _changed(self, tape: Tape) -> bool:
        """Whether the session has something to write that is this daemon's to write."""
        elsewhere = self.input.lives.state(tape.name) in ELSEWHERE
        return tape.version != self._sessions[tape].saved and not elsewhere

    def _want(self, tape: Tape, awaited: bool = False) -> None:
        """Begin the snapshot of a session, which is brought back to the pool first unless ``awaited``."""
        if tape not in self._sessions or self._wanted is not None or self._writing is not None:
            return
        if not awaited and not tape.resident and not tape.lost:
            self._sessions[tape].wait(self.clock() + SOON_NS)
            self.scheduler.when_resident(tape, partial(self._want, tape, True))
            return
        if not self.parts.settled(tape):
            self._sessions[tape].wait(self.clock() + SOON_NS)
            return
        self._wanted = tape
        self.input.pause(tape.name, True)
        self._try()

    def _try(self) -> None:
        """Cut the session that is wanted, unless the scheduler still has bars of it."""
        tape = self._wanted
        if tape is None or self.input.ahead(tape.name):
            return
        cut = self._cut(tape) if self._changed(tape) else None
        self._wanted = None
        self.input.pause(tape.name, False)
        if cut is None:
            self._sessions[tape].wait(self.clock() + SOON_NS)
            return
        self._sessions[tape].wait(self.clock() + self.config.recovery.interval)
        self._writing = threading.Thread(target=self._write_aside, args=(cut,), name="snapshot", daemon=True)
        self._writing.start()

    def _cut(self, tape: Tape) -> _Cut | None:
        """The session as it is; None when that is not possible now."""
        name = tape.name
        tape.bring_back()
        parts, found = self.parts.save(tape), self.input.cut(name)
        if parts is None or found is None:
            return None
        others = [other for each in found.taken for other in each.others]
        read = {each.stream for each in found.taken if each.stream} | {stream for stream, _ in others}
        lineage = parts.lineage.streams
        if not self._streams.keys() >= read | lineage:
            return None
        built, session = self.built, self._sessions[tape].config
        has_log = all(self._streams[number].reread for number in read)
        header, rollup = built.prefixes.parts(name)
        retention = retention_of(session, built.prompt)
        state = SavedSession(
            settings=built.recovery.settings(session, built.lines[name], retention),
            epoch=built.progress[name].epoch,
            closed=found.closed,
            written=found.written,
            positions=tuple(self._position(each) for each in found.taken),
            others=tuple(filter(None, (self._position(Taken(*each, 0, False)) for each in others))),
            has_log=has_log,
            plane=found.plane,
            bars=found.bars,
            header=header,
            rollup=rollup,
            parts=parts,
            streams=tuple(self._streams[number] for number in sorted(lineage)),
        )
        file = SnapshotHeader(
            name,
            built.identity.behind(tape.prefix),
            built.engine.pool.block_size,
            tape.state,
            time.time_ns(),
            msgspec.msgpack.encode(state),
        )
        return _Cut(tape, file, tape.live_ranges, tape.hold(), state.settings)

    def _position(self, taken: Taken) -> Position | None:
        stream = self._streams.get(taken.stream)
        if stream is None or not stream.reread:
            return None
        offset = taken.offset if taken.more else taken.offset + 1
        return Position(stream.source, stream.topic, stream.partition, offset)

    def _write_aside(self, cut: _Cut) -> None:
        """On a thread of its own."""
        error = self._write(cut)
        if not self.scheduler.run_between(partial(self._written, cut, error)):
            self._written(cut, error)  # the worker has ended

    def _write(self, cut: _Cut) -> SnapshotError | None:
        recovery, pool, name = self.built.recovery, self.built.engine.pool, cut.tape.name
        path = recovery.next(name, cut.settings, self._progress.get(name, Progress()))
        token = KVPool.block_bytes(pool.layers, 1, pool.dtype)
        size = len(cut.header.owner) + cut.header.state.tokens * token
        try:
            recovery.files.make_room(path, size)
            write_snapshot(path, cut.header, pool, cut.ranges)
        except OSError as failure:
            return SnapshotError(f"{path} could not be written: {failure.strerror or failure}")
        except SnapshotError as failure:
            return failure
        return None

    def _written(self, cut: _Cut, error: SnapshotError | None) -> None:
        self._writing = None
        kept, self._keeping = self._keeping, set()
        cut.blocks.release()
        session, name = self._sessions.get(cut.tape), cut.tape.name
        if session is None:  # it was removed meanwhile
            if cut.tape not in kept:
                self.built.recovery.files.remove(name)
            return
        if error is not None:
            reason = reason_of(error) if isinstance(error, SnapshotNoRoom) else "disk"
            self.store.inc("foretick_snapshot_write_failures_total", reason=reason)
            if session.fail():
                log.error("session %s has no new snapshot: %s", name, error)
            return
        session.save(cut.header.state.version)
        self.store.inc("foretick_snapshots_written_total", session=name)
