"""Which sessions read a symbol, and the numbers that symbols have in the ring."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from daemon.config.schema import SessionConfig


class SymbolRoute(NamedTuple):
    """Where a symbol's records go: its number in the ring, and the names of the sessions that read it.

    ``price_scale``: that of its prices in the ring. ``signed``: they may be zero and below. Its sessions
    agree on both.
    """

    number: int
    sessions: tuple[str, ...]
    price_scale: int = 9
    signed: bool = False


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
