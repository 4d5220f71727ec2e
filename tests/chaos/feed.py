"""A feed that is the same in every run: three symbols, one bar a second of event time."""

from collections.abc import Mapping
from random import Random

from tests.kit import SECOND, START, trade

SYMBOLS = {"aaa": "V:AAA", "bbb": "V:BBB", "ccc": "V:CCC"}
"""VENUE:SYMBOL by session."""
TRADES = 3
"""Trades of a symbol in each bar."""


def bar(n: int, symbols: Mapping[str, str] = SYMBOLS) -> list[tuple[str, bytes]]:
    """Records of all symbols in second ``n``, as (key, payload)."""
    return [
        (symbol, trade(symbol, START + n * SECOND + i * 1000, _price(symbol, n, i), str(1 + (n + i) % 5)))
        for i in range(TRADES)
        for symbol in symbols.values()
    ]


def as_of(n: int) -> int:
    """Event time (ns) of the newest record of bar ``n``."""
    return START + n * SECOND + (TRADES - 1) * 1000


def _price(symbol: str, n: int, i: int) -> str:
    draw = Random(f"{symbol}:{n}:{i}")
    return f"{100 + n % 17 + draw.random():.2f}"
