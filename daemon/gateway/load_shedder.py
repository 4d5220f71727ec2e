"""Whether tapes are late: then prompts without a session, which take the most tokens, are refused."""

import time
from collections.abc import Callable

from daemon import protocol
from daemon.api.messages import RETRY_AFTER_S, QueryError
from metrics.store import MetricStore


class LoadShedder:
    """Tapes are late for `RETRY_AFTER_S` after a version that missed its session's freshness objective.

    ``clock``: monotonic, ns, so no jump of the wall clock matters.
    """

    def __init__(self, store: MetricStore, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._store, self._clock = store, clock
        self._until = clock()
        self._session = ""

    def committed(self, event: protocol.Committed) -> None:
        """A session has a new version."""
        if event.late:
            self._session, self._until = event.session, self._clock() + RETRY_AFTER_S * 10**9

    def admit(self) -> None:
        """Raise QueryError while tapes are late, and count it."""
        if self._clock() < self._until:
            self._store.inc("foretick_prompts_refused_total")
            raise QueryError(
                "overloaded", f"{self._session} is late: prompts are refused until its bars are read"
            )
