"""A run of the scheduler written down, so that it can be run again and compared.

What comes into a scheduler from outside is what other threads asked for, readings of its clock, and what the
device answered. A `Journaled` scheduler writes these down, a JSON line for each step, with what it decided:
batches, who left the pool and how, endings, commits. `replay` runs it again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from engine.step import Chunk, Executor, SampledToken
from scheduler.desk import Input
from scheduler.observer import Observer
from scheduler.planner import Entry
from scheduler.policies import Ordering
from scheduler.request import Append, Event, Failure, Pending, Record, Request, State, Work
from scheduler.scheduler import FIFO, Scheduler
from scheduler.types import Costs, Limits, Memory, PrefixIndex, Tape, Tier


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


class Appended(msgspec.Struct, frozen=True, tag="append"):
    """Records for a tape, each as its tokens and its event time (ns)."""

    at: int
    tape: str
    records: list[tuple[list[int], int]]


class Streamed(msgspec.Struct, frozen=True, tag="input"):
    """A piece of a prompt, another prompt, or its end."""

    at: int
    id: int
    what: Input
    tokens: list[int]


class Cancelled(msgspec.Struct, frozen=True, tag="cancel"):
    """A request is to end."""

    id: int


Note = Submitted | Appended | Streamed | Cancelled

Outcome = list[int] | str | None
"""Of one row: the accepted tokens and the sampled one, or why it is unusable; None where none is wanted."""


class Failed(msgspec.Struct, frozen=True):
    """A pass that raised: the name of the exception's type, and its message."""

    kind: str
    message: str


Pass = list[Outcome] | Failed
"""What the device answered to one batch."""


class Step(msgspec.Struct, omit_defaults=True):
    """One line: a call of `Scheduler.step`, or of `close`."""

    notes: list[Note] = []
    clock: list[int] = []
    """Readings on the stepping thread, ns."""
    passes: list[Pass] = []
    decided: list[tuple[Any, ...]] = []
    closing: bool = False


class Header(msgspec.Struct, frozen=True):
    """First line: how the scheduler was made."""

    limits: Limits
    ordering: Ordering
    seed: int


class Journaled(Scheduler):
    """A scheduler that gives each line of its journal to ``write``, at the end of the step it tells of.

    ``seed`` makes its source of chance; all else as for `Scheduler`.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        executor: Executor,
        memory: Memory,
        limits: Limits,
        clock: Callable[[], int],
        observer: Observer | None = None,
        ordering: Ordering = FIFO,
        *,
        costs: Costs | None = None,
        tier: Tier | None = None,
        index: PrefixIndex | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            _Watched(executor, self._execute),
            memory,
            limits,
            self._read_clock,
            observer,
            ordering,
            costs=costs,
            tier=tier,
            index=index,
            rng=random.Random(seed),
        )
        self._write = write
        self._outer_clock = clock
        self._line = Step()
        self._stepping: int | None = None
        """The thread inside a step, outside of callbacks: what it does belongs in the journal."""
        self._emit(Header(limits, ordering, seed))

    def step(self) -> bool:
        """See `Scheduler.step`."""
        self._begin()
        try:
            return super().step()
        finally:
            self._end_line()

    def close(self) -> None:
        """See `Scheduler.close`."""
        self._begin()
        self._line.closing = True
        try:
            super().close()
        finally:
            self._end_line()

    def _begin(self) -> None:
        self._line, self._stepping = Step(), threading.get_ident()

    def _end_line(self) -> None:
        self._stepping = None
        self._emit(self._line)

    def _emit(self, line: msgspec.Struct) -> None:
        self._write(msgspec.json.encode(line) + b"\n")

    # What came in.

    def _read_clock(self) -> int:
        now = self._outer_clock()
        if self._stepping == threading.get_ident():
            self._line.clock.append(now)
        return now

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Somebody else's code runs: what it asks for comes back as notes, with their own readings."""
        stepping, self._stepping = self._stepping, None
        try:
            yield
        finally:
            self._stepping = stepping

    def _call(self, callback: Callable[[], None]) -> None:
        with self._outside():
            super()._call(callback)

    def _execute(self, executor: Executor, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        try:
            with self._outside():
                rows = executor.execute(batch)
        except Exception as error:
            self._line.passes.append(Failed(type(error).__name__, str(error)))
            raise
        self._line.passes.append([_outcome(row) for row in rows])
        return rows

    def _admit(self, request: Request) -> None:
        self._line.notes.append(_submitted(request))
        super()._admit(request)

    def _enqueue(self, tape: Tape, pending: list[Pending]) -> None:
        records = [(list(item.record.tokens), item.record.ts_event) for item in pending]
        self._line.notes.append(Appended(pending[0].queued_ns, tape.name, records))
        super()._enqueue(tape, pending)

    def _input(self, request_id: int, what: Input, tokens: Sequence[int], now: int) -> None:
        self._line.notes.append(Streamed(now, request_id, what, list(tokens)))
        super()._input(request_id, what, tokens, now)

    def _cancel(self, request_id: int) -> None:
        self._line.notes.append(Cancelled(request_id))
        super()._cancel(request_id)

    # What was decided.

    def _run(self, entries: Sequence[Entry], *, again: bool = False) -> None:
        rows = [(e.work.seq, e.n, e.leader.id if e.leader else 0, e.drafts) for e in entries]
        self._decided("again" if again else "batch", rows)
        super()._run(entries, again=again)

    def _leave(self, victim: Request, how: Event, by: Work) -> None:
        self._decided("left", victim.id, how.value, by.seq)
        super()._leave(victim, how, by)

    def _end(self, request: Request, state: State, failure: Failure | None = None) -> None:
        super()._end(request, state, failure)
        events = [(event.value, at) for event, at in request.events]
        reused = request.version, request.cached_tokens
        self._decided(
            "ended", request.id, state.value, failure, request.output, events, request.waits, reused
        )

    def _commit(self, append: Append, n: int) -> None:
        super()._commit(append, n)
        self._decided("committed", append.tape.name, append.tape.version)

    def _dropped(self, tape: Tape, records: Sequence[Record], failure: Failure) -> None:
        super()._dropped(tape, records, failure)
        self._decided("dropped", tape.name, len(records), failure)

    def _decided(self, *what: object) -> None:
        if self._stepping == threading.get_ident():
            self._line.decided.append(what)


class _Watched:
    """The executor, by way of the journal."""

    def __init__(
        self, executor: Executor, run: Callable[[Executor, Sequence[Chunk]], list[SampledToken | None]]
    ) -> None:
        self._executor, self._run = executor, run

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        return self._run(self._executor, batch)


def _outcome(row: SampledToken | None) -> Outcome:
    if row is None:
        return None
    return row.error if row.error is not None else [*(each.token for each in row.accepted), row.token]


def _submitted(request: Request) -> Submitted:
    reads = "prompt" if request.open_prompt else "newest" if request.open_reader else "forked"
    return Submitted(
        request.events[0][1],
        request.cls,
        request.session,
        list(request.prompt),
        request.max_tokens,
        reads,
        sorted(request.stop_ids),
        None if request.choices is None else list(request.choices),
        request.temperature,
        request.salt,
        request.complete,
    )
