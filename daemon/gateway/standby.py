"""Which sessions another daemon answers while this one reads behind it, and publishes nothing of them."""

import logging
import time
from collections.abc import Callable, Collection

from daemon.api.health import FILLING, STANDBY
from metrics.store import MetricStore

log = logging.getLogger(__name__)


class Standby:
    """``configured``: whenever it begins to read all sessions are another's, until it is given partitions.

    Without that, those of some partitions may be. ``clock``: monotonic, ns.
    """

    def __init__(
        self, store: MetricStore, *, configured: bool = False, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._store, self._configured, self._clock = store, configured, clock
        self.answers = not configured
        """This daemon answers what is not `follow`ed."""
        self.caught_up = False
        """It has read all that was committed, at least once."""
        self._followed = set[str]()
        self._note()

    def wait(self) -> None:
        """The source begins to read."""
        self.answers, self.caught_up = not self._configured, False
        self._followed.clear()
        self._note()

    def follow(self, sessions: Collection[str]) -> None:
        """Another daemon answers these."""
        self._followed.update(sessions)

    def lead(self, sessions: Collection[str]) -> None:
        """No other daemon answers these."""
        self._followed.difference_update(sessions)

    def follows(self, session: str) -> bool:
        """Whether another daemon answers the session, and this one reads behind it."""
        return not self.answers or session in self._followed

    def promoted(self, sessions: Collection[str], since_ns: int) -> None:
        """This daemon answers these now; their partitions came at ``since_ns``."""
        self.answers = True
        self.lead(sessions)
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
