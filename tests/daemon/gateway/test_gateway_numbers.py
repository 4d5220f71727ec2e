"""Numbers from their text to the tape's text, against Python's decimal module: exact, or refused by name."""

import asyncio
import json
from collections.abc import Sequence
from decimal import ROUND_FLOOR, Context, Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from daemon.config.symbols import SymbolRoute
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.dead_letters import refused
from daemon.gateway.record_decoder import RecordDecoder
from daemon.protocol import RecordRefused
from daemon.ring_numbers import numbers_of, price_scale_for, prices_of, ring_values, values_in_ring
from feeds.codec import MalformedRecord, decode_message, decode_record
from feeds.decimals import LIMIT, Fixed, decimals_of
from feeds.market_data import Bar, DeadLetter, InputRange, Quote, Trade
from feeds.payloads.payload_decoder import WireDecoder
from feeds.source import Incoming
from ingest.bars import BarBuilder, BarPolicy, Feeds
from ingest.lines import LineSpec, bar_line
from ingest.record import RECORD, Records
from ingest.ring import Ring
from metrics.store import MetricStore
from tests.kit import SECOND, START, TOPIC, QueueSource

EXACT = Context(prec=100)
INTERVAL = 10 * SECOND
MAX_INT64 = 2**63 - 1


def scaled(digits: int, scale: int) -> Decimal:
    return EXACT.scaleb(EXACT.create_decimal(digits), -scale)


def prices_with(scale: int) -> st.SearchStrategy[Decimal]:
    """Prices of one symbol, up to 1e15, of at most 18 digits."""
    highest = min(10**18, 10 ** (15 + scale))
    edges = st.sampled_from([1, 2, 9, 10, highest - 1, highest])
    return (edges | st.integers(1, highest)).map(lambda units: scaled(units, scale))


def any_prices(scale: int) -> st.SearchStrategy[Decimal]:
    """Also zero and below."""
    above = prices_with(scale)
    return st.just(Decimal(0)) | above | above.map(lambda price: -price)


sizes = st.builds(
    scaled, st.sampled_from([0, 1, 9, 10**9, 10**18 - 1]) | st.integers(0, 10**18), st.integers(-12, 18)
).filter(lambda size: size <= 10**15)
scales = st.just(9) | st.integers(0, 18)  # columns are decoded at nine
notations = st.sampled_from(["text", "number", "exponent", "exponent text", "point", "sign"])


def written(value: Decimal, notation: str) -> str:
    """``value`` in JSON: text, or a number as it stands."""
    plain, short = f"{value:f}", f"{value.normalize(EXACT):e}"
    if plain.startswith("0.") and notation == "point":
        return f'"{plain[1:]}"'
    signed = f'"{"" if value < 0 else "+"}{plain}"'
    return {"number": plain, "exponent": short, "exponent text": f'"{short}"', "sign": signed}.get(
        notation, f'"{plain}"'
    )


def payload(at: int, kind: str, numbers: dict[str, str], **more: object) -> bytes:
    common = {"type": kind, "venue": "V", "symbol": "S", "ts_event": at, "ts_recv": at, **more}
    return (
        json.dumps(common)[:-1] + "".join(f', "{name}": {text}' for name, text in numbers.items()) + "}"
    ).encode()


def through_the_gateway(
    payloads: Sequence[bytes], scale: int, borders: Sequence[int], *, signed: bool = False
) -> tuple[Records, list[DeadLetter]]:
    """The ring's records of messages in batches that end at ``borders``, and the DLQ."""
    ring, dead_letters, source = Ring.create(1024), list[DeadLetter](), QueueSource()
    store = MetricStore.local({"session": ["s"], "source": ["test"], "sink": []})
    routes = {"V:S": SymbolRoute(0, ("s",), scale, signed)}
    ingest = RecordDecoder(
        source,
        ring,
        routes,
        OffsetTracker(),
        store,
        dead_letters.append,
        payloads=WireDecoder(1 << 20),
        max_ahead_ns=SECOND,
    )
    made = [Incoming(TOPIC, 0, n, None, each, {}, START + 10**6 * SECOND) for n, each in enumerate(payloads)]
    cuts = sorted({0, len(made), *(border % (len(made) + 1) for border in borders)})
    source.put(*(made[a:b] for a, b in pairwise(cuts)))
    source.end()
    try:
        asyncio.run(ingest.run())
        out = np.zeros(1024, RECORD)
        records = out[: ring.pop(out)].copy()
    finally:
        ring.unlink()
        ring.close()
    records["ts_ring"] = 0
    return records, dead_letters


