"""A session made again from its records, by the daemon's own data plane and engine, one bar a version.

One thread does it all: it decodes records, makes bars and tokens, appends each bar in a pass of its own and
asks the standing questions of every version, as a daemon with time to spare does. So equal records give equal
floats. Nothing is closed by the clock (`idle_close`), and no bar is passed over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from daemon import protocol
from daemon.config.schema import Config
from daemon.config.symbols import numbered, routes
from daemon.engine.build import Built, build
from daemon.engine.recovery import Found, SessionState
from daemon.engine.wiring import wire_engine
from daemon.front.ingest import Ingest, Order
from daemon.front.offsets import OffsetTracker
from daemon.progress import Progress
from engine.device import use_threads
from engine.rounding import of_gap
from engine.step import Chunk, Executor, SampledToken
from feeds.durations import Duration
from feeds.messages import Answer, DeadLetter
from feeds.source import Incoming, Kind, Partition
from flash.registry import Standing
from ingest import warm_up
from ingest.bar_kernel import SESSION
from ingest.compact import Anchor, CompactSpec
from ingest.cut import Rows
from ingest.ring import Ring
from metrics.store import MetricStore

_BATCH = 256
"""Messages that enter the ring between two looks at the engine."""
ONE = ""
"""Name of the only source."""

Choose = Callable[[Built], Found | None]
"""Finds the snapshot to go on from, if there is one."""


@dataclass(frozen=True)
class Line:
    """One bar of a window: its text and token ids, and the event time (ns) of its newest record."""

    text: str
    tokens: tuple[int, ...]
    ts_event: int


@dataclass(frozen=True)
class Version:
    """One version of the session, and what a question asked of it saw: regions as token ids and text."""

    answer: Answer
    position: tuple[str, Partition, int]
    """Source, partition and offset of its newest record."""
    prefix: tuple[int, ...]
    prefix_text: str
    window: tuple[Line, ...]
    question: tuple[int, ...]
    question_text: str
    tolerance: float
    """How far logit gaps may lie apart by rounding."""


@dataclass
class _Seen:
    """Runs passes, and notes the largest logit of them all."""

    executor: Executor
    largest: float = 1.0

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        """See `Executor`."""
        done = self.executor.execute(batch)
        for token in done:
            if token is not None and math.isfinite(token.top1):
                values = (token.top1, token.top2, *token.logits)
                self.largest = max(self.largest, *(abs(v) for v in values if math.isfinite(v)))
        return done


class Replay:
    """The session ``name`` of ``config``; use it as a context. Feed it once.

    ``begins``: anchor of compact lines, and the bars that have it, where the session is to begin in its
    midst. Or it goes on from the snapshot that ``choose`` finds, and the records behind that are to follow.
    ``wanted(answer, position)`` says which answers to return. Raises SettingError, and SnapshotError for a
    snapshot that does not fit.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        wanted: Callable[[Answer, tuple[str, Partition, int]], bool],
        *,
        begins: tuple[Anchor, int] | None = None,
        choose: Choose = lambda built: None,
    ) -> None:
        self.config = config = alone(config, name)
        self._session, self._wanted = config.sessions[0], wanted
        self._sources = [source for source, _ in config.feeds.values()] or [ONE]
        self.built: Built = build(config, {})
        use_threads(config.model.threads)  # of this thread, too
        spec = self.built.lines[name]
        self.snapshot = choose(self.built)
        """What it goes on from."""
        if self.snapshot is None and begins is not None and isinstance(spec, CompactSpec):
            # another model may read decimal lines
            self.built.lines[name] = replace(spec, begins=begins)
        if self.snapshot is not None:
            self.built.tapes.pop(name).release()
            found = self.snapshot._replace(state=_never_idle(self.snapshot.state))
            self.built.tapes[name] = self.built.restore(self._session, found, Progress())
        self._store = MetricStore.local(_labels(config, self._sources))
        self._ring = Ring.create(max(config.source.ring_capacity, 1 << 16))
        self._seen = _Seen(self.built.engine)
        self._trackers = {source: OffsetTracker() for source in self._sources}
        self._order = Order()
        self.found: list[Version] = []
        self.letters: list[DeadLetter] = []
        """Records that were refused on the way."""
        self.versions = 0
        self.host = wire_engine(
            config,
            self.built,
            self._ring,
            self._store,
            self._on_event,
            source=self._sources[0],
            executor=self._seen,
            credits=1,
        )
        self.host.input.read_on([name])

    def __enter__(self) -> Replay:
        warm_up()
        return self

    def __exit__(self, *_: object) -> None:
        self._ring.close()
        self._ring.unlink()

    async def feed(self, batches: AsyncGenerator[tuple[str, list[Incoming]], None]) -> list[Version]:
        """Read (source, messages) to their end, close the open bars; the wanted versions."""
        feeds = {source: _Given(source) for source in self._sources}
        table = routes(self.config.sessions, numbered(self.config.sessions))
        ingests = {
            source: Ingest(
                given,
                self._ring,
                table,
                self._trackers[source],
                self._store,
                self.letters.append,
                max_bytes=self.config.source.max_message_bytes,
                max_ahead_ns=self.config.source.max_ahead,
                order=self._order,
                sequence=self.config.source.sequence,
            )
            for source, given in feeds.items()
        }
        async for named, messages in batches:
            source = named or self._sources[0]
            for at in range(0, len(messages), _BATCH):
                feeds[source].batch = messages[at : at + _BATCH]
                await self._pump(ingests[source])
        self.host.input.flush()
        self._settle()
        return self.found

    async def _pump(self, ingest: Ingest) -> None:
        """Push one batch, and take what is in the ring meanwhile: it may be too short for the batch."""
        pushing = asyncio.ensure_future(ingest.run())
        while not pushing.done():
            await asyncio.sleep(0)
            self._settle()
        pushing.result()
        self._settle()

    def _settle(self) -> None:
        """Take bars one by one, and answer each, until nothing is left to do."""
        while True:
            self.host.input.take()
            while self.host.scheduler.step():
                pass
            if self.host.input.settled:
                return

    def _on_event(self, event: protocol.EngineEvent) -> None:
        if isinstance(event, protocol.Committed):
            self.versions += 1
            return
        if isinstance(event, protocol.Answered):
            position = self._position(event.inputs)
            if position is not None and self._wanted(event.answer, position):
                self.found.append(self._version(event.answer, position))
        if isinstance(event, protocol.Answered | protocol.AnswerFailed | protocol.NotDue):
            for tracker in self._trackers.values():
                tracker.acknowledge(self._session.name, event.inputs.first)

    def _position(self, inputs: protocol.Inputs) -> tuple[str, Partition, int] | None:
        number = inputs.last
        if not number:  # all of its records are in the snapshot
            ranges = [(i.source, (i.topic, i.partition), i.last_offset) for i in inputs.restored]
            return ranges[-1] if ranges else None
        for source, tracker in self._trackers.items():
            for topic, partition, _, last in tracker.ranges(self._session.name, number, number):
                return (source if len(self._trackers) > 1 else ONE), (topic, partition), last
        return None

    def _version(self, answer: Answer, position: tuple[str, Partition, int]) -> Version:
        """What the answer saw. Its version is the newest: the next bar waits for this one's answers."""
        tape = self.built.tapes[self._session.name]
        decode = self._decode
        asked = tuple(self.built.prefixes.asked_behind(self._standing(answer), tape.prefix))
        lines = tuple(
            Line(decode(each.tokens), tuple(each.tokens), each.ts_event) for each in tape.state.records
        )
        return Version(
            answer,
            position,
            tape.prefix,
            decode(tape.prefix),
            lines,
            asked,
            decode(asked),
            of_gap(self.built.loaded, self._seen.largest),
        )

    def _standing(self, answer: Answer) -> Standing:
        return next(
            each
            for each in self.host.questions.registry.standing(answer.session)
            if (each.question.name, each.question_hash) == (answer.question, answer.question_hash)
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.built.prompt.tokenizer.decode(list(tokens), skip_special_tokens=False))


