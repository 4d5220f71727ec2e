"""Which of a session's bars an earlier engine answered: they are read again, but not asked."""

from collections.abc import Sequence


class History:
    """Follows the bars of one session, in order, after the engine's start.

    ``acknowledged``: opening (ns) of the newest bar of each symbol whose answers are acknowledged
    (`daemon.progress.Progress`); unless it has ``legs`` members nothing is. ``restored``: the same of the
    bars that came back from a snapshot. ``corrected``, ``restored_corrected``: the newest corrections of
    both, as in `Progress`. ``follows``: another daemon answers, and every bar is one that it has answered,
    until `promote`.
    """

    def __init__(
        self,
        legs: int,
        acknowledged: Sequence[int] = (),
        restored: Sequence[int] = (),
        *,
        corrected: Sequence[int] = (),
        restored_corrected: Sequence[int] = (),
        follows: bool = False,
    ) -> None:
        self._follows = follows
        self._until, self._corrected = _by_leg(acknowledged, legs), _by_leg(corrected, legs)
        self._seen, self._seen_corrected = _by_leg(restored, legs), _by_leg(restored_corrected, legs)
        self.rebuilding = follows or self._missing()
        """Bars that were answered are still to come."""

    @property
    def follows(self) -> bool:
        """Whether another daemon answers."""
        return self._follows

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
            return self._follows or 0 <= late <= self._corrected[leg]
        self._seen[leg] = max(self._seen[leg], ts_open)
        if self._follows:
            return True
        answered = ts_open <= self._until[leg]
        self.rebuilding = self.rebuilding and answered and self._missing()
        return answered

    def promote(self, acknowledged: Sequence[int], corrected: Sequence[int] = ()) -> None:
        """The other daemon has answered up to here; bars behind are asked."""
        self._follows = False
        if len(acknowledged) == len(self._until):
            self._until = list(acknowledged)
        if len(corrected) == len(self._until):
            self._corrected = list(corrected)
        self.rebuilding = self._missing()

    def _missing(self) -> bool:
        return any(seen < until for seen, until in zip(self._seen, self._until, strict=True))


def _by_leg(known: Sequence[int], legs: int) -> list[int]:
    return list(known) if len(known) == legs else [-1] * legs
