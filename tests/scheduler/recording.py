"""TapeItems a run of the scheduler, to repeat it and compare it byte for byte.

A scheduler's inputs are the calls of other threads, readings of its clock, and the device's results.
`Recorder` wraps these and writes one JSON line per step, with the decisions: batches, shared prefills,
preemptions, endings and commits. `replay` repeats the run over an equal world. Callbacks are not repeated:
their calls are among the inputs.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from engine.step import Chunk, Executor, OutOfMemory, SampledToken
from regions.ephemeral import Fork
from regions.pool_metadata import BlockPool
from regions.prefix_index import PrefixIndex
from regions.streaming_kv import StreamingPrompt
from regions.tape import Tape
from scheduler.grouping import Grouping
from scheduler.inbox import AppendRecords, CancelRequest, Change, ChangePrompt, Inbox, Note
from scheduler.interfaces import Costs, Limits, OffloadTier, PriorityClass
from scheduler.observer import Observer
from scheduler.policies import Ordering
from scheduler.request import Failure, LifecycleEvent, Request, RequestSpec
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem, TapeItems, Work


class Submitted(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """A request at time ``at`` (ns); ``reads`` says which of the three ways to a reader it came with."""

    at: int
    cls: int
    session: str
    prompt: list[int]
    max_tokens: int
    reads: str
    stop_ids: list[int] = []
    choices: list[int] | None = None
    temperature: float = 0.0
    salt: str = ""
    complete: bool = True
    background: bool = False


class Appended(msgspec.Struct, frozen=True, tag="append"):
    """TapeItems for a tape, each as its tokens and its event time (ns)."""

    at: int
    tape: str
    records: list[tuple[list[int], int]]


class Changed(msgspec.Struct, frozen=True, tag="change"):
    """A piece of a prompt, another prompt, or its end."""

    at: int
    id: int
    change: Change
    tokens: list[int]


class Cancelled(msgspec.Struct, frozen=True, tag="cancel"):
    """A request is to end."""

    id: int


Input = Submitted | Appended | Changed | Cancelled

Outcome = list[int] | str | None
"""Of one row: the accepted tokens and the sampled one, or why it is unusable; None where none is wanted."""


class Failed(msgspec.Struct, frozen=True):
    """A pass that raised: the name of the exception's type, and its message."""

    kind: str
    message: str


Pass = list[Outcome] | Failed
"""The device's results of one batch."""

MISSING = Failed("RuntimeError", "no such pass was recorded")


class Step(msgspec.Struct, omit_defaults=True):
    """One line: a call of `Scheduler.step`, or of `close`."""

    inputs: list[Input] = []
    clock: list[int] = []
    """Readings of the scheduler on the stepping thread, ns."""
    passes: list[Pass] = []
    decided: list[tuple[Any, ...]] = []
    closing: bool = False


class Header(msgspec.Struct, frozen=True):
    """First line: how the scheduler was made."""

    limits: Limits
    ordering: Ordering
    seed: int


class World(Protocol):
    """The environment of a scheduler. A second one must behave exactly like the first."""

    @property
    def executor(self) -> Executor: ...

    @property
    def memory(self) -> BlockPool: ...

    @property
    def costs(self) -> Costs | None: ...

    @property
    def tier(self) -> OffloadTier | None: ...

    @property
    def index(self) -> PrefixIndex | None: ...

    def tape(self, name: str) -> Tape:
        """The tape of that name, always the same; an empty one for the empty name."""

    def reader(self, session: str) -> Fork:
        """A reader of that session's newest version; of nothing when the name is empty."""

    def prompt(self, salt: str) -> StreamingPrompt:
        """A reader of a prompt of its own."""


