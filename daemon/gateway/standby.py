"""Whether this daemon answers, or reads behind another one and publishes nothing."""

import logging
import time
from collections.abc import Callable, Collection

from daemon.api.health import FILLING, STANDBY
from daemon.session_life import Event, Lives, count_illegal
from metrics.store import MetricStore

log = logging.getLogger(__name__)


class Standby:
    """Whether this daemon answers, and where each of its sessions stands.

    ``configured``: whenever it begins to read all sessions are another's, until it is given partitions.
    Without that, those of some partitions may be. ``clock``: monotonic, ns.
    """

    def __init__(
        self, store: MetricStore, *, configured: bool = False, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._store, self._configured, self._clock = store, configured, clock
        self.lives = Lives(count_illegal(store, "gateway"))
        self.answers = not configured
        """This daemon answers whatever it reads, but for sessions that it follows."""
        self.caught_up = False
        """It has read all that was committed, at least once."""
        self._note()

    def engine_starts(self, sessions: Collection[str], *, opens: bool = True) -> None:
        """An engine starts from what is known; it ``opens`` these sessions, or none."""
        self.lives.on(Event.ENGINE_STARTED if opens else Event.CLOSED, sessions)
        if self._configured:
            self.lives.on(Event.STANDBY, sessions)

    def wait(self) -> None:
        """The source begins to read."""
        self.answers, self.caught_up = not self._configured, False
        if self._configured:
            self.lives.on(Event.STANDBY, self.lives.open)
        self._note()

    def promoted(self, sessions: Collection[str], since_ns: int) -> None:
        """This daemon answers these now; their partitions came at ``since_ns``."""
        self.answers = True
        took_ns = self._clock() - since_ns
        self._store.set("foretick_promotion_seconds", took_ns / 1e9)
        self._note()
        log.info(
            "this daemon answers %d sessions now; taking over took %.0f ms", len(sessions), took_ns / 1e6
        )

    def handed_over(self, *, planned: bool, silent_ns: int) -> None:
        """A partition that another daemon had is read here, ``silent_ns`` after the group was to change."""
        kind = "planned" if planned else "unplanned"
        self._store.inc("foretick_hand_overs_total", kind=kind)
        self._store.observe("foretick_hand_over_seconds", silent_ns)

    def reasons(self) -> list[str]:
        """Why this daemon does not answer, though nothing is missing."""
        if self.answers:
            return []
        return [STANDBY] if self.caught_up else [STANDBY, FILLING]

    def _note(self) -> None:
        self._store.set("foretick_standby", float(not self.answers))
