"""Ahead-of-time evaluation: answers the standing questions for every data version, on forks of that version.

On each commit the tape is forked once per question, and all questions are submitted together, so they run in
one batch (*Attention Once* section 3.9.3, with forks instead of strip and restore). Overload skips versions,
never questions: a new version replaces one whose evaluation has not started; while one runs, the newest
version waits. Skipped versions are counted and their records are reported with the next answers, so every
input is accounted for.

All state belongs to the thread that steps the scheduler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from flash.registry import Registry, Standing
from regions.ephemeral import Fork
from regions.tape import Tape
from scheduler.request import Event, Failure, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItems
from scheduler.types import PriorityClass

P = TypeVar("P")
"""Payload of a record."""


@dataclass(frozen=True, slots=True)
class Evaluated(Generic[P]):
    """The result of one standing question at one data version; ``request`` is finished or has its error.

    ``payloads``: those of all records since the last evaluation, oldest first, skipped versions included.
    """

    standing: Standing
    version: int
    request: Request
    payloads: tuple[P, ...]
    gap: bool
    """Data was lost since the last answered version."""

    @property
    def queue_ns(self) -> int:
        """Time from the commit to the first batch."""
        return self._scheduled_at - self.request.events[0][1]

    @property
    def forward_ns(self) -> int:
        """Time from the first batch to the last; several tokens also wait between batches."""
        return self.request.events[-1][1] - self._scheduled_at

    @property
    def _scheduled_at(self) -> int:
        scheduled = self.request.first(Event.SCHEDULED)
        assert scheduled is not None  # it finished, so it ran
        return scheduled


@dataclass(eq=False, slots=True)
class _Evaluation:
    """The evaluation of all standing questions of a session at one version."""

    version: int
    forks: list[tuple[Standing, Fork, Sequence[int]]]
    """Each question's reader, and the tokens that ask it."""
    payloads: tuple[Any, ...]
    gap: bool
    requests: list[Request] = field(default_factory=list)
    open: int = 0
    answered: bool = False

    @property
    def started(self) -> bool:
        return any(request.first(Event.SCHEDULED) is not None for request in self.requests)

    def absorb(self, older: _Evaluation) -> None:
        """Take over the payloads and the gap of a skipped evaluation."""
        self.payloads = older.payloads + self.payloads
        self.gap |= older.gap


@dataclass(slots=True)
class _Session:
    current: _Evaluation | None = None
    """Submitted, not finished."""
    pending: _Evaluation | None = None
    """The newest version, which waits for `current`."""
    gap: bool = False
    """Data was lost, and no evaluation has reported it yet."""


class FlashEvaluator(Generic[P]):
    """Submits the registry's questions on each commit of a scheduler.

    `has_gap` says whether data was lost before the record of a payload. `on_done` is called on the stepping
    thread, once per question and evaluated version. `asked` gives the tokens that ask a question of a fork.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        registry: Registry,
        on_done: Callable[[Evaluated[P]], None],
        has_gap: Callable[[P], bool],
        asked: Callable[[Standing, Fork], Sequence[int]] = lambda item, fork: item.prepared.prompt_tokens,
    ) -> None:
        self._scheduler = scheduler
        self._registry = registry
        self._on_done = on_done
        self._has_gap, self._asked = has_gap, asked
        self._sessions: defaultdict[str, _Session] = defaultdict(_Session)
        self.coalesced: defaultdict[str, int] = defaultdict(int)
        """Skipped updates so far, by session."""
        scheduler.subscribe(self.on_commit, self.on_drop)

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """Evaluate the new version now, or after the running evaluation."""
        session, standing = self._sessions[tape.name], self._registry.standing(tape.name)
        payloads = tuple(record.payload for record in records)
        session.gap |= any(map(self._has_gap, payloads))
        if not standing:
            return
        self.coalesced[tape.name] += len(records) - 1
        new = _Evaluation(version, [self._fork(tape, item) for item in standing], payloads, session.gap)
        session.gap = False
        if session.pending is not None:
            self._skip(tape.name, session.pending, new)
            session.pending = None
        if session.current is not None and session.current.started:
            session.pending = new
            return
        if session.current is not None:
            self._skip(tape.name, session.current, new)
        self._submit(session, new)

    def on_drop(self, tape: Tape, records: TapeItems, failure: Failure) -> None:
        """Note the gap in the tape; the next version's answers report it."""
        self._sessions[tape.name].gap = True

    def _fork(self, tape: Tape, item: Standing) -> tuple[Standing, Fork, Sequence[int]]:
        fork = tape.fork()
        return item, fork, self._asked(item, fork)

    def _skip(self, name: str, old: _Evaluation, new: _Evaluation) -> None:
        """Cancel an evaluation that has not started, and hand its payloads to the new one."""
        self.coalesced[name] += 1
        new.absorb(old)
        if old.requests:
            for request in old.requests:
                self._scheduler.cancel(request.id)
        else:
            for _, reader, _ in old.forks:
                reader.release()

    def _submit(self, session: _Session, evaluation: _Evaluation) -> None:
        session.current = evaluation
        evaluation.open = len(evaluation.forks)
        evaluation.requests = [
            Request(
                RequestSpec(
                    cls=PriorityClass.FLASH,
                    session=item.session,
                    prompt=tokens,
                    max_tokens=item.prepared.answer_tokens(item.question),
                    on_done=partial(self._done, session, evaluation, item),
                    reader=reader,
                    stop_ids=item.prepared.stop_ids,
                    choices=item.prepared.choice_tokens,
                )
            )
            for item, reader, tokens in evaluation.forks
        ]
        for request in evaluation.requests:
            self._scheduler.submit(request)

    def _done(self, session: _Session, evaluation: _Evaluation, item: Standing, request: Request) -> None:
        evaluation.open -= 1
        try:
            self._report(evaluation, item, request)
        finally:
            # A receiver that raises must not stop the session's next evaluation.
            if not evaluation.open and session.current is evaluation:
                self._next(session, evaluation)

    def _next(self, session: _Session, finished: _Evaluation) -> None:
        session.current, pending, session.pending = None, session.pending, None
        lost = finished.gap and not finished.answered
        if pending is not None:
            pending.gap |= lost
            self._submit(session, pending)
        else:
            session.gap |= lost

    def _report(self, evaluation: _Evaluation, item: Standing, request: Request) -> None:
        answered = request.state is State.FINISHED
        evaluation.answered |= answered
        if answered or request.error is not None:
            self._on_done(Evaluated(item, evaluation.version, request, evaluation.payloads, evaluation.gap))
