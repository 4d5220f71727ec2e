"""Publishes the engine's answers, in order within a session.

Sessions get an answer at once. The offset tracker gets it when every sink has acknowledged it, so offsets are
committed after the answers that depend on them (at-least-once).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property, partial

import msgspec

from daemon import protocol
from daemon.ages import Times
from daemon.config.derived_limits import DerivedLimits
from daemon.config.fingerprint import fingerprint, window_settings
from daemon.config.schema import Config, SessionConfig
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.checkpoint.delivery import DeliveryOutcome, Done
from daemon.gateway.checkpoint.offsets import OffsetTracker, Stream
from daemon.gateway.checkpoint.outbox import Outbox, nothing
from daemon.gateway.checkpoint.signal_maker import SignalMaker
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.standby import Standby
from daemon.gateway.stream_names import StreamNames
from daemon.progress import Position, WindowStart
from daemon.session_life import FOLLOWING, STALE, VOID, Event, State
from daemon.traces.recent_traces import RecentTraces
from daemon.traces.spans import AnswerMoments, answer_trace
from daemon.traces.trace_context import TRACEPARENT, TraceContext
from feeds.market_data import Answer, Basis, DataUpdated, DeadLetter, FlashReady, InputRange
from flash.publishing import PublishedValue, suppressed
from flash.question import Question
from flash.schedules import SUPERSEDED
from ingest.record import ReadRange
from metrics.catalogue import FAILURES
from metrics.store import MetricStore
from scheduler.deadlines import LATE

log = logging.getLogger(__name__)

_UNKNOWN = WindowStart()
_FOLLOWED = FOLLOWING - {State.TAKING_OVER}
"""Another daemon answers. While ours is taking over, the engine says which bars that one has answered."""
_UNASKED = {LATE: "skipped", SUPERSEDED: "superseded"}
"""Codes of questions that were not computed, or not to the end, and the reasons that are counted."""


@dataclass(eq=False)
class _Version:
    """``open``: results of one version not acknowledged yet, including the ``awaited`` ones still to come.

    ``answers``: those that came, failures excluded; ``sequences``: numbers of those published. ``as_of``:
    theirs. ``begun``: the first result is there; until then a newer version may be answered instead.
    ``window``: where it begins, if known. ``held``: its signals are to be made, which counts as ``open``, of
    what its answers have ``said``; they leave ``signals`` known. ``stopped``: an answer was ended, so the
    version is made again.
    """

    inputs: protocol.VersionInputs
    window: WindowStart = _UNKNOWN
    basis: Basis | None = None
    ranges: list[InputRange] | None = None
    open: int = 1
    awaited: int = 0
    answers: int = 0
    as_of: int = 0
    begun: bool = False
    held: bool = False
    stopped: bool = False
    signals: bytes | None = None
    close: int | None = None
    said: list[Answer] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)

    def begin(self, asked: int, *, held: bool) -> None:
        """The first result is there."""
        if not self.begun:
            self.open, self.awaited, self.begun, self.held = asked + held, asked, True, held

    def answered(self, as_of: int) -> None:
        """One of its answers is there."""
        self.answers, self.as_of = self.answers + 1, as_of

    def ranges_of(self, find: Callable[[], list[InputRange]]) -> list[InputRange]:
        """Those of its inputs, shared by all its answers, which ``find`` gives once."""
        if self.ranges is None:
            self.ranges = find()
        return self.ranges


@dataclass(frozen=True)
class _AnswerTrace:
    """Of an answer that was handed to the sinks at ``taken``, monotonic ns."""

    traces: RecentTraces
    event: protocol.Answered
    answer: Answer
    links: tuple[str, ...]
    taken: int

    @cached_property
    def context(self) -> TraceContext:
        """Its root span."""
        return self.traces.tracer.of_answer(self.answer.answer_id)

    def end(self, now: int, error: str = "") -> None:
        """It is delivered at ``now``, monotonic ns, or will not be."""
        times, passes = self.event.times, self.event.passes
        moments = AnswerMoments(times, passes, self.taken, now, time.time_ns() - now)
        made = self.context, self.answer, moments, self.links, error
        self.traces.answered(self.context, partial(answer_trace, *made))


@dataclass(eq=False)
class _Published:
    """One session's answers.

    ``policies`` and ``last``: the questions of today and what was last published of them, by name and hash.
    ``questions``: (version, number of questions that later versions are asked), oldest first. ``settings``:
    of its window, see `WindowStart`. ``sums``: its state holds sums of bars that have left the window.
    """

    questions: list[tuple[int, int]]
    settings: int
    sums: bool
    policies: dict[tuple[str, str], Question]
    last: dict[tuple[str, str], PublishedValue] = field(default_factory=dict)
    versions: dict[int, _Version] = field(default_factory=dict)
    """Those that are not acknowledged."""
    history: set[int] = field(default_factory=set)
    """Versions that only repeat what was answered for."""
    refused: list[tuple[int, int]] = field(default_factory=list)
    """Stream and offset of records whose DLQ records are not acknowledged."""

    def configured(self, settings: int) -> None:
        """Its window has these settings from now on."""
        self.settings = settings

    def reset(self) -> None:
        """What is under way is made again."""
        self.versions.clear()  # a late acknowledgement finds nothing

    def forget(self) -> None:
        """The engine is gone. The next one's versions go on from the newest one that is acknowledged."""
        self.versions.clear()
        self.history.clear()
        self.questions = [(-1, self.questions[-1][1])]
        self.refused = []  # DLQ records under way have the old list

    def ask(self, version: int, questions: Sequence[Question]) -> None:
        """Versions after this one are asked these questions."""
        self.questions.append((version, len(questions)))
        self.policies = by_key(questions)
        self.last = {key: last for key, last in self.last.items() if key in self.policies}

    def expect(
        self, version: int, inputs: protocol.VersionInputs, asked: int, *, held: bool = False
    ) -> _Version:
        """``asked`` answers and failures of this version come; older ones of which none came are skipped.

        ``held``: its signals are made of them.
        """
        for skipped in [n for n, each in self.versions.items() if n < version and not each.begun]:
            del self.versions[skipped]
        found = self.versions.setdefault(version, _Version(inputs))
        found.begin(asked, held=held)
        return found

    def acknowledged(self) -> tuple[int, _Version] | None:
        """Take the oldest version, if all of it is acknowledged, and what it covers."""
        if not self.versions or self.versions[oldest := min(self.versions)].open:
            return None
        done = self.versions[oldest]
        lows = dict(done.inputs.low_watermarks)
        if any(offset < lows.get(stream, 0) for stream, offset in self.refused):
            return None
        del self.versions[oldest]
        return oldest, done

    def asked(self, version: int) -> int:
        """Number of questions that ``version`` is asked."""
        return next(n for after, n in reversed(self.questions) if after < version)


