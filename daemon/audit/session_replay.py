"""A session made again from its records, by the daemon's own data plane and engine, one bar a version.

One thread does it all: it decodes records, makes bars and tokens, appends each bar in a pass of its own and
asks the standing questions of every version, as a daemon with time to spare does. So equal records give equal
floats. Nothing is closed by the clock (`idle_close`), and no bar is skipped.

The records are read twice: first for their bars alone, which show where the answer's version ends and how
many bars there are before its state; then with the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from daemon import protocol
from daemon.audit.stepped_engine import Batches, SteppedEngine
from daemon.config.by_model import of_session
from daemon.config.schema import Config, QuestionConfig
from daemon.engine.build import Built, build
from daemon.engine.replayed_bars import History
from daemon.engine.snapshot_store import SavedSession, UsableSnapshot
from daemon.engine.tape_feeder import is_single
from daemon.progress import Progress
from daemon.session_life import Life, State
from engine.device import use_threads
from engine.rounding import of_gap
from engine.step import Chunk, Executor, SampledToken
from feeds.durations import Duration
from feeds.market_data import Answer
from flash.registry import Standing
from ingest.bar_kernel import SESSION
from ingest.compact import Anchor, CompactSpec
from ingest.plane import BarConsumer, Made, TapeRecord
from ingest.plane_state import Rows

Choose = Callable[[Built], UsableSnapshot | None]
"""Finds the snapshot to go on from, if there is one."""


class End(NamedTuple):
    """A session behind one of its bars.

    ``closed``: see `protocol.VersionInputs`; -1 for a symbol without a bar. ``as_of``: event time (ns) of the
    bar's newest record. ``newest``: last offset, by the number of the stream.
    """

    closed: tuple[int, ...]
    as_of: int
    newest: Mapping[int, int]


@dataclass(frozen=True)
class Line:
    """One bar of a window: its text and token ids, and the event time (ns) of its newest record."""

    text: str
    tokens: tuple[int, ...]
    ts_event: int


@dataclass(frozen=True)
class ReplayedVersion:
    """One version of the session, and what a question asked of it saw: regions as token ids and text."""

    answer: Answer
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


class _Records(BarConsumer):
    """Keeps the records of all bars."""

    def __init__(self) -> None:
        self.records: list[TapeRecord] = []

    def submit(self, made: Made) -> None:
        """Keep them."""
        self.records.extend(each for _, own in made for each in own)


class Replay:
    """The session ``name`` of ``config``; use it as a context. Feed it once, after `bars`.

    ``begins``: anchor of compact lines, and the bars that have it, where the session is to begin in its
    midst. Or it goes on from the snapshot that ``choose`` finds, and the records behind that are to follow.
    ``until_ns``: opening of the newest bar, where that is known: it may be an empty one. Raises SettingError,
    and SnapshotError for a snapshot that does not fit.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        *,
        begins: tuple[Anchor, int] | None = None,
        choose: Choose = lambda built: None,
        until_ns: int = 0,
    ) -> None:
        config = alone(config, name)
        # whether one was due depends on where reading begins, so all are asked of all versions
        asked = _with(config.questions, ask_every_bars=1, ask_every=Duration(0))
        self.config = config = msgspec.structs.replace(config, questions=asked)
        self._session, self._until_ns = config.sessions[0], until_ns
        self.built: Built = build(config, {}, opens_all=True)
        use_threads(config.model.threads)  # of this thread, too
        spec = self.built.lines[name]
        self.snapshot = choose(self.built)
        """What it goes on from."""
        if self.snapshot is None and begins is not None and isinstance(spec, CompactSpec):
            # another model may read decimal lines
            self.built.lines[name] = replace(spec, begins=begins)
        if self.snapshot is not None:
            self.built.tapes.pop(name).release()
            self.snapshot = self.snapshot._replace(state=_never_idle(self.snapshot.state))
            self.built.tapes[name] = self.built.restore(self._session, self.snapshot, Progress())
        self.state_bars = self.built.tapes[name].kv.records
        """Bars that the state of the snapshot depends on."""
        self._seen = _Seen(self.built.engine)
        self._versions = 0
        self._wanted = -1
        self._question = "", ""
        self._found: ReplayedVersion | None = None
        self._engine = SteppedEngine(config, self.built, self._on_event, executor=self._seen)
        self.host = self._engine.host

    def __enter__(self) -> Replay:
        self._engine.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.__exit__()

    async def bars(self, batches: Batches) -> list[End]:
        """Read (source, messages) to their end; the session behind each bar that they make."""
        name, state = self._session.name, None if self.snapshot is None else self.snapshot.state
        made = _Records()
        plane = self._engine.bars_only(name, made)
        if state is not None:
            plane.restore(name, state.plane, [state.has_log] * len(state.positions))
            plane.go_on([name])

        def step() -> bool:
            return not plane.step()

        async for _ in self._engine.read(batches, step):
            pass
        plane.flush(self._until_ns)
        life = Life(name, state=State.LIVE)
        history = History(life, len(self._session.symbols), restored=() if state is None else state.closed)
        ends, newest = list[End](), dict[int, int]()
        for record in made.records:
            if not is_single(record):
                history.take(record.bar.leg, record.bar.ts_open)
            newest = newest | {s: max(last, newest.get(s, last)) for s, _, last in record.reads}
            ends.append(End(history.closed, record.ts_last_event, newest))
        return ends

    async def feed(
        self, batches: Batches, question: str, question_hash: str, wanted: int, exclude: int
    ) -> ReplayedVersion | None:
        """Read the same again; what ``question`` saw behind bar ``wanted``, an index of what `bars` returned.

        ``exclude``: the number of first bars that are no part of the session.
        """
        self._question, self._wanted = (question, question_hash), wanted - exclude
        self.host.input.plane.exclude(self._session.name, exclude)
        async for _ in self._engine.read(batches, self._engine.step):
            pass
        self._engine.flush(self._until_ns)
        return self._found

    def _on_event(self, event: protocol.EngineEvent) -> None:
        if isinstance(event, protocol.Committed):
            self._versions += 1
            return
        if isinstance(event, protocol.Answered):
            asked = event.answer.question, event.answer.question_hash
            if asked == self._question and self._versions == self._wanted + 1:
                self._found = self._version(event.answer)

    def _version(self, answer: Answer) -> ReplayedVersion:
        """What the answer saw. Its version is the newest: the next bar waits for this one's answers."""
        tape = self.built.tapes[self._session.name]
        decode = self.built.shown
        asked = tuple(self.built.prefixes.asked(self._standing(answer), tape.prefix))
        lines = tuple(
            Line(decode(each.tokens), tuple(each.tokens), each.ts_event) for each in tape.state.records
        )
        return ReplayedVersion(
            answer,
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
            for each in self.host.first.questions.registry.standing(answer.session)
            if (each.question.name, each.question_hash) == (answer.question, answer.question_hash)
        )


