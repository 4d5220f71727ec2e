"""Which of a session's bars an earlier engine answered: they are read again, but not asked."""

from collections.abc import Sequence

from daemon.progress import furthest
from daemon.session_life import FOLLOWING, REBUILDING, Event, Life, State
from ingest.record import LowWatermarks, ReadRange


class History:
    """Follows the bars and events of one session, in order, after the engine's start.

    ``acknowledged``: opening (ns) of the newest bar of each symbol whose answers are acknowledged
    (`daemon.progress.Progress`); unless it has ``legs`` members nothing is. ``restored``: the same of the
    bars that came back from a snapshot. ``written``, ``restored_written``: the newest lines of one record of
    both, as in `Progress`. ``life``: where the session stands; while it is followed, another daemon answers,
    and every bar is one that it has answered.
    """

    def __init__(
        self,
        life: Life,
        legs: int,
        acknowledged: Sequence[int] = (),
        restored: Sequence[int] = (),
        *,
        written: LowWatermarks = (),
        restored_written: LowWatermarks = (),
    ) -> None:
        self.life = life
        self._until, self._seen = _by_leg(acknowledged, legs), _by_leg(restored, legs)
        self._written, self._seen_written = dict(written), dict(restored_written)
        self.settle()

    @property
    def rebuilding(self) -> bool:
        """Whether bars that were answered are still to come."""
        return self.life.state in REBUILDING

    @property
    def seen(self) -> tuple[int, ...]:
        """Opening of the newest bar of each symbol that was taken or restored; -1: none."""
        return tuple(self._seen)

    @property
    def closed(self) -> tuple[int, ...]:
        """Opening of the newest bar of each symbol, or of the newest that was answered; -1: none."""
        return tuple(map(max, self._seen, self._until))

    @property
    def written(self) -> LowWatermarks:
        """The newest lines of one record, or the newest that were answered."""
        return furthest(self.seen_written, tuple(self._written.items()))

    @property
    def seen_written(self) -> LowWatermarks:
        """The newest lines of one record that were taken or restored."""
        return tuple(self._seen_written.items())

    def take(self, leg: int, ts_open: int) -> bool:
        """The next bar; returns whether it was answered."""
        self._seen[leg] = max(self._seen[leg], ts_open)
        if self.life.state in FOLLOWING:
            return True
        answered = ts_open <= self._until[leg]
        if self.life.state is State.REPLAYING and not (answered and self._missing()):
            self.life.on(Event.CAUGHT_UP)
        return answered

    def take_single(self, read: ReadRange) -> bool:
        """The next line of one record, an event or a correction; returns whether it was answered."""
        stream, offset = read.stream, read.last
        self._seen_written[stream] = max(self._seen_written.get(stream, -1), offset)
        return self.life.state in FOLLOWING or 0 <= offset <= self._written.get(stream, -1)

    def promote(self, acknowledged: Sequence[int], written: LowWatermarks = ()) -> None:
        """The other daemon has answered up to here; bars behind are asked."""
        if len(acknowledged) == len(self._until):
            self._until = list(acknowledged)
        self._written = dict(written) or self._written
        self.life.on(Event.PROMOTED)
        self.settle()

    def settle(self) -> None:
        """The session is answered here: is any bar missing that was answered before?"""
        if self.life.state is State.REPLAYING and not self._missing():
            self.life.on(Event.CAUGHT_UP)

    def _missing(self) -> bool:
        return any(seen < until for seen, until in zip(self._seen, self._until, strict=True))


def _by_leg(known: Sequence[int], legs: int) -> list[int]:
    return list(known) if len(known) == legs else [-1] * legs