class Publisher:
    """Publishes the engine's events: what it makes of them goes into the ``outbox``.

    ``trackers``: by the name of their source. ``links``: the `traceparent` of records in these ranges.
    """

    def __init__(
        self,
        config: Config,
        trackers: Mapping[str, OffsetTracker],
        sessions: Sessions,
        store: MetricStore,
        *,
        progress: ProgressStore,
        outbox: Outbox,
        standby: Standby,
        streams: StreamNames,
        traces: RecentTraces | None = None,
        links: Callable[[Sequence[InputRange]], tuple[str, ...]] = lambda inputs: (),
    ) -> None:
        self._traces, self._links = traces or RecentTraces(), links
        self.streams, self.progress, self.outbox, self._standby = streams, progress, outbox, standby
        self._sessions, self._store = sessions, store
        self._trackers = trackers
        self._published: dict[str, _Published] = {}
        self._fingerprints: dict[str, str] = {}
        kept = DerivedLimits.of(config).kept_signals
        self.signals = SignalMaker(lambda: self._config, progress, store, self._answers, kept)
        self.configured(config)
        for session in config.sessions:
            self._open(session)

    def extended(self, config: Config) -> None:
        """There are further sessions; see `add`."""
        self._config = config

    def configured(self, config: Config) -> None:
        """These are the settings from now on."""
        self._config = config
        self._fingerprints.clear()
        for session in config.sessions:
            if published := self._published.get(session.name):
                published.configured(window_settings(config, session))

    def _fingerprint(self, name: str) -> str:
        if name not in self._fingerprints:
            session = next(each for each in self._config.sessions if each.name == name)
            asked = list(self._published[name].policies.values())
            self._fingerprints[name] = fingerprint(self._config, session, asked)
        return self._fingerprints[name]

    def add(self, session: SessionConfig) -> None:
        """There is another session."""
        self._open(session)
        self.outbox.add(session.name)

    def remove(self, name: str) -> None:
        """A session is gone: no answer will cover what it read."""
        self._published.pop(name).versions.clear()  # a late acknowledgement finds nothing
        self.signals.forget(name)
        self.outbox.remove(name)
        for tracker in self._trackers.values():
            tracker.forget(name)

    def drop(self, names: Iterable[str], *, complete: bool) -> None:
        """What is under way of these sessions, also of ``complete`` versions, is made again.

        It will have the same numbers.
        """
        for name in names:
            self._published[name].reset()
            self.signals.forget(name)
            self.outbox.drop(name, complete=complete)

    def _open(self, session: SessionConfig) -> None:
        asked = self._sessions.states[session.name].questions
        settings = window_settings(self._config, session)
        self._published[session.name] = _Published(
            [(-1, len(asked))], settings, bool(session.rollup), by_key(asked)
        )

    def committed(self, event: protocol.Committed) -> None:
        """A new data version; without standing questions its own event acknowledges it.

        One of bars that were answered for before is acknowledged at once, and nothing is published.
        """
        published, life = self._published[event.session], self._standby.lives.of(event.session)
        if life.state in VOID:
            return
        if life.state in _FOLLOWED:
            # another daemon has published it; how far is read from its commits
            published.history.clear()
            published.history.add(event.version)
            self.signals.forget(event.session)
            return
        ranges, window = self.streams.ranges(event.made.window), _UNKNOWN
        if event.made.known and not published.sums:
            window = WindowStart(published.settings, tuple(map(_first_of, ranges)))
        history = self._is_history(event)
        asked = not history and published.asked(event.version) > 0
        basis = basis_of(event, self.streams) if asked else None
        version = _Version(event.inputs, window, basis, begun=not asked, close=event.close)
        version = published.versions.setdefault(event.version, version)
        done = nothing if asked else self._acknowledging(event.session, version)
        if history:
            published.history.add(event.version)
            done(DeliveryOutcome.DELIVERED)
            return
        if life.state is State.REPLAYING:
            life.on(Event.CAUGHT_UP)
        update = DataUpdated(
            session=event.session,
            data_version=event.version,
            as_of=event.times.as_of,
            bars=event.bars,
            epoch=self.progress.epoch,
        )
        self.outbox.put(event.session, update, event.session, {}, done)

    def _is_history(self, event: protocol.Committed) -> bool:
        """Also where the engine did not know it: its progress is that of its start, or it cannot tell."""
        inputs = event.inputs
        if event.history or self.progress.is_history(event.session, inputs.closed, inputs.written):
            return True
        # by its records only where nothing better is known: an empty bar has those of the bar before it
        reads = () if self.progress.knows_history(event.session) else inputs.reads
        return bool(reads) and all(map(self.is_stored, reads))

    def is_stored(self, read: ReadRange) -> bool:
        """Whether these records were answered for before."""
        stream, tracker = self._followed(read.stream)
        return tracker is not None and tracker.is_stored(stream, read.last)

    def _followed(self, number: int) -> tuple[Stream, OffsetTracker | None]:
        """The stream with this number, and the tracker of its source, if that is known."""
        found = self.streams.find(number)
        if found is None:
            return ("", 0), None
        return (found.topic, found.partition), self._trackers.get(found.source)

    def answered(self, event: protocol.Answered) -> None:
        """A standing question's answer."""
        published = self._published[event.answer.session]
        if self._drops(event.answer.session, event.answer.data_version):
            return
        version = self._expect(event.answer.session, event.answer.data_version, event)
        answer = self._complete(event, version)
        version.answered(answer.as_of)
        acknowledge = self._acknowledging(answer.session, version)
        key, said = (answer.question, answer.question_hash), _said(answer)
        question = published.policies.get(key)
        trace = _AnswerTrace(self._traces, event, answer, self._links(answer.inputs), time.monotonic_ns())
        reason = question and suppressed(question, said, published.last.get(key))
        if version.held and reason != "late":
            version.said.append(answer)
        if reason:
            self._store.inc("foretick_answers_suppressed_total", reason=reason)
            trace.end(trace.taken)
            acknowledge(DeliveryOutcome.DELIVERED)
        else:
            published.last[key] = said
            answer = msgspec.structs.replace(answer, sequence=self.progress.number(answer.session))
            version.sequences.append(answer.sequence)
            delivered = partial(self._delivered, answer, said, event.times, trace)
            traceparent = trace.context.traceparent.encode()
            headers = {"answer_id": answer.answer_id.encode(), TRACEPARENT: traceparent}
            self.outbox.put(answer.session, answer, answer.symbol, headers, acknowledge, delivered)
        self._sessions.answered(answer, event.times, event.logits, event.engine_used)
        self._arrived(answer.session, answer.data_version, version)

    def repeated(self, event: protocol.Repeated) -> None:
        """An answer of a version that was answered before: it is ready, and was published then.

        Where the one that was published is known, or one of newer data, that stays.
        """
        session, asked = event.answer.session, event.answer.question_hash
        known = self._sessions.states[session].answers.get(asked)
        if self._standby.lives.state(session) in VOID | _FOLLOWED:
            return
        if known is None or known.answer.as_of < event.answer.as_of:
            answer = self._complete(event, _Version(event.inputs))
            ready = msgspec.structs.replace(answer, published_at=0)
            self._sessions.answered(ready, event.times, event.logits)

    def _delivered(
        self,
        answer: Answer,
        said: PublishedValue,
        times: Times,
        trace: _AnswerTrace,
        outcome: DeliveryOutcome,
    ) -> None:
        """Count an answer; an undelivered one may be published again."""
        now, published = time.monotonic_ns(), self._published.get(answer.session)
        key = (answer.question, answer.question_hash)
        if outcome is not DeliveryOutcome.DELIVERED and published and published.last.get(key) is said:
            del published.last[key]
        if outcome is DeliveryOutcome.REFUSED:
            self._store.inc("foretick_answers_failed_total", reason="publish")
            trace.end(now, "refused")
        elif outcome is DeliveryOutcome.DELIVERED and published:
            trace.end(now)
            self._store.inc("foretick_answers_total", session=answer.session)
            self._store.observe("foretick_stage_seconds", now - trace.taken, stage="publish")
            self._store.observe("foretick_stage_seconds", now - times.ring, stage="end_to_end")
            if times.closed:
                waited = now - times.closed
                self._store.observe("foretick_stage_seconds", waited, stage="close_to_answer")

    def failed(self, event: protocol.AnswerFailed) -> None:
        """A question without an answer: its records count as acknowledged, unless it was ended from outside.

        So it is where the engine stops, or its session is removed: it may be reset, and is asked again.
        """
        if self._drops(event.session, event.version):
            return
        if event.code in _UNASKED:
            self._store.inc("foretick_answers_suppressed_total", reason=_UNASKED[event.code])
        else:
            log.warning("%s/%s version %d: %s", event.session, event.question, event.version, event.message)
            reason = event.code if event.code in FAILURES else "other"
            self._store.inc("foretick_answers_failed_total", reason=reason)
        version = self._expect(event.session, event.version, event)
        ended = event.code in ("stopping", "unknown_session")
        version.stopped = version.stopped or ended
        self._acknowledging(event.session, version)(
            DeliveryOutcome.STOPPED if ended else DeliveryOutcome.REFUSED
        )
        self._arrived(event.session, event.version, version)

    def texts_asked(self, event: protocol.TextsAsked) -> None:
        """A version whose answers may come late: later versions must not acknowledge its inputs."""
        if not self._drops(event.session, event.version):
            self._expect(event.session, event.version, event)

    def _expect(
        self,
        session: str,
        version: int,
        event: protocol.Answered | protocol.AnswerFailed | protocol.TextsAsked,
    ) -> _Version:
        """The version that an event is about, which is asked as many questions as that says."""
        held = self.signals.reads(session)
        return self._published[session].expect(version, event.inputs, event.asked, held=held)

    def not_due(self, event: protocol.NotDue) -> None:
        """A version without answers: it is acknowledged after those before it."""
        if self._drops(event.session, event.version):
            return
        version = self._published[event.session].expect(event.version, event.inputs, 1)
        self._acknowledging(event.session, version)(DeliveryOutcome.DELIVERED)

    def record_refused(self, dead_letter: DeadLetter, session: str, place: tuple[int, int]) -> None:
        """A record of ``session`` at this stream and offset could not be used.

        Versions that cover it wait for its record: a restart from a snapshot of such a version would not
        read the record again.
        """
        published = self._published[session]
        refused = published.refused
        refused.append(place)

        def settle() -> None:
            refused.remove(place)
            self._acknowledge(session, published)  # finds no version of a session or engine that is gone

        self.outbox.dead_letter(dead_letter, settle)

    def _drops(self, session: str, version: int) -> bool:
        """Whether results of ``version`` are neither published nor acknowledged."""
        state = self._standby.lives.state(session)
        return state in VOID | _FOLLOWED or version in self._published[session].history

    def _answers(self, session: str) -> bool:
        """Whether this daemon answers it."""
        return self._standby.lives.state(session) not in STALE

    def questions_set(self, event: protocol.QuestionsSet) -> None:
        """A session's later versions are asked other questions."""
        self._published[event.session].ask(event.version, event.questions)
        self._fingerprints.pop(event.session, None)

    def forget(self) -> None:
        """Forget the engine's versions: what was not acknowledged will be read again."""
        for published in self._published.values():
            published.forget()
        self.signals.forget()
        self.progress.go_on()
        self.outbox.forget()

    def _complete(self, event: protocol.Answered | protocol.Repeated, version: _Version) -> Answer:
        """Add what only the gateway knows: the inputs' offsets and the answer's age."""
        answer, basis = event.answer, version.basis
        inputs = version.ranges_of(lambda: self.streams.ranges(event.inputs.reads))
        if basis is not None and answer.basis is not None:
            basis = msgspec.structs.replace(
                basis, config=self._fingerprint(answer.session), anchor=answer.basis.anchor
            )
        state = self._sessions.states[answer.session]
        age, source_age, daemon_age = state.ages(event.times)
        return msgspec.structs.replace(
            answer,
            epoch=self.progress.epoch,
            answer_id=answer_id_of(answer, inputs, event.inputs),
            inputs=inputs,
            staleness_ns=age,
            source_age_ns=source_age,
            daemon_age_ns=daemon_age,
            latency=msgspec.structs.replace(answer.latency, total_ns=daemon_age),
            flags=(*answer.flags, *state.flags_now(age)),
            basis=basis,
            published_at=time.time_ns(),
        )

    def _arrived(self, session: str, number: int, version: _Version) -> None:
        """One more result of ``version``; after the last one it is ready."""
        version.awaited -= 1
        if not version.awaited and version.answers:
            ready = FlashReady(
                session=session,
                data_version=number,
                as_of=version.as_of,
                answers=version.answers,
                epoch=self.progress.epoch,
            )
            self.outbox.put(session, ready, session, {})
        self._make_signals(session)

    def _make_signals(self, session: str) -> None:
        """Of versions whose answers are all there, in order; they are acknowledged like answers."""
        for number, version in sorted(self._published[session].versions.items()):
            if version.held and (version.awaited or version.stopped):
                return
            if version.held:
                version.held = False
                acknowledge = self._acknowledging(session, version)
                version.signals, made = self.signals.made(
                    session, number, version.said, version.inputs, version.close
                )
                version.said.clear()
                version.open += len(made)
                for signal in made:
                    headers = {"signal_id": signal.signal_id.encode()}
                    self.outbox.put(session, signal, signal.symbol, headers, acknowledge)
                acknowledge(DeliveryOutcome.DELIVERED)

    def _acknowledging(self, session: str, version: _Version) -> Done:
        published = self._published[session]

        def acknowledge(outcome: DeliveryOutcome) -> None:
            if outcome is not DeliveryOutcome.STOPPED:
                version.open -= 1
                self._acknowledge(session, published)

        return acknowledge

    def _acknowledge(self, session: str, published: _Published) -> None:
        """In order: a version's offsets cover those of all earlier ones, whichever is acknowledged first."""
        while (found := published.acknowledged()) is not None:
            number, version = found
            inputs = version.inputs
            for of_stream, low_watermark in inputs.low_watermarks:
                stream, tracker = self._followed(of_stream)
                if tracker is not None:
                    tracker.acknowledge(session, stream, low_watermark)
            self.progress.acknowledge(
                session,
                number,
                version.sequences,
                inputs.closed,
                version.window,
                inputs.written,
                version.signals,
            )
            self.outbox.complete(session, number)


