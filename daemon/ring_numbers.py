"""Prices and sizes of records as integers of the ring (`ingest.record`), exactly or not at all."""

from typing import Any, NamedTuple

from feeds.codec import MalformedRecord
from feeds.decimals import DIGITS, NANO, Fixed, decimals_of, format_fixed, from_units, to_units
from feeds.market_data import Action, AnyRecord, Bar, Book, Event, Quote, Status, Text, Trade
from ingest.events import ACTIONS, STATES
from ingest.record import (
    ACTION,
    ASKS,
    BAR,
    BIDS,
    BOOK,
    QUOTE,
    SIDE_BUY,
    SIDE_SELL,
    SIDE_UNKNOWN,
    STATUS,
    TEXT,
    TRADE,
)
from ingest.words import number_of, on_one_line

_MAX = 2**63 - 1
_SIDES = {"unknown": SIDE_UNKNOWN, "buy": SIDE_BUY, "sell": SIDE_SELL}
_PRICES: dict[type[AnyRecord], tuple[str, ...]] = {
    Trade: ("price",),
    Quote: ("bid", "ask"),
    Bar: ("open", "high", "low", "close"),
}
_SIZES: dict[type[AnyRecord], tuple[str, ...]] = {
    Trade: ("size",),
    Quote: ("bid_size", "ask_size"),
    Bar: ("volume",),
}
_KINDS: dict[type[AnyRecord], int] = {Trade: TRADE, Quote: QUOTE, Bar: BAR}
_TYPES: dict[int, type[AnyRecord]] = {kind: made for made, kind in _KINDS.items()}


class RingValues(NamedTuple):
    """The members of a record in the ring that have its numbers."""

    kind: int
    values: tuple[int, int, int, int, int]
    x: int
    price_finer: int
    size_finer: int


def ring_values(record: AnyRecord, price_scale: int = NANO) -> RingValues:
    """The integers of a record of a symbol with this `price_scale`.

    Raises:
        MalformedRecord: a price is finer than the scale or beyond its 64 bits; or a size has more digits than
            64 bits hold at any scale.
    """
    made = type(record)
    prices = [_price(name, getattr(record, name), price_scale) for name in _PRICES[made]]
    sizes, size_scale = _sizes(_SIZES[made], [getattr(record, name) for name in _SIZES[made]])
    a, b, c, d, e = [*prices, *sizes, 0, 0, 0][:5]
    x = _SIDES[record.side] if isinstance(record, Trade) else getattr(record, "interval_ns", 0)
    return RingValues(_KINDS[made], (a, b, c, d, e), x, price_scale - NANO, size_scale - NANO)


def words_of(event: Event) -> str:
    """The words that an event has, on one line; empty where it has none."""
    match event:
        case Text():
            return on_one_line(event.text)
        case Status():
            return on_one_line(event.reason)
        case Action():
            return event.new_symbol
        case _:
            return ""


def event_values(event: Event, price_scale: int = NANO) -> RingValues:
    """The integers of a record that is in no bar. Raises MalformedRecord as `ring_values` does."""
    words = number_of(words_of(event))
    match event:
        case Text():
            return RingValues(TEXT, (0, 0, 0, words, 0), 0, 0, 0)
        case Status():
            return RingValues(STATUS, (0, 0, 0, words, 0), STATES.index(event.state) + 1, 0, 0)
        case Action():
            amount = event.factor if event.action == "split" else event.amount
            which = ACTIONS.index(event.action) + 1
            return RingValues(ACTION, (_nano(amount), event.effective, 0, words, 0), which, 0, 0)
        case Book():
            return _book_values(event, price_scale)


def _book_values(book: Book, price_scale: int) -> RingValues:
    """The best levels, and the imbalance of all."""
    nothing = Fixed(0), Fixed(0)
    best = [levels[0] if levels else nothing for levels in (book.bids, book.asks)]
    prices = [_price(name, level[0], price_scale) for name, level in zip(("bid", "ask"), best, strict=True)]
    sizes, size_scale = _sizes(("bid_size", "ask_size"), [size for _, size in best])
    bid, ask = (sum(size for _, size in levels) for levels in (book.bids, book.asks))
    imbalance = (bid - ask) * 10**NANO // (bid + ask) if bid + ask else 0
    sides = (BIDS if book.bids else 0) | (ASKS if book.asks else 0)
    values = (prices[0], prices[1], sizes[0], sizes[1], imbalance)
    return RingValues(BOOK, values, sides, price_scale - NANO, size_scale - NANO)


def _nano(value: Fixed | None) -> int:
    """In 1e-9, rounded down."""
    return int(value or 0) // int(10 ** (DIGITS - NANO))


def prices_of(record: AnyRecord) -> list[Fixed]:
    """All prices of a record."""
    return [getattr(record, name) for name in _PRICES[type(record)]]


def values_in_ring(record: Any) -> RingValues:
    """Those of a record in the ring."""
    kind, x, price_finer, size_finer = (int(record[n]) for n in ("kind", "x", "price_finer", "size_finer"))
    a, b, c, d, e = (int(record[name]) for name in "abcde")
    return RingValues(kind, (a, b, c, d, e), x, price_finer, size_finer)


def numbers_of(values: RingValues) -> dict[str, Any]:
    """Prices and sizes as members of the record that has these ``values``."""
    made = _TYPES[values.kind]
    scales = dict.fromkeys(_PRICES[made], NANO + values.price_finer)
    scales |= dict.fromkeys(_SIZES[made], NANO + values.size_finer)
    return {
        name: from_units(units, scale)
        for (name, scale), units in zip(scales.items(), values.values, strict=False)
    }


def price_scale_for(decimals: int, highest: int) -> int:
    """A scale for prices of ``decimals`` decimals, up to ``highest`` in units of 1e-18.

    It is nine where that holds them; else one that leaves as much room for finer as for higher prices. Where
    none holds them, the scale is that of the decimals, and `ring_values` refuses the highest.
    """
    coarsest = next((s for s in range(DIGITS, -1, -1) if highest <= from_units(_MAX, s)), 0)
    if decimals <= NANO <= coarsest:
        return NANO
    return decimals + max(coarsest - decimals, 0) // 2


def _price(name: str, value: int, scale: int) -> int:
    units = to_units(value, scale)
    if units is None or abs(units) > _MAX:
        finest, highest = format_fixed(from_units(1, scale)), format_fixed(from_units(_MAX, scale))
        raise MalformedRecord(
            "price",
            f"{name} {format_fixed(value)} is not a multiple of {finest} up to {highest}: those are what a "
            f"price_scale of {scale} keeps",
        )
    return units


def _sizes(names: tuple[str, ...], values: list[int]) -> tuple[list[int], int]:
    """Sizes in units of one scale, and the scale: nine where it holds them, else the coarsest that does."""
    coarsest = max(map(decimals_of, values))
    for scale in (NANO, coarsest):
        units = [to_units(value, scale) for value in values]
        if all(each is not None and each <= _MAX for each in units):
            return [each for each in units if each is not None], scale
    sizes = " and ".join(f"{name} {format_fixed(value)}" for name, value in zip(names, values, strict=True))
    raise MalformedRecord("size", f"{sizes}: more than 18 digits from the first to the last")
