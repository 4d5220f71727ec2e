"""How old the newest record of a version is, by three clocks."""

from typing import NamedTuple

import msgspec

_MINUTE_NS = 60_000_000_000
_UNKNOWN = 2**63


class Times(msgspec.Struct, frozen=True):
    """When a record was where, ns.

    ``as_of``: event time by the venue's clock; ``source``: wall clock when the broker or socket had it;
    ``ring``: monotonic clock when this daemon had it. ``replay``: it was sent again from a recording.
    ``closed``: monotonic clock when this daemon had the record that closed its bar; 0 is unknown.
    """

    as_of: int
    source: int
    ring: int
    replay: bool = False
    closed: int = 0


class Ages(NamedTuple):
    """Of a record, ns: since its event, since its source had it, and since this daemon had it."""

    event: int = 0
    source: int = 0
    daemon: int = 0


def ages(times: Times | None, ahead_ns: int, wall_ns: int, monotonic_ns: int) -> Ages:
    """Of a record at these clocks; all 0 without one. The venue's clock is ``ahead_ns`` ahead of the wall's.

    The event of a replay is its being sent: what the recording says is long ago. A clock that was set back
    gives 0, not less.
    """
    if times is None:
        return Ages()
    source = max(0, wall_ns - times.source)
    event = source if times.replay else max(0, wall_ns - times.as_of + ahead_ns)
    return Ages(event, source, max(0, monotonic_ns - times.ring))


class VenueClock:
    """How far a venue's clock is ahead of ours, at least, by its records' times of event and arrival.

    A record cannot arrive before its event. Where it seems to, the venue's clock is ahead by that much, or
    more. A clock that is behind looks like latency. The last one to two minutes count.
    ``last_seen_ns``: when the venue last sent a record or a heartbeat (monotonic clock).
    """

    def __init__(self, last_seen_ns: int = 0) -> None:
        self.last_seen_ns = last_seen_ns
        self._minute = 0
        self._least = self._before = _UNKNOWN

    def touch(self, now_ns: int) -> None:
        """The venue has sent something, at this time of the monotonic clock."""
        self.last_seen_ns = now_ns

    def observe(self, event_ns: int, received_ns: int) -> None:
        """A record arrived; ``received_ns``: by our wall clock."""
        minute = received_ns // _MINUTE_NS
        if minute != self._minute:
            self._before = self._least if minute == self._minute + 1 else _UNKNOWN
            self._minute, self._least = minute, _UNKNOWN
        self._least = min(self._least, received_ns - event_ns)

    def delay_ns(self, wall_ns: int) -> int | None:
        """The shortest time from an event to its arrival, by the two clocks; None where none came lately."""
        found = min(self._least, self._before)
        return None if found == _UNKNOWN or wall_ns // _MINUTE_NS > self._minute + 1 else found

    @property
    def ahead_ns(self) -> int:
        """0 or more."""
        return max(0, -min(self._least, self._before))
