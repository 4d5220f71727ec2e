"""Supervises long-lived tasks and threads: each has a name, and an unexpected end is reported."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

log = logging.getLogger(__name__)

Job = Callable[[], Coroutine[Any, Any, None]]

RESTART_AFTER_S = 0.1
CANCEL_AGAIN_S = 10.0
"""Longer than a task needs to clean up."""
MAX_RESTARTS = 5
"""Restarts of all tasks within a minute; one more and the task counts as failed."""


class TaskEnded(RuntimeError):
    """An essential task or thread ended unexpectedly; the message names it."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} ended: {why}")


def reason_of(error: BaseException | None) -> str:
    """Why something ended, for people."""
    return "it returned" if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")


class Tasks:
    """The long-lived tasks of an event loop, by name.

    ``on_end(name, why, restarted)`` is called for each that ends unexpectedly.
    """

    def __init__(self, on_end: Callable[[str, str, bool], None] = lambda name, why, restarted: None) -> None:
        self._on_end = on_end
        self._running: dict[str, asyncio.Task[None]] = {}
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        self.ended: dict[str, str] = {}
        """Tasks and threads that ended unexpectedly and were not restarted, and why."""

    def start(self, name: str, work: Job, *, restarts: bool = False, returns: bool = False) -> None:
        """Run ``work()``. ``restarts``: again after an unexpected end. ``returns``: it may return."""
        self.ended.pop(name, None)
        task = self._running[name] = asyncio.create_task(work(), name=name)
        task.add_done_callback(partial(self._done, name, work, restarts, returns))

    def names(self) -> list[str]:
        """Names of the running tasks."""
        return list(self._running)

    def expect_end(self, name: str) -> asyncio.Task[None] | None:
        """The task, which may end from now on and is not restarted; None if it has ended."""
        self.ended.pop(name, None)
        return self._running.pop(name, None)

    async def stop(self, *names: str) -> None:
        """Cancel the named tasks (all without names) and wait for their end.

        A library may lose a cancellation, as `asyncio.wait_for` does before Python 3.12: they are cancelled
        again until they end.
        """
        left = {task for name in names or self.names() if (task := self.expect_end(name)) is not None}
        while left:
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)

    def note_end(self, name: str, why: str) -> None:
        """Note the unexpected end of something that runs elsewhere, such as an engine thread."""
        log.error("%s ended: %s", name, why)
        self.ended[name] = why
        self._on_end(name, why, False)

    def _done(self, name: str, work: Job, restarts: bool, returns: bool, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._running.get(name) is not task:  # it was told to end
            return
        del self._running[name]
        if returns and error is None and not task.cancelled():
            return
        why = "it was cancelled" if task.cancelled() else reason_of(error)
        if not (restarts and self._may_restart()):
            log.error("%s failed", name, exc_info=error)
            self.note_end(name, why)
            return
        log.error("%s ended: %s; starting it again", name, why, exc_info=error)
        self.ended[name] = why
        self._on_end(name, why, True)
        asyncio.get_running_loop().call_later(RESTART_AFTER_S, self._restart, name, work)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        if len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < 60:
            return False
        self._restarts.append(now)
        return True

    def _restart(self, name: str, work: Job) -> None:
        if name in self.ended:
            self.start(name, work, restarts=True)


class Threads:
    """The long-lived threads of a process, by name. ``on_end(name, why)``: a thread ended unexpectedly."""

    def __init__(self, on_end: Callable[[str, str], None]) -> None:
        self._on_end = on_end
        self._stopping = False
        self.all: dict[str, threading.Thread] = {}

    def make(
        self, target: Callable[[], None], name: str, daemon: bool = True, *, returns: bool = False
    ) -> threading.Thread:
        """Make a thread, not started. ``returns``: it may end by returning."""
        thread = threading.Thread(target=self._run, args=(target, name, returns), name=name, daemon=daemon)
        self.all[name] = thread
        return thread

    def expect_end(self) -> None:
        """All threads may end from now on."""
        self._stopping = True

    def _run(self, target: Callable[[], None], name: str, returns: bool) -> None:
        error: BaseException | None = None
        try:
            target()
        except BaseException as raised:
            error = raised
        if self._stopping or (returns and error is None):
            if error is not None:
                log.error("%s failed while the engine stopped", name, exc_info=error)
            return
        log.error("%s failed", name, exc_info=error)
        self._on_end(name, reason_of(error))
