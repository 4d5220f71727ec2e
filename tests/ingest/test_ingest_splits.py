"""Windows behind a split: their bars against exact fractions, with and without corrections, and compact."""

from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.backlog import Backlog, TapeWindow
from ingest.bar_kernel import BAR, LATE, NEVER, RESETS, Bars
from ingest.bars import BarPolicy, Feeds
from ingest.compact import CompactSpec, Restart
from ingest.events import events_code
from ingest.late_updates import Amender
from ingest.lines import LineSpec
from ingest.plane import SessionSpec, TapeRecord
from ingest.record import ACTION, SPLIT, TRADE, Records, RecordWriter
from ingest.splits import adjusted, ratio_of
from ingest.volumes import Volume
from metrics.catalogue import EVENTS
from tests.ingest.building import COUNTED, SECOND, Consumer, batches, plane_on, text_of

NANO = 10**9
SPLITS = {
    "4": (4 * NANO, Fraction(4)),
    "0.1": (NANO // 10, Fraction(1, 10)),
    "2/3": (666_666_667, Fraction(2, 3)),
}


def policy(late: str = "drop", on_split: str = "adjust", **more: object) -> BarPolicy:
    return BarPolicy(SECOND, late=late, actions=COUNTED, on_split=on_split, **more)  # type: ignore[arg-type]


def tape(trades: Iterable[tuple[int, int, int, int]], events: Iterable[tuple[int, int, int]] = ()) -> Records:
    """Trades as (leg, time in ms, price, size), and splits as (leg, time in ms, factor, effective in ms)."""
    writer = RecordWriter(256)
    for leg, moment, price, size in trades:
        at = moment * 10**6
        if size:
            writer.add(TRADE, leg, at, at, (price, size, 0, 0, 0), stream=1, offset=len(writer))
        else:  # an announcement, of this factor
            writer.add(ACTION, leg, at, at, (price, 0, 0, 0, 0), x=SPLIT, stream=1, offset=len(writer))
    return writer.records


def seen(spec: SessionSpec, records: Records, cuts: Sequence[int] = ()) -> list[str | Restart]:
    consumer = Consumer()
    with plane_on([spec], consumer) as (plane, ring, _):
        for batch in batches(records, cuts):
            ring.push(batch)
            plane.step()
        plane.flush()
    return [text_of(each.tokens) if isinstance(each, TapeRecord) else each for _, each in consumer.seen]


def number(value: Fraction, decimals: int) -> str:
    scaled = Decimal(round(value * 10**18)).scaleb(-18)
    return f"{scaled.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_EVEN):f}"


def line(second: int, price: Fraction, size: Fraction, symbol: str = "") -> str:
    shown = number(price, 3)
    return f"{symbol}{second:06d},{shown},{shown},{shown},{shown},{number(size, 2)}\n"


@given(
    prices=st.lists(st.integers(900 * NANO, 1100 * NANO), min_size=1, max_size=8),
    sizes=st.lists(st.integers(1, 50 * NANO), min_size=8, max_size=8),
    factor=st.sampled_from(list(SPLITS.values())),
    late=st.sampled_from(["drop", "amend"]),
    cuts=st.lists(st.integers(0, 20), max_size=4),
)
def test_the_window_is_in_the_units_behind_the_split(
    prices: list[int], sizes: list[int], factor: tuple[int, Fraction], late: str, cuts: list[int]
) -> None:
    """Prices are divided by the exact ratio, volumes multiplied; then it goes on behind them."""
    announced, ratio = factor
    before = list(zip(prices, sizes, strict=False))
    behind = round(prices[-1] / ratio)
    n = len(before)
    trades = [(0, at * 1000 + 1, *each) for at, each in enumerate(before)]
    records = tape(
        [*trades, (0, n * 1000, announced, 0), (0, n * 1000 + 1, behind, 7), (0, n * 1000 + 999, behind, 7)]
    )
    spec = SessionSpec("s", Feeds((0,), policy(late)), LineSpec(3, 2), TapeWindow(4096))
    found = seen(spec, records, cuts)
    (restart,) = (each for each in found if isinstance(each, Restart))
    exact = [
        line(
            at,
            Fraction(round(price / ratio), NANO),
            Fraction(round(Fraction(size) * NANO * ratio), NANO * NANO),
        )
        for at, (price, size) in enumerate(before)
    ]
    assert [text_of(tokens) for tokens, _ in restart.window] == exact
    assert restart.opened == tuple(at * SECOND for at in range(n))
    assert found[found.index(restart) + 1 :] == [line(n, Fraction(behind, NANO), Fraction(14, NANO))]


def test_only_the_bars_of_the_symbol_that_is_split_change() -> None:
    line_of = LineSpec(3, 2, ("A", "B"))
    spec = SessionSpec("s", Feeds((0, 1), policy()), line_of, TapeWindow(4096))
    trades = [(leg, at * 1000, 100 * NANO, NANO) for at in range(3) for leg in (0, 1)]
    records = tape(
        [*trades, (1, 2500, 4 * NANO, 0), (0, 3000, 100 * NANO, NANO), (1, 3001, 25 * NANO, 4 * NANO)]
    )
    found = seen(spec, records)
    (restart,) = (each for each in found if isinstance(each, Restart))
    old, new = (Fraction(100), Fraction(1)), (Fraction(25), Fraction(4))
    expected = [each for at in range(3) for each in (line(at, *old, "A,"), line(at, *new, "B,"))]
    assert [text_of(tokens) for tokens, _ in restart.window] == [*expected, line(3, *old, "A,")]
    assert found[-1] == line(3, *new, "B,")


def test_an_announced_split_works_when_a_price_shows_it() -> None:
    """Not before it takes effect, nor where prices do not change by its factor."""
    spec = SessionSpec("s", Feeds((0,), policy()), LineSpec(3, 2), TapeWindow(4096))
    effective = RecordWriter(8)
    effective.add(ACTION, 0, 10**9, 10**9, (4 * NANO, 4 * SECOND, 0, 0, 0), x=SPLIT, stream=2, offset=1)
    trades = tape([(0, at * 1000, 100 * NANO, NANO) for at in (0, 1, 2, 3)])
    behind = tape([(0, 4000, 25 * NANO, NANO), (0, 5000, 25 * NANO, NANO)])
    found = seen(spec, np.concatenate([trades[:2], effective.records, trades[2:], behind]))
    at = next(n for n, each in enumerate(found) if isinstance(each, Restart))
    assert found[at + 1 :] == [line(4 + n, Fraction(25), Fraction(1)) for n in range(2)]
    unchanged = tape([(0, 4000, 101 * NANO, NANO), (0, 5000, 101 * NANO, NANO)])
    found = seen(spec, np.concatenate([trades[:2], effective.records, trades[2:], unchanged]))
    assert not any(isinstance(each, Restart) for each in found)


def test_a_split_of_the_configuration_works_too() -> None:
    feeds = Feeds((0,), policy(), splits=(((3 * SECOND, 4.0),),))
    trades = [(0, at * 1000, (100 if at < 3 else 25) * NANO, NANO) for at in range(5)]
    found = seen(SessionSpec("s", feeds, LineSpec(3, 2), TapeWindow(4096)), tape(trades))
    (restart,) = (each for each in found if isinstance(each, Restart))
    assert [text_of(tokens) for tokens, _ in restart.window] == [
        line(n, Fraction(25), Fraction(4)) for n in range(3)
    ]


def test_a_late_record_amends_a_bar_in_the_units_behind() -> None:
    """It is in the units of before, as its time says."""
    spec = SessionSpec("s", Feeds((0,), policy("amend")), LineSpec(3, 2), TapeWindow(4096))
    trades = [
        (0, 0, 100 * NANO, NANO),
        (0, 1000, 100 * NANO, NANO),
        (0, 1500, 4 * NANO, 0),
        (0, 2000, 25 * NANO, NANO),
    ]
    found = seen(
        spec,
        tape([*trades, (0, 3000, 25 * NANO, NANO), (0, 500, 110 * NANO, NANO), (0, 4000, 25 * NANO, NANO)]),
    )
    (amended,) = (each for each in found if isinstance(each, str) and each.startswith("amend"))
    assert amended == "amend,000000,25.000,27.500,25.000,27.500,8.00\n"


def test_compact_lines_go_on_around_an_anchor_of_the_new_level() -> None:
    own = policy(events=events_code(dict.fromkeys(EVENTS, "flag")))
    spec = SessionSpec("s", Feeds((0,), own), CompactSpec(2), TapeWindow(4096))
    prices = [100, 101, 102, 103]
    trades = [(0, at * 1000, price * NANO, NANO) for at, price in enumerate(prices)]
    found = seen(
        spec, tape([*trades, (0, 3500, 4 * NANO, 0), (0, 4000, 26 * NANO, NANO), (0, 5000, 26 * NANO, NANO)])
    )
    restart = next(each for each in found if isinstance(each, Restart) and len(each.window) == len(prices))
    assert restart.anchor is not None
    closes = [restart.anchor.price(int(text_of(tokens)[9:12])) for tokens, _ in restart.window]
    unit = restart.anchor.unit
    exact = [price * NANO // 4 for price in prices]
    assert [abs(close - price) <= unit // 2 for close, price in zip(closes, exact, strict=True)] == [True] * 4
    volumes = {text_of(tokens)[12:15] for tokens, _ in restart.window}
    (newest,) = {each[12:15] for each in found[-2:] if isinstance(each, str)}
    assert {int(each) - int(newest) for each in volumes} == {round(200 * np.log10(4))}


def test_prices_that_do_not_fit_empty_the_window() -> None:
    spec = SessionSpec("s", Feeds((0,), policy()), LineSpec(3, 2), TapeWindow(4096))
    large = 8 * 10**18
    trades = [(0, 0, large, NANO), (0, 1000, large // 10**6, NANO), (0, 1500, NANO // 10**6, 0)]
    found = seen(spec, tape([*trades, (0, 2000, large, NANO), (0, 3000, large, NANO)]))
    (restart,) = (each for each in found if isinstance(each, Restart))
    assert restart == Restart(None, ())


@pytest.mark.parametrize("split", SPLITS)
def test_a_factor_of_nine_decimals_is_the_ratio_that_it_stands_for(split: str) -> None:
    announced, ratio = SPLITS[split]
    assert ratio_of(announced / NANO) == ratio


@pytest.mark.parametrize("units", [10**7, 1_500_000, 10**9])
def test_many_old_units_are_one_new_one(units: int) -> None:
    """A redenomination: the factor is small, and the number of old units is what is exact."""
    ratio = ratio_of(1 / units)
    assert ratio == Fraction(1, units)
    assert adjusted([7], Volume.of(units), ratio) == ([7 * units], Volume.of(1))


def test_a_window_that_begins_with_a_dropped_record_begins_with_the_next_bar() -> None:
    """Also behind a snapshot."""

    def numbers(bars: Bars) -> list[list[int]]:
        return [[int(each)] for each in bars["ts_open"] // SECOND]

    rows = np.zeros(4, BAR)
    rows["ts_open"] = rows["ts_last_event"] = np.array([1, 2, 1, 3]) * SECOND
    rows["interval"], rows["n_ticks"], rows["late_open"] = SECOND, 1, NEVER
    rows["flags"][2] = LATE | RESETS
    for stored in (False, True):
        amender = Amender(numbers, TapeWindow(4096))
        amender.encode(rows[:2])
        made, _, restarts = amender.encode(rows[2:3])
        assert (len(made), restarts) == (0, {})
        if stored:
            cut = amender.cut()
            amender = Amender(
                lambda bars: [[int(each)] for each in bars["ts_open"] // SECOND], TapeWindow(4096)
            )
            amender.restore(cut)
        made, lines, restarts = amender.encode(rows[3:])
        assert (len(made), lines, restarts) == (1, [[3]], {0: Restart(None, ())})


def test_a_price_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(OverflowError):
        adjusted([10**18], Volume.of(0), Fraction(1, 100))


@pytest.mark.parametrize("split", [0.0, 4.0])
def test_a_window_that_begins_again_among_skipped_bars_is_empty(split: float) -> None:
    bars = np.zeros(8, BAR)
    bars["flags"][2], bars["split"][2] = RESETS, split
    bars["flags"][4] = LATE
    backlog = Backlog(TapeWindow(records=4), skips=True)
    backlog.add(bars)
    assert [bool(flags & RESETS) for flags in backlog.bars["flags"]] == [False, True, False, False]
    assert not backlog.bars["split"].any()
