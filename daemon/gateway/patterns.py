"""Sessions of symbols that come: which record opens one, and why others do not."""

import re
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from daemon.config.instruments import Instrument
from daemon.config.schema import PatternConfig, SessionConfig
from daemon.config.symbols import NO_NAMES, Names
from daemon.progress import Opened, Progress
from daemon.ring_numbers import prices_of
from feeds.codec import check_prices
from feeds.decimals import decimals_of
from feeds.market_data import AnyRecord

MAX_WATCHED = 65_536
"""Symbols whose first records are counted at a time, and symbols that are known not to match."""
RETRY_NS = 5_000_000_000
"""How long a symbol whose session the engine has refused opens none at least."""
_LONGEST_NAME = 64
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


class Unopened(StrEnum):
    """Why a record goes to no session."""

    UNMATCHED = "unmatched"
    ACTIVITY = "activity"
    """There were too few records of it yet."""
    LIMIT = "limit"
    """Its pattern has as many sessions as it may have."""
    REFUSED = "refused"
    """The engine had no room for it a moment ago."""
    OUTSIDE = "outside"
    """Its name is of no symbol at its time: see `daemon.config.symbols.Names`."""


@dataclass
class _Watched:
    """First records of a symbol: since when, ns, how many, and the most decimals of their prices."""

    since_ns: int
    records: int = 0
    decimals: int = 0


class Patterns:
    """The patterns of a configuration, in their order; the first one that matches a symbol counts."""

    def __init__(
        self,
        patterns: Sequence[PatternConfig],
        instruments: Mapping[str, Instrument],
        names: Names = NO_NAMES,
    ) -> None:
        self._patterns, self._instruments, self._names = tuple(patterns), instruments, names
        self._watched: dict[str, _Watched] = {}
        self.unmatched: dict[str, None] = {}
        """Symbols that no pattern matches, of those that came."""
        self.opened: dict[str, Opened] = {}
        """The sessions that were opened, by name."""
        self._counts = Counter[PatternConfig]()
        self._refused: dict[str, int] = {}
        """By symbol, when its session was refused, monotonic, ns."""

    def replace(
        self,
        patterns: Sequence[PatternConfig],
        instruments: Mapping[str, Instrument],
        names: Names = NO_NAMES,
    ) -> None:
        """The configuration was read again."""
        self._patterns, self._instruments, self._names = tuple(patterns), instruments, names
        self._watched.clear()
        self.unmatched.clear()
        self._counts = Counter(filter(None, (self.find(each.symbol) for each in self.opened.values())))

    def add(self, session: SessionConfig) -> None:
        """A session was opened."""
        self.opened[session.name] = Opened(session.symbol, session.price_decimals)
        if pattern := self.find(session.symbol):
            self._counts[pattern] += 1

    def remove(self, name: str) -> None:
        """A session is gone, if it was one of a pattern's."""
        opened = self.opened.pop(name, None)
        if opened is not None and (pattern := self.find(opened.symbol)):
            self._counts[pattern] -= 1

    def refuse(self, symbol: str, now_ns: int) -> None:
        """The engine has no room for a session of this symbol."""
        self._refused[symbol] = now_ns

    def idle_timeout(self, name: str) -> int:
        """Of a session that was opened, ns; 0: never. One whose pattern is gone is closed at once."""
        pattern = self.find(self.opened[name].symbol)
        return 1 if pattern is None else int(pattern.idle_timeout)

    def find(self, symbol: str) -> PatternConfig | None:
        """The pattern that opens sessions of a symbol; none opens one of another name of a symbol."""
        if symbol in self._names.periods:
            return None
        return next((each for each in self._patterns if each.matches(symbol)), None)

    def consider(self, record: AnyRecord, now_ns: int, names: Collection[str]) -> SessionConfig | Unopened:
        """The session that a record of a symbol without one opens. ``names``: of all sessions.

        Raises MalformedRecord for prices that the session would not take.
        """
        symbol = record.key
        pattern = self.find(symbol)
        if pattern is None:
            if len(self.unmatched) < MAX_WATCHED:
                self.unmatched[symbol] = None
            return Unopened.UNMATCHED
        if self._is_refused(symbol, now_ns):
            return Unopened.REFUSED
        if self._counts[pattern] >= pattern.max_sessions:
            self._watched.pop(symbol, None)
            return Unopened.LIMIT
        known = self._instruments.get(symbol)
        if not (pattern.signed if known is None or known.signed is None else known.signed):
            check_prices(record)
        seen = self._watch(symbol, pattern, now_ns)
        seen.records += 1
        seen.decimals = max(seen.decimals, *map(decimals_of, prices_of(record)))
        if seen.records < pattern.least_records:
            return Unopened.ACTIVITY
        del self._watched[symbol]
        return self._session(pattern, symbol, _name_of(symbol, names), seen.decimals)

    def reopened(self, name: str, opened: Opened, silent_ns: int) -> SessionConfig | None:
        """The session that was opened earlier, perhaps by another daemon.

        None where no pattern has it now, or it has been silent for too long.
        """
        pattern = self.find(opened.symbol)
        if pattern is None or 0 < pattern.idle_timeout < silent_ns:
            return None
        return self._session(pattern, opened.symbol, name, opened.price_decimals)

    def _is_refused(self, symbol: str, now_ns: int) -> bool:
        """Whether the engine had no room for it a moment ago."""
        since_ns = self._refused.get(symbol)
        if since_ns is not None and now_ns - since_ns >= RETRY_NS:
            del self._refused[symbol]
            return False
        return since_ns is not None

    def _watch(self, symbol: str, pattern: PatternConfig, now_ns: int) -> _Watched:
        seen = self._watched.get(symbol)
        if seen is None or now_ns - seen.since_ns > pattern.least_records_within:
            if seen is None and len(self._watched) >= MAX_WATCHED:
                del self._watched[next(iter(self._watched))]
            seen = self._watched[symbol] = _Watched(now_ns)
        return seen

    def _session(self, pattern: PatternConfig, symbol: str, name: str, learnt: int) -> SessionConfig:
        known = self._instruments.get(symbol)
        given = known.decimals if pattern.price_decimals is None and known else pattern.price_decimals
        decimals = max(learnt, decimals_of(pattern.unit)) if given is None else given
        return pattern.session(name, symbol, decimals, **({} if known is None else known.settings))


def silent_ns(progress: Progress, now_ns: int) -> int:
    """How long a session has been silent, by the time of its newest bar that is answered."""
    return now_ns - max(progress.closed, default=now_ns)


def _name_of(symbol: str, taken: Collection[str]) -> str:
    """The session's name: the symbol, with a checksum where it would be too long, or another session's."""
    name = _NO_NAME.sub("-", symbol).strip("-._") or "session"
    if name in taken or len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 9]}-{zlib.crc32(symbol.encode()):08x}"
    return name
