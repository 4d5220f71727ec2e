"""Ready answers after a start: what was answered of a session's newest version is asked once more.

Another engine, or daemon, gave these answers, so nothing of this is published. Without it a session would
have no ready answer until its next bar, which may come tomorrow. It is idle work, a session at a time: a new
version makes it needless, and is never behind it.

All state belongs to the thread that steps the scheduler.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Generic, TypeVar

from flash.evaluator import Evaluated, request_of
from flash.registry import Key, Registry, Standing
from regions.ephemeral import Fork
from regions.offload.kv_store import NotResident
from regions.tape import Tape
from scheduler.interfaces import PriorityClass
from scheduler.lifecycle import call
from scheduler.request import Request, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItems

P = TypeVar("P")
"""Payload of a record."""
AGAIN_S = 1.0
"""A session whose earlier versions are still to come is looked at again after so long."""


class Repeats(Generic[P]):
    """Asks each session's newest version again if all of it is history.

    ``asked_of(session)``: the questions that were asked of it. ``may_ask(session, newest payload)``: nothing
    that was answered before is to come. `on_done` gets each answer, once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        registry: Registry,
        on_done: Callable[[Evaluated[P]], None],
        tokens_of: Callable[[Standing, Fork], Sequence[int]],
        asked_of: Callable[[str], Collection[Key]],
        is_history: Callable[[P], bool],
        may_ask: Callable[[str, P], bool],
    ) -> None:
        self._scheduler, self._registry, self._on_done = scheduler, registry, on_done
        self._tokens_of, self._asked_of = tokens_of, asked_of
        self._is_history, self._may_ask = is_history, may_ask
        self._waiting: dict[str, tuple[Tape, P]] = {}
        self._running: dict[str, list[Request]] = {}
        scheduler.subscribe(self.on_commit)

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """A newer version takes the place of one that waits or is asked."""
        self.forget(tape.name)
        if all(self._is_history(each.payload) for each in records):
            self._waiting[tape.name] = tape, records[-1].payload

    def restore(self, tape: Tape, newest: P) -> None:
        """A session goes on from a version whose newest record has this payload."""
        self._waiting[tape.name] = tape, newest

    def forget(self, name: str) -> None:
        """Ask nothing more of a session; what runs ends without a result."""
        self._waiting.pop(name, None)
        for request in self._running.pop(name, []):
            self._scheduler.cancel(request.id)

    def idle(self) -> float | None:
        """Ask of one session; returns the seconds until the next call, None: not before a commit."""
        for name, (tape, payload) in self._waiting.items():
            if self._may_ask(name, payload):
                if not self._ask(tape, payload):
                    return AGAIN_S
                del self._waiting[name]
                return 0.0
        return AGAIN_S if self._waiting else None

    def _ask(self, tape: Tape, payload: P) -> bool:
        """Whether the questions are submitted: the tape may be outside of a pool that has no room."""
        asked = self._asked_of(tape.name)
        due = [item for item in self._registry.standing(tape.name) if item.key in asked]
        readers: list[Fork] = []
        try:
            while len(readers) < len(due):
                readers.append(tape.fork())
        except NotResident:
            for reader in readers:
                reader.release()
            return False
        requests = [
            request_of(
                item,
                self._tokens_of(item, reader),
                reader,
                PriorityClass.STREAM,  # behind all that somebody waits for
                partial(self._done, item, tape.version, payload),
            )
            for item, reader in zip(due, readers, strict=True)
        ]
        self._running[tape.name] = list(requests)
        for request in requests:
            self._scheduler.submit(request)
        return True

    def _done(self, item: Standing, version: int, payload: P, request: Request) -> None:
        running = self._running.get(item.session, [])
        if request not in running:
            return  # there is a newer version
        running.remove(request)
        if request.state is State.FINISHED:
            done = Evaluated(item, version, request, (payload,), gap=False, asked=0)
            call(partial(self._on_done, done))
