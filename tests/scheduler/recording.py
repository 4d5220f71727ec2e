"""Records a run of the scheduler, to repeat it and compare the decisions.

A scheduler's inputs are the calls of other threads, readings of its clock, and the results of the device.
`Recorder` keeps them step by step, with the decisions: batches, shared prefills, preemptions, endings and
commits. `replay` repeats the run over an equal world. Callbacks are not repeated: their calls are among the
inputs.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.step import Chunk, Executor, SampledToken
from regions.tape import Tape
from scheduler.observer import Observer
from scheduler.policies import Ordering
from scheduler.request import Failure, LifecycleEvent, Request
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem, TapeItems, Work
from tests.kit.scheduler.worlds import FakeWorld

Pass = list[SampledToken | None] | Exception
"""The device's results of one batch."""


@dataclass
class Step:
    """A call of `Scheduler.step`, or of `close`."""

    closing: bool = False
    inputs: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list, compare=False)
    """Calls of other threads: the method of `RequestLifecycle` that each ends in, and its arguments."""
    clock: list[int] = field(default_factory=list)
    """Readings of the scheduler on the stepping thread, ns."""
    passes: list[Pass] = field(default_factory=list)
    decided: list[tuple[object, ...]] = field(default_factory=list)


class Recorder(Observer):
    """A scheduler over ``world`` that keeps a journal; steps like a scheduler."""

    took_ns: int | None = None
    """As an executor it times no pass: the scheduler's clock does."""

    def __init__(
        self, world: FakeWorld, ordering: Ordering, clock: Callable[[], int], executor: Executor
    ) -> None:
        self.journal: list[Step] = []
        self.ordering = ordering
        self._clock, self._executor = clock, executor
        self._stepping: int | None = None
        self._live: dict[int, Request] = {}
        self.scheduler = Scheduler(
            self,
            world.memory,
            world.limits,
            self._read_clock,
            self,
            ordering,
            costs=world.costs,
            tier=world.tier,
            index=world.index,
            rng=random.Random(7),
        )
        self.scheduler.subscribe(self.on_commit, self.on_drop)
        inbox, grouping = self.scheduler._inbox, self.scheduler._grouping
        self._take, inbox.take = inbox.take, self._taken
        if grouping is not None:
            self._read, grouping.read = grouping.read, self._shared

    def __getattr__(self, name: str) -> Any:
        """A call of a client, also on the stepping thread: its readings of the clock come with it."""
        found = getattr(self.scheduler, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            stepping = self._stepping
            if stepping != threading.get_ident():
                return found(*args)
            self._stepping = None
            try:
                return found(*args)
            finally:
                self._stepping = stepping

        return call

    def step(self) -> bool:
        return self._line(Step(), self.scheduler.step)

    def close(self) -> None:
        self._line(Step(closing=True), self.scheduler.close)

    def _line(self, line: Step, run: Callable[[], Any]) -> Any:
        self.journal.append(line)
        self._stepping = threading.get_ident()
        try:
            return run()
        finally:
            self._stepping = None

    def decided(self, *what: object) -> None:
        """Record a decision of this step."""
        if self._stepping == threading.get_ident():
            self.journal[-1].decided.append(what)

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        readers = {id(r.reader): r.id for r in self._live.values() if r.reader is not None}
        rows = []
        for chunk in batch:
            name = readers.get(id(chunk.target)) or getattr(chunk.target, "name", "")
            kept = len(chunk.tokens) - chunk.drafts
            rows.append((name, kept, list(chunk.tokens[kept:])))
        self.decided("batch", rows)
        passes = self.journal[-1].passes
        try:
            sampled = self._executor.execute(batch)
        except Exception as error:
            passes.append(error)
            raise
        passes.append(sampled)
        return sampled

    # Decisions.

    def preempted(self, request: Request, how: LifecycleEvent, by: Work) -> None:
        self.decided("left", request.id, how, by.seq)

    def ended(self, request: Request) -> None:
        """A request that came in ended; one that came after the end never did."""
        if self._live.pop(request.id, None) is not None:
            events, waits, output = list(request.events), dict(request.waits), list(request.output)
            reused = request.version, request.cached_tokens
            self.decided("ended", request.id, request.state, request.error, output, events, waits, reused)

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        self.decided("committed", tape.name, version)

    def on_drop(self, tape: Tape, records: TapeItems, failure: Failure) -> None:
        self.decided("dropped", tape.name, len(records), failure)

    def _shared(self, request: Request, source: Request) -> None:
        self._read(request, source)
        self.decided("shared", request.id, source.id, request.computed)

    # Inputs.

    def _taken(self) -> Sequence[Any]:
        calls: Sequence[Any] = self._take()
        for each in calls:
            if each.func.__name__ == "enter":
                self._live[each.args[0].id] = each.args[0]
            self.journal[-1].inputs.append((each.func.__name__, each.args))
        return calls

    def _read_clock(self) -> int:
        now = self._clock()
        if self._stepping == threading.get_ident():
            self.journal[-1].clock.append(now)
        return now


def replay(journal: Sequence[Step], ordering: Ordering, world: FakeWorld) -> list[Step]:
    """The journal of a second run, over ``world``, with the inputs of the first.

    Where the second decides otherwise it may want readings or passes that are not there: it gets the last
    reading again, and passes that fail.
    """
    inputs = _Inputs(world.executor)
    again = Recorder(world, ordering, inputs.clock, inputs)
    for step in journal:
        for name, args in step.inputs:
            inputs.put(again.scheduler, world, name, args)
        inputs.readings, inputs.passes = deque(step.clock), deque(step.passes)
        if step.closing:
            again.close()
        else:
            again.step()
    return again.journal


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
        answer = self.passes.popleft() if self.passes else RuntimeError("no such pass was recorded")
        if isinstance(answer, Exception):
            raise answer
        self._executor.execute(batch)
        return answer

    def put(self, scheduler: Scheduler, world: FakeWorld, name: str, args: Any) -> None:
        """Repeat a call at its time."""
        self.readings.clear()
        match name, args:
            case "enter", (Request(spec=spec, events=events),):
                self._now = events[0][1]
                made = replace(
                    spec,
                    on_done=lambda _: None,
                    tape=world.tape(spec.session) if spec.tape else None,
                    reader=world.reader(spec.session) if spec.reader else None,
                    open_prompt=(lambda: world.prompt(spec.salt)) if spec.open_prompt else None,
                )
                scheduler.submit(Request(made))
            case "enqueue", (tape, records):
                self._now = records[0].queued_ns
                items = [TapeItem(each.tokens, ts_event=each.ts_event) for each in records]
                scheduler.append((world.tape(tape.name), items))
            case "change_prompt", (number, change, tokens, at):
                self._now = at
                scheduler.finish(number) if change == "finish" else getattr(scheduler, change)(number, tokens)
            case "cancel", (number,):
                scheduler.cancel(number)