def lines_of(records: Records, scale: int, borders: Sequence[int] = ()) -> list[list[str]]:
    """Open, high, low, close and volume of each bar, as decimal lines print them, with all decimals."""
    builder = BarBuilder([Feeds((0,), BarPolicy(INTERVAL), price_scale=scale)])
    cuts = sorted({0, len(records), *(border % (len(records) + 1) for border in borders)})
    bars = [builder.update(records[a:b], 0) for a, b in pairwise(cuts)]
    spec = LineSpec(scale, 18, price_scale=scale)
    made = np.concatenate([*bars, builder.flush()])
    return [bar_line(bar, spec).strip().split(",")[1:] for bar in made]


def shown(bar: Sequence[Decimal], scale: int) -> list[str]:
    return [*(f"{EXACT.quantize(x, scaled(1, scale)):f}" for x in bar[:4]), f"{bar[4]:.18f}"]


@settings(max_examples=150)
@given(st.data(), scales, st.lists(st.integers(0, 200), max_size=3))
def test_trades_make_exact_bars_whatever_their_scale_notation_and_batches(
    data: st.DataObject, scale: int, borders: list[int]
) -> None:
    how = data.draw(st.sampled_from([notations, st.just("number"), st.just("text")]))
    signed = data.draw(st.booleans())
    trade = st.tuples((any_prices if signed else prices_with)(scale), sizes, how, how, st.integers(0, 4))
    trades = data.draw(st.lists(trade, min_size=1, max_size=10)) * data.draw(st.sampled_from([1, 20]))
    payloads, expected, at = [], dict[int, list[Decimal]](), START
    for price, size, how, of_size, later in trades:
        at += later * SECOND
        payloads.append(payload(at, "trade", {"price": written(price, how), "size": written(size, of_size)}))
        bar = expected.setdefault(at // INTERVAL, [price, price, price, price, Decimal(0)])
        bar[1:] = max(bar[1], price), min(bar[2], price), price, EXACT.add(bar[4], size)
    records, dead_letters = through_the_gateway(payloads, scale, borders, signed=signed)
    assert dead_letters == []
    assert lines_of(records, scale, borders) == [shown(bar, scale) for bar in expected.values()]
    one_by_one, _ = through_the_gateway(payloads, scale, range(len(payloads)), signed=signed)
    for name in set(RECORD.names or ()) - {"offset"}:
        assert (one_by_one[name] == records[name]).all(), f"{name} differs between columns and codec"


@settings(max_examples=100)
@given(st.data(), st.integers(0, 18))
def test_ready_made_bars_keep_their_numbers(data: st.DataObject, scale: int) -> None:
    drawn = data.draw(
        st.lists(st.tuples(any_prices(scale), any_prices(scale), sizes), min_size=1, max_size=20)
    )
    payloads, expected = [], []
    for n, (a, b, volume) in enumerate(drawn):
        bar = (a, max(a, b), min(a, b), b, volume)
        names = ("open", "high", "low", "close", "volume")
        numbers = {name: written(value, "number") for name, value in zip(names, bar, strict=True)}
        payloads.append(payload(START + n * INTERVAL, "bar", numbers, interval_ns=INTERVAL))
        expected.append(shown(bar, scale))
    records, dead_letters = through_the_gateway(payloads, scale, [], signed=True)
    assert dead_letters == []
    assert lines_of(records, scale) == expected


@settings(max_examples=100)
@given(st.data(), st.integers(0, 18))
def test_the_mid_of_quotes_is_exact_to_a_unit(data: st.DataObject, scale: int) -> None:
    pairs = data.draw(st.lists(st.tuples(any_prices(scale), any_prices(scale)), min_size=1, max_size=20))
    payloads, expected = [], []
    for n, (bid, ask) in enumerate(pairs):
        numbers = {"bid": written(bid, "text"), "ask": written(ask, "text"), "ask_size": "1e15"}
        payloads.append(payload(START + n * INTERVAL, "quote", numbers))
        middle = EXACT.divide(EXACT.add(bid, ask), Decimal(2))
        mid = middle.quantize(scaled(1, scale), ROUND_FLOOR, EXACT)
        expected.append(shown((mid, mid, mid, mid, Decimal(0)), scale))
    records, dead_letters = through_the_gateway(payloads, scale, [], signed=True)
    assert dead_letters == []
    assert lines_of(records, scale) == expected


def test_prices_of_zero_and_below_are_those_of_sessions_that_say_so() -> None:
    sent = [payload(START, "trade", {"price": price, "size": "1"}) for price in ("-37.63", "0", "1.5")]
    records, dead_letters = through_the_gateway(sent, 9, [], signed=True)
    assert dead_letters == []
    assert records["a"].tolist() == [-37_630_000_000, 0, 1_500_000_000]
    records, dead_letters = through_the_gateway(sent, 9, [])
    assert records["a"][records["kind"] == 1].tolist() == [1_500_000_000]
    assert [each.reason for each in dead_letters] == ["price", "price"]
    assert "must be above 0, got -37.63" in dead_letters[0].error


def test_a_volume_beyond_64_bits_is_the_sum() -> None:
    sent = [payload(START + n, "trade", {"price": "0.00000842", "size": "4000000000"}) for n in range(3)]
    records, _ = through_the_gateway(sent, 9, [])
    assert lines_of(records, 9)[0][4] == f"12000000000.{'0' * 18}"


@settings(max_examples=300)
@given(st.integers(1, LIMIT).map(Fixed), st.integers(0, LIMIT).map(Fixed), st.integers(0, 18))
@example(Fixed(1), Fixed(0), 17)
@example(Fixed(MAX_INT64), Fixed(MAX_INT64), 18)
@example(Fixed(MAX_INT64 + 1), Fixed(MAX_INT64 + 1), 18)
@example(Fixed(LIMIT), Fixed(LIMIT), 4)
@example(Fixed(LIMIT), Fixed(LIMIT - 1), 3)
def test_a_number_crosses_exactly_or_is_refused_by_name(price: Fixed, size: Fixed, scale: int) -> None:
    made = Trade(venue="V", symbol="S", ts_event=START, ts_recv=START, price=price, size=size)
    unit = 10 ** (18 - scale)
    price_fits = price % unit == 0 and price // unit <= MAX_INT64
    size_fits = any(size % 10**k == 0 and size // 10**k <= MAX_INT64 for k in range(19))
    if price_fits and size_fits:
        values = ring_values(made, scale)
        assert numbers_of(values) == {"price": price, "size": size}
        assert values.price_finer == scale - 9
        assert values.size_finer == 0 or size % 10**9 or size // 10**9 > MAX_INT64
    else:
        with pytest.raises(MalformedRecord) as caught:
            ring_values(made, scale)
        assert caught.value.reason == ("size" if price_fits else "price")
        assert ("price_scale" in caught.value.message) is not price_fits
        assert len(caught.value.message) < 200


def test_what_the_scale_does_not_keep_is_a_dead_letter_and_harms_no_neighbour() -> None:
    finer = payload(START, "trade", {"price": "0.0000000001", "size": "1"})
    plain = payload(START + 1, "trade", {"price": "0.000000001", "size": "1"})
    records, dead_letters = through_the_gateway([finer, plain, finer], 9, [])
    assert records["a"][records["kind"] == 1].tolist() == [1]
    assert [
        (dead_letter.reason, "price_scale of 9" in dead_letter.error) for dead_letter in dead_letters
    ] == [("price", True)] * 2


@given(st.lists(st.integers(1, LIMIT), min_size=1, max_size=4))
def test_a_scale_for_a_file_keeps_its_prices(values: list[int]) -> None:
    """Where any scale does; prices of up to nine decimals have the usual one."""
    decimals, highest = max(map(decimals_of, values)), max(values)
    scale = price_scale_for(decimals, highest)
    assert decimals <= scale <= 18
    if highest // 10 ** (18 - decimals) <= MAX_INT64:
        for value in values:
            made = Trade(venue="V", symbol="S", ts_event=1, ts_recv=1, price=Fixed(value), size=Fixed(0))
            assert numbers_of(ring_values(made, scale))["price"] == value
    if decimals <= 9 and highest // 10**9 <= MAX_INT64:
        assert scale == 9


def test_all_prices_of_a_record_count() -> None:
    numbers: dict[str, Any] = {"open": Fixed(1), "high": Fixed(2), "low": Fixed(3), "close": Fixed(4)}
    common: dict[str, Any] = {"venue": "V", "symbol": "S", "ts_event": START, "ts_recv": START}
    assert prices_of(Bar(**common, **numbers, volume=Fixed(9), interval_ns=1)) == [1, 2, 3, 4]
    assert prices_of(Quote(**common, bid=Fixed(5), ask=Fixed(6))) == [5, 6]


@given(st.data(), st.integers(0, 18))
def test_a_refused_record_that_is_rebuilt_has_its_numbers(data: st.DataObject, scale: int) -> None:
    price, size = data.draw(prices_with(scale)), data.draw(sizes)
    sent = payload(START, "trade", {"price": written(price, "number"), "size": written(size, "number")})
    (record,), _ = through_the_gateway([sent], scale, [])
    moment = int(record["ts_event"])
    event = RecordRefused("s", 0, "late", 0, 0, 0, 0, moment, moment, values_in_ring(record))
    dead_letter = refused(event, "V:S", InputRange(TOPIC, 0, 0, 0), None)
    rebuilt = decode_message(dead_letter.payload)
    before = decode_record(sent)
    assert isinstance(rebuilt, Trade)
    assert isinstance(before, Trade)
    assert (rebuilt.price, rebuilt.size) == (before.price, before.size)