class Recorder:
    """A scheduler over ``world`` that passes a line for every step to ``write``; steps like a scheduler.

    ``seed``: of its random source. ``executor``: replaces the world's.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        world: World,
        limits: Limits,
        clock: Callable[[], int],
        ordering: Ordering,
        seed: int,
        executor: Executor | None = None,
    ) -> None:
        self._write, self._clock = write, clock
        self._executor = executor or world.executor
        self._line = Step()
        self._stepping: int | None = None
        self._live: dict[int, Request] = {}
        self.scheduler = Scheduler(
            self,
            world.memory,
            limits,
            self._read_clock,
            _Decisions(self),
            ordering,
            costs=world.costs,
            tier=world.tier,
            index=world.index,
            rng=random.Random(seed),
            inbox=_RecordedInbox(clock, self._received),
            grouping=_RecordedGrouping(self),
        )
        self.scheduler.subscribe(self.on_commit, self.on_drop)
        self._emit(Header(limits, ordering, seed))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def step(self) -> bool:
        """See `Scheduler.step`."""
        self._line, self._stepping = Step(), threading.get_ident()
        try:
            return self.scheduler.step()
        finally:
            self._end_line()

    def close(self) -> None:
        """See `Scheduler.close`."""
        self._line, self._stepping = Step(closing=True), threading.get_ident()
        try:
            self.scheduler.close()
        finally:
            self._end_line()

    def decided(self, *what: object) -> None:
        """Record a decision of this step."""
        if self._stepping == threading.get_ident():
            self._line.decided.append(what)

    def ended(self, request: Request) -> None:
        """A request that came in ended; one that came after the end never did."""
        if self._live.pop(request.id, None) is not None:
            events = [(event.value, at) for event, at in request.events]
            reused = request.version, request.cached_tokens
            self.decided(
                "ended",
                request.id,
                request.state.value,
                request.error,
                request.output,
                events,
                request.waits,
                reused,
            )

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        """See `Executor`."""
        readers = {id(r.reader): r.id for r in self._live.values() if r.reader is not None}
        rows = []
        for chunk in batch:
            name = readers.get(id(chunk.target)) or getattr(chunk.target, "name", "")
            kept = len(chunk.tokens) - chunk.drafts
            rows.append((name, kept, chunk.tokens[kept:]))
        self.decided("again" if self._line.passes else "batch", rows)
        try:
            sampled = self._executor.execute(batch)
        except Exception as error:
            self._line.passes.append(Failed(type(error).__name__, str(error)))
            raise
        self._line.passes.append([_outcome(row) for row in sampled])
        return sampled

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """See `Scheduler.subscribe`."""
        self.decided("committed", tape.name, version)

    def on_drop(self, tape: Tape, records: TapeItems, failure: Failure) -> None:
        """See `Scheduler.subscribe`."""
        self.decided("dropped", tape.name, len(records), failure)

    def _received(self, notes: Sequence[Note]) -> None:
        for note in notes:
            if isinstance(note, Request):
                self._live[note.id] = note
            recorded = _input(note)
            if recorded is not None:
                self._line.inputs.append(recorded)

    def _read_clock(self) -> int:
        now = self._clock()
        if self._stepping == threading.get_ident():
            self._line.clock.append(now)
        return now

    def _end_line(self) -> None:
        self._stepping = None
        self._emit(self._line)

    def _emit(self, line: msgspec.Struct) -> None:
        self._write(msgspec.json.encode(line) + b"\n")


class _RecordedInbox(Inbox):
    def __init__(self, clock: Callable[[], int], received: Callable[[Sequence[Note]], None]) -> None:
        super().__init__(clock)
        self._received = received

    def take(self) -> Sequence[Note]:
        notes = super().take()
        self._received(notes)
        return notes


class _RecordedGrouping(Grouping):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def read(self, request: Request, source: Request) -> None:
        super().read(request, source)
        self._recorder.decided("shared", request.id, source.id, request.computed)


class _Decisions(Observer):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def preempted(self, request: Request, how: LifecycleEvent, by: Work) -> None:
        self._recorder.decided("left", request.id, how.value, by.seq)

    def ended(self, request: Request) -> None:
        self._recorder.ended(request)


def replay(journal: bytes, world: World) -> bytes:
    """The journal of a second run, over ``world``, with the inputs of the first.

    Where the second decides otherwise it may want readings or passes that are not there: it gets the last
    reading again, and passes that fail. Raises msgspec.DecodeError for what is not a journal.
    """
    header, *steps = journal.splitlines()
    made = msgspec.json.decode(header, type=Header)
    inputs = _Inputs(world.executor)
    lines: list[bytes] = []
    scheduler = Recorder(
        lines.append, world, made.limits, inputs.clock, made.ordering, made.seed, executor=inputs
    )
    for encoded in steps:
        step = msgspec.json.decode(encoded, type=Step)
        for each in step.inputs:
            inputs.readings = deque([getattr(each, "at", 0)])
            _put(scheduler.scheduler, each, world)
        inputs.readings, inputs.passes = deque(step.clock), deque(step.passes)
        if step.closing:
            scheduler.close()
        else:
            scheduler.step()
    return b"".join(lines)


class _Inputs:
    """The clock and the executor of a replay: what they say is written down."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.readings: deque[int] = deque()
        self.passes: deque[Pass] = deque()
        self._now = 0

    def clock(self) -> int:
        if self.readings:
            self._now = self.readings.popleft()
        return self._now

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        answer = self.passes.popleft() if self.passes else MISSING
        if isinstance(answer, Failed):
            out_of_memory = answer.kind == OutOfMemory.__name__
            raise (OutOfMemory if out_of_memory else type(answer.kind, (Exception,), {}))(answer.message)
        self._executor.execute(batch)
        return [_sampled(outcome) for outcome in answer]


