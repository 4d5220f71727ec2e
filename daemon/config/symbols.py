"""Which sessions read a symbol, its number in the ring, and what else it is called."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import msgspec

from daemon.config.schema import ContinuousConfig, SessionConfig, SymbolsConfig
from feeds.market_data import Received

R = TypeVar("R", bound=Received)
NEVER_NS = 2**63 - 1


class SymbolRoute(NamedTuple):
    """Where a symbol's records go: its number in the ring, and the names of the sessions that read it.

    ``price_scale``: that of its prices in the ring. ``signed``: they may be zero and below. Its sessions
    agree on both.
    """

    number: int
    sessions: tuple[str, ...]
    price_scale: int = 9
    signed: bool = False


class Period(NamedTuple):
    """Records with an event time, ns, from ``start`` on and before ``end`` are of ``symbol``."""

    start: int
    end: int
    symbol: str


class Rolls(msgspec.Struct, frozen=True):
    """Of a continuous contract: event times, ns, and names of the contracts that follow, the oldest first.

    ``resets``: its sessions' windows begin again.
    """

    moments: tuple[tuple[int, str], ...] = ()
    resets: bool = False


class Names:
    """The symbol of a record whose own symbol is another name: its event time alone decides."""

    def __init__(self, symbols: SymbolsConfig) -> None:
        found = defaultdict[str, list[Period]](list)
        for name, period, _ in periods_of(symbols):
            found[name].append(period)
        self.periods: Mapping[str, Sequence[Period]] = {name: sorted(own) for name, own in found.items()}
        """By name, the oldest first. A symbol that sessions read has none."""

    def symbol(self, name: str, ts_event: int) -> str | None:
        """What a record of this name is of; None: of nothing at that time."""
        periods = self.periods.get(name)
        if periods is None:
            return name
        return next((each.symbol for each in periods if each.start <= ts_event < each.end), None)

    def symbols(self, name: str, ts_event: int) -> set[str]:
        """The same; at a time that is not known (0), all that it may be of."""
        if not ts_event and name in self.periods:
            return {each.symbol for each in self.periods[name]}
        found = self.symbol(name, ts_event)
        return set() if found is None else {found}

    def also(self, symbols: Collection[str]) -> list[str]:
        """These symbols, and their other names behind them."""
        others = (name for name, own in self.periods.items() if any(each.symbol in symbols for each in own))
        return [*symbols, *others]

    @property
    def newest(self) -> dict[str, str]:
        """The symbol of each name that it is of last."""
        return {name: own[-1].symbol for name, own in self.periods.items()}

    def renamed(self, record: R) -> R | None:
        """The record with its symbol; None: it is of nothing at that time."""
        if not self.periods or (found := self.symbol(name := record.key, record.ts_event)) == name:
            return record
        if found is None:
            return None
        venue, _, symbol = found.partition(":")
        return msgspec.structs.replace(record, venue=venue, symbol=symbol)


def periods_of(symbols: SymbolsConfig) -> Iterable[tuple[str, Period, str]]:
    """Each period of each name, and the key of the table that has it."""
    for index, alias in enumerate(symbols.alias):
        start = 0 if alias.from_ is None else int(alias.from_)
        end = NEVER_NS if alias.until is None else int(alias.until)
        for at, name in enumerate(alias.names):
            yield name, Period(start, end, alias.symbol), f"symbols.alias[{index}].names[{at}]"
    for index, each in enumerate(symbols.continuous):
        starts = [int(contract.from_) for contract in each.contracts]
        for at, (start, end) in enumerate(pairwise([*starts, NEVER_NS])):
            here = f"symbols.continuous[{index}].contracts[{at}].symbol"
            yield each.contracts[at].symbol, Period(start, end, each.symbol), here


NO_NAMES = Names(SymbolsConfig())


def rolls_of(symbols: SymbolsConfig) -> dict[str, Rolls]:
    """By symbol, of continuous contracts."""
    return {each.symbol: _rolls(each) for each in symbols.continuous}


def _rolls(continuous: ContinuousConfig) -> Rolls:
    following = continuous.contracts[1:]
    moments = tuple((int(each.from_), each.symbol.partition(":")[2]) for each in following)
    return Rolls(moments, continuous.roll == "reset")


def numbered(sessions: Iterable[SessionConfig], before: Mapping[str, int] | None = None) -> dict[str, int]:
    """The numbers of all symbols, VENUE:SYMBOL, in order.

    Those of ``before`` stay: records with them may be on their way.
    """
    numbers = dict(before or {})
    for session in sessions:
        for symbol in session.symbols:
            numbers.setdefault(symbol, len(numbers))
    return numbers


def routes(sessions: Iterable[SessionConfig], numbers: Mapping[str, int]) -> dict[str, SymbolRoute]:
    """The route of each symbol that some session reads."""
    readers: dict[str, list[SessionConfig]] = {}
    for session in sessions:
        for symbol in session.symbols:
            readers.setdefault(symbol, []).append(session)
    return {
        symbol: SymbolRoute(numbers[symbol], tuple(each.name for each in own), own[0].scale, own[0].signed)
        for symbol, own in readers.items()
    }
