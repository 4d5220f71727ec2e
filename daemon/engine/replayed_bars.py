"""Which of a session's bars an earlier engine answered: they are read again, but not asked."""

from collections.abc import Sequence

from daemon.session_life import FOLLOWING, REBUILDING, Event, Life, State


class History:
    """Follows the bars of one session, in order, after the engine's start.

    ``acknowledged``: opening (ns) of the newest bar of each symbol whose answers are acknowledged
    (`daemon.progress.Progress`); unless it has ``legs`` members nothing is. ``restored``: the same of the
    bars that came back from a snapshot. ``corrected``, ``restored_corrected``: the newest corrections of
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
        corrected: Sequence[int] = (),
        restored_corrected: Sequence[int] = (),
    ) -> None:
        self.life = life
        self._until, self._corrected = _by_leg(acknowledged, legs), _by_leg(corrected, legs)
        self._seen, self._seen_corrected = _by_leg(restored, legs), _by_leg(restored_corrected, legs)
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
    def corrected(self) -> tuple[int, ...]:
        """The newest corrections, or the newest that were answered; empty where there are none."""
        newest = tuple(map(max, self._seen_corrected, self._corrected))
        return newest if max(newest, default=-1) >= 0 else ()

    @property
    def seen_corrected(self) -> tuple[int, ...]:
        """The newest corrections that were taken or restored."""
        return tuple(self._seen_corrected)

    def take(self, leg: int, ts_open: int, late: int | None = None) -> bool:
        """The next bar; returns whether it was answered. ``late``: offset of the record that corrects it."""
        if late is not None:
            self._seen_corrected[leg] = max(self._seen_corrected[leg], late)
            return self.life.state in FOLLOWING or 0 <= late <= self._corrected[leg]
        self._seen[leg] = max(self._seen[leg], ts_open)
        if self.life.state in FOLLOWING:
            return True
        answered = ts_open <= self._until[leg]
        if self.life.state is State.REPLAYING and not (answered and self._missing()):
            self.life.on(Event.CAUGHT_UP)
        return answered

    def promote(self, acknowledged: Sequence[int], corrected: Sequence[int] = ()) -> None:
        """The other daemon has answered up to here; bars behind are asked."""
        if len(acknowledged) == len(self._until):
            self._until = list(acknowledged)
        if len(corrected) == len(self._until):
            self._corrected = list(corrected)
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