def by_key(questions: Sequence[Question]) -> dict[tuple[str, str], Question]:
    """Questions by name and hash."""
    return {(question.name, question.hash): question for question in questions}


def _said(answer: Answer) -> PublishedValue:
    value = None if answer.value is None else Decimal(answer.value)
    return PublishedValue(
        answer.data_version, answer.text, value, answer.probability, answer.logit_gap, answer.daemon_age_ns
    )


def basis_of(event: protocol.Committed, streams: StreamNames) -> Basis:
    """What answers of a version say of its state; ``config`` and ``anchor`` are to come."""
    made = event.made
    return Basis(
        bars=event.bars,
        window_bars=event.live_records,
        window=streams.ranges(made.window),
        state_bars=made.state_bars,
        state=streams.ranges(made.state),
        left=made.left,
        since_gap=made.since_gap,
    )


def answer_id_of(answer: Answer, inputs: Sequence[InputRange], behind: protocol.VersionInputs) -> str:
    """The id by which consumers drop repeats: the question and the newest bars behind the answer.

    A correction or an event closes no bar, so its own record counts: the newest input of the version.
    """
    closed = () if behind.single else behind.closed
    if closed and "amended" not in answer.flags:
        return f"{answer.session}:{answer.question_hash}:{','.join(map(str, closed))}"
    streams = (f"{i.source}/{i.topic}/{i.partition}/{i.last_offset}".removeprefix("/") for i in inputs)
    read = ",".join(streams)
    return f"{answer.session}:{answer.question_hash}:{read or answer.data_version}"


def _first_of(read: InputRange) -> Position:
    """Its first record."""
    return Position(read.source, read.topic, read.partition, read.first_offset)
