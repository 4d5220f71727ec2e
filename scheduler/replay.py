"""The same inputs give the same decisions, byte for byte: a journal is run again and gives the same journal.

The second run is over a world that counts the same (`World`): what readers, tapes, memory, host tier, costs
and prefix index say is not in a journal. Callbacks are not run again. What they asked of the scheduler is
written down; what they did to the pool behind its back (`Scheduler.run_between`, a window that was prefilled
for somebody) is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.step import Chunk, Executor, OutOfMemory, SampledToken
from scheduler.journal import (
    Appended,
    Cancelled,
    Failed,
    Header,
    Journaled,
    Note,
    Outcome,
    Pass,
    Step,
    Streamed,
    Submitted,
)
from scheduler.request import Record, Request
from scheduler.scheduler import Scheduler
from scheduler.types import Costs, Memory, PrefixIndex, PriorityClass, PromptReader, Reader, Tape, Tier

MISSING = Failed("RuntimeError", "no such pass was recorded")


class World(Protocol):
    """What a replay runs over: everything counted as in the run that was recorded."""

    @property
    def executor(self) -> Executor:
        """Advances readers and tapes; its rows are not used."""

    @property
    def memory(self) -> Memory:
        """The pool."""

    @property
    def costs(self) -> Costs | None:
        """As in the first run; so the two below."""

    @property
    def tier(self) -> Tier | None:
        """The host tier."""

    @property
    def index(self) -> PrefixIndex | None:
        """The index of the prefix cache."""

    def tape(self, name: str) -> Tape:
        """The tape of that name, always the same."""

    def reader(self, session: str) -> Reader:
        """A reader of that session's newest version; of nothing when the name is empty."""

    def prompt(self, salt: str) -> PromptReader:
        """A reader of a prompt of its own."""


def replay(journal: bytes, world: World) -> bytes:
    """The journal of a second run, over ``world``, with the inputs of the first.

    Where the second decides otherwise it may want readings or passes that are not there: it gets the last
    reading again, and passes that fail. Raises msgspec.DecodeError for what is not a journal.
    """
    header, *steps = journal.splitlines()
    made = msgspec.json.decode(header, type=Header)
    inputs = _Inputs(world.executor)
    lines: list[bytes] = []
    scheduler = Journaled(
        lines.append,
        inputs,
        world.memory,
        made.limits,
        inputs.clock,
        ordering=made.ordering,
        costs=world.costs,
        tier=world.tier,
        index=world.index,
        seed=made.seed,
    )
    for encoded in steps:
        step = msgspec.json.decode(encoded, type=Step)
        for note in step.notes:
            inputs.readings = deque([getattr(note, "at", 0)])
            _post(scheduler, note, world)
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
        return [_row(outcome) for outcome in answer]


def _row(outcome: Outcome) -> SampledToken | None:
    if outcome is None:
        return None
    if isinstance(outcome, str):
        return SampledToken(0, 0.0, 0.0, error=outcome)
    *accepted, token = outcome
    return SampledToken(token, 0.0, 0.0, accepted=tuple(SampledToken(each, 0.0, 0.0) for each in accepted))


def _request(note: Submitted, world: World) -> Request:
    return Request(
        PriorityClass(note.cls),
        note.session,
        note.prompt,
        note.max_tokens,
        lambda request: None,
        open_reader=(lambda: world.reader(note.session)) if note.reads == "newest" else None,
        reader=world.reader(note.session) if note.reads == "forked" else None,
        open_prompt=(lambda: world.prompt(note.salt)) if note.reads == "prompt" else None,
        stop_ids=frozenset(note.stop_ids),
        choices=None if note.choices is None else tuple(note.choices),
        temperature=note.temperature,
        salt=note.salt,
        complete=note.complete,
    )


def _post(scheduler: Scheduler, note: Note, world: World) -> None:
    match note:
        case Submitted():
            scheduler.submit(_request(note, world))
        case Appended():
            scheduler.append(
                world.tape(note.tape), [Record(tokens, ts_event=at) for tokens, at in note.records]
            )
        case Streamed(id=number, what="extend"):
            scheduler.extend(number, note.tokens)
        case Streamed(id=number, what="replace"):
            scheduler.replace(number, note.tokens)
        case Streamed(id=number):
            scheduler.finish(number)
        case Cancelled():
            scheduler.cancel(note.id)
