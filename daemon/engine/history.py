"""Which of a session's bars an earlier engine answered: they are read again, but not asked."""

from __future__ import annotations

from collections.abc import Sequence


class History:
    """Follows the bars of one session, in order, after the engine's start.

    ``acknowledged``: opening (ns) of the newest bar of each symbol whose answers are acknowledged
    (`daemon.progress.Progress`); unless it has ``legs`` members nothing is. ``restored``: the same of the
    bars that came back from a snapshot. ``corrected``, ``corrections``: how often bars were corrected behind
    the newest acknowledged one and, so far, the newest one. ``follows``: another daemon answers, and every
    bar is one that it has answered, until `take_over`.
    """

    def __init__(
        self,
        legs: int,
        acknowledged: Sequence[int] = (),
        restored: Sequence[int] = (),
        *,
        corrected: int = 0,
        corrections: int = 0,
        follows: bool = False,
    ) -> None:
        self._follows, self._corrected, self.corrections = follows, corrected, corrections
        self._until = tuple(acknowledged) if len(acknowledged) == legs else (-1,) * legs
        self._seen = list(restored) if len(restored) == legs else [-1] * legs
        self.rebuilding = follows or self._missing()
        """Bars that were answered are still to come."""

    @property
    def seen(self) -> tuple[int, ...]:
        """Opening of the newest bar of each symbol that was taken or restored; -1: none."""
        return tuple(self._seen)

    @property
    def closed(self) -> tuple[int, ...]:
        """Opening of the newest bar of each symbol, or of the newest that was answered; -1: none."""
        return tuple(map(max, self._seen, self._until))

    def take(self, leg: int, ts_open: int, amends: bool = False) -> bool:
        """The next bar, or one written again (``amends``); returns whether it was answered.

        Corrections are taken for answered until the newest acknowledged bar of each symbol is there.
        """
        if amends:
            self.corrections += 1
            at_end = self._seen == list(self._until)
            return self.rebuilding or (at_end and self.corrections <= self._corrected)
        self.corrections = 0
        self._seen[leg] = max(self._seen[leg], ts_open)
        if self._follows:
            return True
        answered = ts_open <= self._until[leg]
        self.rebuilding = self.rebuilding and answered and self._missing()
        return answered

    def take_over(self, acknowledged: Sequence[int], corrected: int = 0) -> None:
        """The other daemon has answered up to here; bars behind are asked."""
        self._follows = False
        if len(acknowledged) == len(self._until):
            self._until, self._corrected = tuple(acknowledged), corrected
        self.rebuilding = self._missing()

    def _missing(self) -> bool:
        return any(seen < until for seen, until in zip(self._seen, self._until, strict=True))
