"""The threads that copy sessions out of the pool and back while the engine serves."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from regions.offload.kv_store import Steps, Way

NICENESS = 10
"""Of the thread that copies out: where cores are short it gets a tenth of what a thread of the model gets."""
PATIENCE_S = 0.25
"""A chunk is copied out after this time even if a pass still runs: a copy always ends."""
_END = object()


class CopyThreads:
    """An `Aside` with a thread for each way, which begins with its first copy.

    Copies of one way end in the order in which they came. Those back to the pool wait for no other, since
    somebody waits for them. Those out of it begin a chunk between two passes, as the events in ``between``
    say, for at most ``patience_s``: a team of threads ends with its last one, and while another thread has a
    core, Linux wakes two of the team on one core. While ``urgent()``, from any thread, says that work waits
    for blocks that leave, they wait for no pass.
    """

    def __init__(
        self,
        make_thread: Callable[..., threading.Thread] = threading.Thread,
        between: Sequence[threading.Event] = (),
        urgent: Callable[[], bool] = lambda: False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._copies: dict[Way, deque[Steps]] = {}
        self._changed = threading.Condition()
        self._make_thread, self._between, self._patience_s = make_thread, between, patience_s
        self._urgent = urgent

    def __call__(self, way: Way, steps: Steps) -> None:
        """See `Aside`."""
        with self._changed:
            begins = way not in self._copies
            self._copies.setdefault(way, deque()).append(steps)
            self._changed.notify_all()
        if begins:
            run = self._leave if way == "out" else self._return
            self._make_thread(target=run, name=f"copies {way}", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Whether all copies have ended within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._copies.values()), timeout_s)

    def _leave(self) -> None:
        with suppress(OSError):  # of this thread alone, on Linux
            niceness = max(os.getpriority(os.PRIO_PROCESS, 0), NICENESS)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        self._take(self._copies["out"], self._between)

    def _return(self) -> None:
        self._take(self._copies["in"], ())

    def _take(self, copies: deque[Steps], between: Sequence[threading.Event]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: copies)
            while next(copies[0], _END) is not _END:
                for each in () if self._urgent() else between:
                    each.wait(self._patience_s)
            with self._changed:
                copies.popleft()
                self._changed.notify_all()
