"""Synthetic trades already encoded, so that making them costs nothing while something is measured."""

from __future__ import annotations

from collections.abc import Iterator

from feeds.codec import encode
from feeds.messages import Trade
from feeds.synthetic import Instrument, SyntheticTape

TICK = 10_000_000
LOT = 1_000_000
START_S = 1_723_075_200


def instruments(n: int, trades_per_second: int) -> list[Instrument]:
    """``n`` made-up markets."""
    return [
        Instrument("BENCH", f"S{i:02d}", 200_000 + 1_000 * i, TICK, LOT, trades_per_second) for i in range(n)
    ]


def trades(markets: list[Instrument], total: int, seed: int = 7) -> Iterator[Trade]:
    """About ``total`` trades, whole seconds of all markets, second by second."""
    tapes = [SyntheticTape(market, seed) for market in markets]
    a_second = sum(market.trades_per_second for market in markets)
    for second in range(-(-total // a_second)):
        for tape in tapes:
            yield from tape.second((START_S + second) * 1_000_000_000)


def payloads(markets: list[Instrument], total: int, seed: int = 7) -> list[tuple[str, bytes]]:
    """(key, JSON) of `trades`."""
    return [(trade.key, encode(trade)) for trade in trades(markets, total, seed)]