class _Given:
    """A source with one batch at a time."""

    kind: Kind = "pausing"
    lost = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.batch: list[Incoming] = []

    async def start(self) -> None:
        """Nothing to connect."""

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        """The batch."""
        yield self.batch

    def pause(self) -> None:
        """The next batch waits anyway."""

    def resume(self) -> None:
        """See `pause`."""

    async def commit(self, offsets: Mapping[Partition, object]) -> None:
        """Nothing is stored."""

    async def stop(self) -> None:
        """Nothing to disconnect."""


def alone(config: Config, name: str) -> Config:
    """``config`` with this session only, which waits for no clock, passes nothing over and writes nothing."""
    (session,) = (each for each in config.sessions if each.name == name)
    session = msgspec.structs.replace(
        session, idle_close=Duration(0), refresh_idle=Duration(0), divergence_every=Duration(0)
    )
    return msgspec.structs.replace(
        config,
        sessions=(session,),
        source=msgspec.structs.replace(config.source, behind="wait"),
        recovery=msgspec.structs.replace(config.recovery, interval=Duration(0)),
        pool=msgspec.structs.replace(config.pool, idle_spill=Duration(0), host_blocks=0),
    )


def _never_idle(state: SessionState) -> SessionState:
    """As `alone` has it, nothing is closed by the clock."""
    builder = state.plane.builder
    session = builder.session.array(SESSION)
    session["idle_close"] = 0
    builder = msgspec.structs.replace(builder, session=Rows.of(session))
    return msgspec.structs.replace(state, plane=msgspec.structs.replace(state.plane, builder=builder))


def _labels(config: Config, sources: Sequence[str]) -> dict[str, Sequence[str]]:
    return {
        "session": [session.name for session in config.sessions],
        "source": sources,
        "sink": [],
        "policy": [config.scheduler.policy],
        "eviction": [config.scheduler.eviction],
    }
