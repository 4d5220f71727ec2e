"""Live work: arrival, change and end of requests and records."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast

from regions.pool_metadata import BlockPool
from regions.tape import Tape
from scheduler.deadlines import LATE, Deadlines
from scheduler.fair_queue import Shares
from scheduler.interfaces import Limits, PriorityClass
from scheduler.observer import Observer, WaitLedger
from scheduler.planner import Entry, refusal
from scheduler.queues import Queues
from scheduler.request import Failure, LifecycleEvent, Request, State
from scheduler.tapes import OnCommit, OnDrop, TapeAppend, TapeItems

log = logging.getLogger(__name__)

STOPPING = Failure("stopping", "the engine is shutting down")

PromptChange = Literal["extend", "replace", "finish"]


class RequestLifecycle:
    """Keeps the queues, the wait ledger and the deadlines consistent.

    Every callback in ``forget`` is called with each request that ended.
    """

    def __init__(
        self,
        queues: Queues,
        memory: BlockPool,
        limits: Limits,
        clock: Callable[[], int],
        observer: Observer,
        forget: Sequence[Callable[[Request], None]],
    ) -> None:
        self.queues, self.waits = queues, WaitLedger()
        self.shares = {PriorityClass.SESSION: Shares(), PriorityClass.POOL: Shares()}
        """Of the classes that tenants share."""
        self._deadlines = Deadlines()
        self.on_commit: list[OnCommit] = []
        self.on_drop: list[OnDrop] = []
        self._memory, self._limits, self._clock = memory, limits, clock
        self._observer, self._forget = observer, forget

    # Arrival and change.

    def enter(self, request: Request) -> None:
        """Queue a request that arrived."""
        failure = refusal(request, self._limits, self._memory)
        if failure is not None:
            self.end(request, State.FAILED, failure)
            return
        self.queues.requests[request.id] = request
        if (shares := self.shares.get(request.cls)) is not None:
            tenant = request.spec.tenant
            # what belongs to no question is not charged, and goes as if it came alone
            only = request.prefill_only
            request.start_at(shares.start(tenant) if only else shares.arrive(tenant, request.takes))
        self.waits.arrived(request, request.events[0][1])
        self._watch(request)
        self.update(request)

    def change_prompt(self, number: int, change: PromptChange, tokens: Sequence[int], at: int) -> None:
        """Extend, replace or finish an unfinished prompt; ``at`` is the time of the call, ns."""
        request = self.queues.requests.get(number)
        if request is None or request.complete:
            return
        if change == "finish":
            request.finish_prompt(at)
        else:
            prompt = _joined(request.prompt, tokens) if change == "extend" else tokens
            before = request.takes
            request.replace(prompt, at)
            if request.takes > before and (shares := self.shares.get(request.cls)) is not None:
                more, tenant = request.takes - before, request.spec.tenant
                shares.grow(tenant, more, admitted=request.admitted > 0)
        self._watch(request)
        if change == "finish" and not request.prompt:
            self.end(request, State.FAILED, Failure("bad_prompt", "the prompt was finished without a token"))
        elif (failure := refusal(request, self._limits, self._memory)) is not None:
            self.end(request, State.FAILED, failure)
        else:
            self.update(request, prompt=True)

    def enqueue(self, tape: Tape, records: TapeItems) -> None:
        """Queue records that arrived."""
        limit = min(self._limits.max_batch_tokens, tape.retention.tokens)
        fitting = [item for item in records if len(item.tokens) <= limit]
        too_long = [item for item in records if len(item.tokens) > limit]
        if too_long:
            message = f"a record has {max(len(r.tokens) for r in too_long)} tokens, the limit is {limit}"
            self.dropped(tape, too_long, Failure("too_long", message))
        if fitting:
            append = self.queues.appends.setdefault(tape, TapeAppend(tape))
            append.queue.extend(fitting)
            self.queues.update(append)

    def cancel(self, number: int) -> None:
        """End a live request as CANCELLED."""
        if number in self.queues.requests:
            self.end(self.queues.requests[number], State.CANCELLED)

    def expire(self, now: int) -> bool:
        """End unfinished prompts that timed out, and what is late; returns whether there was any."""
        passed = [self.queues.requests[number] for number in self._deadlines.passed(now)]
        expired = [(request, failure) for request in passed if (failure := self._expired(request, now))]
        for request, failure in expired:
            self.end(request, State.FAILED, failure)
        return bool(expired)

    def next_due(self, now: int) -> float | None:
        """Seconds until `expire` may have something to do; None: nothing waits for a time."""
        return self._deadlines.next_due(now)

    def update(self, request: Request, *, prompt: bool = False) -> None:
        """Update the queues after a request changed; ``prompt``: its prompt changed."""
        self.waits.track(request)
        self.queues.update(request, prompt=prompt)

    def _watch(self, request: Request) -> None:
        """Watch its deadline and, while the prompt is unfinished, its timeout."""
        timeout, times = self._limits.stream_timeout_ns, request.spec.deadline or ()
        if timeout and not request.complete:
            times = (*times, request.last_chunk_ns + timeout - 1)
        self._deadlines.watch(request.id, *times)

    def _expired(self, request: Request, now: int) -> Failure | None:
        timeout, deadline = self._limits.stream_timeout_ns, request.spec.deadline
        if not request.complete and 0 < timeout <= now - request.last_chunk_ns:
            message = f"the prompt was not finished, and no input came for {timeout / 1e9:g} s"
            return Failure("abandoned", message)
        started = request.first(LifecycleEvent.SCHEDULED) is not None
        if deadline is not None and deadline.missed(now, started=started):
            return Failure(LATE, "its deadline passed, or could not be met any more")
        return None

    def admitted(self, request: Request) -> None:
        """A request entered a batch for the first time."""
        if not request.prefill_only and (shares := self.shares.get(request.cls)) is not None:
            shares.admit(request.spec.tenant, request.start, request.takes)

    # End.

    def lose(self, entries: Sequence[Entry], failure: Failure) -> None:
        """Handle a failed batch: its requests end, its records are tried once more."""
        for entry in entries:
            if not (isinstance(entry.work, TapeAppend) and entry.work.retry()):
                self.fail(entry, failure)

    def fail(self, entry: Entry, failure: Failure) -> None:
        """End a request, or drop an append's first records."""
        if isinstance(entry.work, Request):
            self.end(entry.work, State.FAILED, failure)
        else:
            self.dropped(entry.work.tape, self.take(entry.work, entry.n), failure)

    def end(
        self, request: Request, state: State, failure: Failure | None = None, now: int | None = None
    ) -> None:
        """End a request at ``now`` (ns, by default the current time) and call its `on_done`."""
        if self.queues.requests.pop(request.id, None) is not None:
            self.queues.remove(request)
            self._deadlines.forget(request.id)
            if not request.admitted and not request.prefill_only and request.cls in self.shares:
                self.shares[request.cls].leave(request.spec.tenant)
            for forget in self._forget:
                forget(request)
        request.end(state, self._clock() if now is None else now, failure)
        self.waits.track(request)
        self._observer.ended(request)
        call(partial(request.spec.on_done, request))

    def remove(self, tape: Tape, failure: Failure) -> None:
        """End all work on a tape."""
        for request in [each for each in self.queues.requests.values() if each.session == tape.name]:
            self.end(request, State.FAILED, failure)
        append = self.queues.appends.get(tape)
        if append is not None:
            self.dropped(tape, self.take(append, append.remaining), failure, logging.INFO)

    def take(self, append: TapeAppend, n: int) -> TapeItems:
        """Remove the append's first records from its queue."""
        records = append.take(n)
        if append.queue:
            self.queues.update(append)
        else:
            self.queues.remove(append)
            del self.queues.appends[append.tape]
        return records

    def dropped(self, tape: Tape, records: TapeItems, failure: Failure, level: int = logging.ERROR) -> None:
        """Report records that will never be on their tape."""
        log.log(level, "%s: dropped %d records: %s", tape.name, len(records), failure.message)
        for on_drop in self.on_drop:
            call(partial(on_drop, tape, records, failure))

    def close(self) -> None:
        """End all live work with `stopping`."""
        for request in list(self.queues.requests.values()):
            self.end(request, State.FAILED, STOPPING)
        for append in list(self.queues.appends.values()):
            self.fail(Entry(append, append.remaining), STOPPING)


def call(callback: Callable[[], None]) -> None:
    """Run a callback; an exception is logged and does not disturb the batch."""
    try:
        callback()
    except Exception:
        log.exception("a callback raised")


def _joined(prompt: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
    """Concatenate, with the type's own `+` when both have the same type."""
    if type(prompt) is type(tokens):
        return cast(Any, prompt) + tokens  # type: ignore[no-any-return] # all token sequences here support +
    return [*prompt, *tokens]