def _outcome(row: SampledToken | None) -> Outcome:
    if row is None:
        return None
    return row.error if row.error is not None else [*(each.token for each in row.accepted), row.token]


def _sampled(outcome: Outcome) -> SampledToken | None:
    if outcome is None:
        return None
    if isinstance(outcome, str):
        return SampledToken(0, 0.0, 0.0, error=outcome)
    *accepted, token = outcome
    return SampledToken(token, 0.0, 0.0, accepted=tuple(SampledToken(each, 0.0, 0.0) for each in accepted))


def _input(note: Note) -> Input | None:
    """A note as data; callbacks are not recorded."""
    match note:
        case Request():
            return _submitted(note.spec, note.events[0][1])
        case AppendRecords(tape, items):
            records = [(list(each.tokens), each.ts_event) for each in items]
            return Appended(items[0].queued_ns, tape.name, records)
        case ChangePrompt(number, change, tokens, at):
            return Changed(at, number, change, list(tokens))
        case CancelRequest(number):
            return Cancelled(number)
    return None


def _submitted(spec: RequestSpec, at: int) -> Submitted:
    return Submitted(
        at,
        spec.cls,
        spec.session,
        list(spec.prompt),
        spec.max_tokens,
        "prompt" if spec.open_prompt else "newest" if spec.tape else "forked",
        sorted(spec.stop_ids),
        None if spec.choices is None else list(spec.choices),
        spec.temperature,
        spec.salt,
        spec.complete,
        spec.background,
    )


def _request(made: Submitted, world: World) -> Request:
    return Request(
        RequestSpec(
            PriorityClass(made.cls),
            made.session,
            made.prompt,
            made.max_tokens,
            lambda request: None,
            tape=world.tape(made.session) if made.reads == "newest" else None,
            reader=world.reader(made.session) if made.reads == "forked" else None,
            open_prompt=(lambda: world.prompt(made.salt)) if made.reads == "prompt" else None,
            stop_ids=frozenset(made.stop_ids),
            choices=None if made.choices is None else tuple(made.choices),
            temperature=made.temperature,
            salt=made.salt,
            complete=made.complete,
            background=made.background,
        )
    )


def _put(scheduler: Scheduler, given: Input, world: World) -> None:
    match given:
        case Submitted():
            scheduler.submit(_request(given, world))
        case Appended():
            made = [TapeItem(tokens, ts_event=at) for tokens, at in given.records]
            scheduler.append(world.tape(given.tape), made)
        case Changed(id=number, change="extend"):
            scheduler.extend(number, given.tokens)
        case Changed(id=number, change="replace"):
            scheduler.replace(number, given.tokens)
        case Changed(id=number):
            scheduler.finish(number)
        case Cancelled():
            scheduler.cancel(given.id)
