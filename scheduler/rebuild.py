"""Windows whose stored KV is lost are prefilled again as soon as work waits for them.

A rebuild is an ordinary request of class SESSION. Everything runs on the thread that steps the scheduler.
"""

import logging
from collections.abc import Callable
from functools import partial

from regions.ephemeral import Fork
from regions.tape import Tape
from scheduler.interfaces import PriorityClass
from scheduler.refresh_policy import RETRY_NS
from scheduler.request import Request, RequestSpec, State
from scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


class Rebuilder:
    """Prefills lost windows again when work waits for them. ``clock`` gives ns."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], int]) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._running: set[Tape] = set()
        self._retry: dict[Tape, int] = {}  # not before this time, ns
        scheduler.on_lost(self._wanted)

    def idle(self) -> float | None:
        """Seconds until a failed rebuild may be tried again; None if there is none.

        Each is returned once when it is due: the next step tries it if work still waits.
        """
        now = self._clock()
        due = [tape for tape, at in self._retry.items() if at <= now]
        for tape in due:
            del self._retry[tape]
        return 0.0 if due else min(((at - now) * 1e-9 for at in self._retry.values()), default=None)

    def _wanted(self, tape: Tape) -> None:
        """Work waits for ``tape``."""
        if tape in self._running or self._clock() < self._retry.get(tape, 0):
            return
        self._retry.pop(tape, None)
        fresh, window = tape.fresh_window(), tape.window
        if not window:  # it was all evicted meanwhile
            if not self._scheduler.run_between(partial(_rebuild, tape, fresh)):
                fresh.release()
            return
        log.warning("%s: its stored KV is lost; prefilling %d tokens again", tape.name, len(window))
        self._running.add(tape)
        self._scheduler.submit(
            Request(
                RequestSpec(
                    cls=PriorityClass.SESSION,
                    session=tape.name,
                    prompt=window,
                    max_tokens=0,
                    on_done=partial(self._prefilled, tape, fresh),
                    reader=fresh,
                )
            )
        )

    def _prefilled(self, tape: Tape, fresh: Fork, request: Request) -> None:
        """Rebuild the tape. Nothing was appended meanwhile: appends wait for a lost tape."""
        self._running.discard(tape)
        self._retry[tape] = self._clock() + RETRY_NS
        try:
            if request.state is State.FINISHED:
                _rebuild(tape, fresh)
                del self._retry[tape]
                return
        finally:
            fresh.release()
        if request.error is not None:
            log.error("%s could not be rebuilt: %s", tape.name, request.error.message)


def _rebuild(tape: Tape, fresh: Fork) -> None:
    """Rebuild ``tape`` unless it got another prefix, and thus another window, meanwhile."""
    try:
        if tape.lost:
            tape.adopt(fresh)
    finally:
        fresh.release()
