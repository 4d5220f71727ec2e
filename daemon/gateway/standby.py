"""Whether this daemon answers, or is a standby: reads behind the one that answers, and publishes nothing."""

import logging
import time
from collections.abc import Callable

from daemon.api.health import FILLING, STANDBY
from metrics.store import MetricStore

log = logging.getLogger(__name__)


class Standby:
    """``configured``: it is a standby whenever it begins to read, until it is given partitions.

    ``clock``: monotonic, ns.
    """

    def __init__(
        self, store: MetricStore, *, configured: bool = False, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._store, self._configured, self._clock = store, configured, clock
        self.answers = not configured
        """This daemon answers."""
        self.caught_up = False
        """It has read all that was committed, at least once."""
        self._note()

    def wait(self) -> None:
        """The source begins to read."""
        self.answers, self.caught_up = not self._configured, False
        self._note()

    def promoted(self, since_ns: int) -> None:
        """This daemon answers now; the partitions came at ``since_ns``."""
        self.answers = True
        took_ns = self._clock() - since_ns
        self._store.set("foretick_promotion_seconds", took_ns / 1e9)
        self._note()
        log.info("this daemon answers now; taking over took %.0f ms", took_ns / 1e6)

    def reasons(self) -> list[str]:
        """Why this daemon does not answer, though nothing is missing."""
        if self.answers:
            return []
        return [STANDBY] if self.caught_up else [STANDBY, FILLING]

    def _note(self) -> None:
        self._store.set("foretick_standby", float(not self.answers))
