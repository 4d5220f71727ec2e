"""The one thread that owns the device: it steps the scheduler while there is work and blocks otherwise."""

import logging
import threading
import time
from collections.abc import Callable

from scheduler.scheduler import Scheduler
from scheduler.turns import Turns

log = logging.getLogger(__name__)

_BACKOFF_S = (0.01, 0.1, 1.0)
"""Pauses after consecutive failed steps, the last one repeated, so that a bug is not a busy loop."""


class Worker:
    """Runs a scheduler, or several that take turns, until stopped.

    A watchdog reads `progress` and `idle`: the worker is alive if it is idle or made progress since the last
    look. ``when_idle`` is called on the worker's thread when a step found nothing to do, and again after the
    seconds it returns (None: after the next work). New work waits for it, so each call must do one bounded
    piece. ``spare_work`` does such a piece, too, and returns whether there is more of it; it is called behind
    every step after which no question waits.
    """

    def __init__(
        self,
        scheduler: Scheduler | Turns,
        name: str = "device-worker",
        when_idle: Callable[[], float | None] = lambda: None,
        make_thread: Callable[..., threading.Thread] = threading.Thread,
        spare_work: Callable[[], bool] = lambda: False,
        join_grace_s: float = 5.0,
    ) -> None:
        self._scheduler = scheduler
        self._when_idle, self._spare_work = when_idle, spare_work
        self._join_grace_s = join_grace_s
        # A daemon thread: a forward pass that hangs must not keep the process from exiting.
        self._thread = make_thread(target=self._run, name=name, daemon=True)
        self._stopping = threading.Event()
        self._drain_until = 0.0
        self._failed_in_row = 0
        self.progress = 0
        """Steps that did something."""
        self.failures = 0
        """Steps that raised; each is a bug, not an expected outcome."""
        self.idle = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, drain_s: float) -> bool:
        """Work for at most `drain_s` more seconds, then end the rest with code `stopping`.

        Returns whether the thread ended; False means that a forward pass did not return within another
        ``join_grace_s``. Call it once, from another thread.
        """
        self._drain_until = time.monotonic() + drain_s
        self._stopping.set()
        self._scheduler.interrupt()
        self._thread.join(drain_s + self._join_grace_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            worked = self._step()
            if not self._spare() and not worked:
                self.idle = True
                self._scheduler.wait(self._rest())
                self.idle = False
        failures = self.failures
        while time.monotonic() < self._drain_until and self.failures == failures and self._step():
            pass
        self._scheduler.close()
        self.idle = True

    def _spare(self) -> bool:
        """Do a piece of spare work, unless a question waits; whether there is more."""
        if self._scheduler.has_questions:
            return False
        try:
            more = self._spare_work()
        except Exception:
            log.exception("spare work raised")
            self.failures += 1
            return False
        self.progress += more
        return more

    def _rest(self) -> float | None:
        """Call ``when_idle``; returns the seconds until it or a prompt's timeout is due next."""
        due = self._scheduler.next_due()
        try:
            rest = self._when_idle()
        except Exception:
            log.exception("when_idle raised")
            self.failures += 1
            rest = None
        return min((wait for wait in (due, rest) if wait is not None), default=None)

    def _step(self) -> bool:
        """One step; True when there may be more to do."""
        try:
            worked = self._scheduler.step()
        except Exception:
            log.exception("a scheduler step raised")
            self.failures += 1
            self._stopping.wait(_BACKOFF_S[min(self._failed_in_row, len(_BACKOFF_S) - 1)])
            self._failed_in_row += 1
            return True
        self._failed_in_row = 0
        self.progress += worked
        return worked