def alone(config: Config, name: str) -> Config:
    """``config`` with this session only, which waits for no clock, passes nothing over and writes nothing."""
    (session,) = (each for each in config.sessions if each.name == name)
    config = of_session(config, session)
    session = msgspec.structs.replace(
        session, idle_close=Duration(0), refresh_idle=Duration(0), divergence_every=Duration(0)
    )
    return msgspec.structs.replace(
        config,
        sessions=(session,),
        questions=_with(config.questions, answer_within=Duration(0), engine_share=0.0),
        source=msgspec.structs.replace(config.source, backlog_policy="wait"),
        events=msgspec.structs.replace(config.events, on_halt="flag"),
        recovery=msgspec.structs.replace(config.recovery, interval=Duration(0)),
        pool=msgspec.structs.replace(
            config.pool, idle_spill=Duration(0), pressure_spill=False, host_blocks=0
        ),
    )


def _with(questions: Sequence[QuestionConfig], **members: object) -> tuple[QuestionConfig, ...]:
    return tuple(msgspec.structs.replace(each, **members) for each in questions)


def _never_idle(state: SavedSession) -> SavedSession:
    """As `alone` has it, nothing is closed by the clock."""
    builder = state.plane.builder
    session = builder.session.array(SESSION)
    session["idle_close"] = 0
    builder = msgspec.structs.replace(builder, session=Rows.of(session))
    return msgspec.structs.replace(state, plane=msgspec.structs.replace(state.plane, builder=builder))
