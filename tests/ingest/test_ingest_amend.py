"""Late records and prices far from the last, against plain references."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.backlog import TapeWindow
from ingest.bar_kernel import AMENDS, BAR, CONFIRMED, GAP, JUMP, LATE, Bars
from ingest.bars import BarBuilder, BarPolicy
from ingest.feed_rules import REORDERED
from ingest.late_updates import Amender
from ingest.lines import LineSpec, bar_line
from ingest.record import BAR as READY
from ingest.record import RecordWriter
from tests.ingest.building import as_rows, batches, builder_of, built, characters, trades

START = 1_000_000
WIDE = TapeWindow(tokens=10**9)


def lines_of(bars: Bars) -> list[list[int]]:
    return [characters(bar_line(bar, LineSpec(0, 0))) for bar in bars]


def amended(
    items: list[tuple[int, int]], policy: BarPolicy, cuts: list[int], window: TapeWindow = WIDE
) -> tuple[Bars, BarBuilder, Amender]:
    """What is appended to the tape, of records in batches."""
    builder, amender = builder_of(1, policy), Amender(lines_of, window)
    closed = [builder.update(batch, 0) for batch in batches(trades(items), cuts)]
    made = [amender.encode(bars)[0] for bars in [*closed, builder.flush()]]
    return np.concatenate([np.zeros(0, BAR), *made]), builder, amender


ticks = st.tuples(st.integers(START, START + 60), st.integers(1, 50))


@given(
    items=st.lists(ticks, max_size=60),
    lateness=st.sampled_from([0, 5]),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
@settings(max_examples=200)
def test_the_last_line_of_every_bar_is_that_of_all_its_ticks(
    items: list[tuple[int, int]], lateness: int, cuts: list[int]
) -> None:
    policy = BarPolicy(10, lateness, late="amend")
    rows, builder, amender = amended(items, policy, cuts)
    newest, floor, on_time, lost = 0, 0, set(), 0
    for moment, _ in items:
        newest = max(newest, moment)
        floor = max(floor, (newest - lateness) // 10)
        if moment // 10 >= floor:
            on_time.add(moment // 10)
        elif moment // 10 not in on_time:
            lost += 1
    assert (rows["flags"] & LATE == 0).all()
    final = {int(row["ts_open"]) // 10: row for row in rows}
    assert set(final) == on_time
    for index, row in final.items():
        # a tick before the first one in time had no bar to amend
        first = next(n for n, (m, _) in enumerate(items) if m // 10 == index and _in_time(items, n, lateness))
        own = sorted((m, n, p) for n, (m, p) in enumerate(items) if m // 10 == index and n >= first)
        prices = [price for _, _, price in own]
        expected = (prices[0], max(prices), min(prices), prices[-1], len(prices), len(prices))
        assert tuple(int(row[name]) for name in ("o", "h", "l", "c", "v", "n_ticks")) == expected
    late = sum(builder.counts("late"))
    assert amender.amended == int((rows["flags"] & AMENDS != 0).sum()) == late - lost
    assert (np.diff(rows["ts_last_event"].astype(np.int64)) >= 0).all(), "the tape's times do not go back"
    dropped = built(builder_of(1, BarPolicy(10, lateness)), trades(items))
    names = ["ts_open", "o", "h", "l", "c", "v", "n_ticks", "flags"]
    assert rows[rows["flags"] & AMENDS == 0][names].tolist() == dropped[names].tolist()


def _in_time(items: list[tuple[int, int]], n: int, lateness: int) -> bool:
    newest = max(moment for moment, _ in items[: n + 1])
    return items[n][0] // 10 >= (newest - lateness) // 10


@given(
    items=st.lists(ticks, min_size=1, max_size=60),
    window=st.builds(
        TapeWindow,
        tokens=st.sampled_from([60, 200]),
        records=st.integers(0, 4),
        span_ns=st.sampled_from([0, 25]),
    ),
)
@settings(max_examples=150)
def test_only_bars_that_the_tape_retains_are_amended(
    items: list[tuple[int, int]], window: TapeWindow
) -> None:
    rows, _, _ = amended(items, BarPolicy(10, late="amend"), [], window)
    tape: list[tuple[int, int, int]] = []  # opening of its bar (-1: a correction), tokens, event time
    for row, line in zip(rows, lines_of(rows), strict=True):
        opened, event = int(row["ts_open"]), int(row["ts_last_event"])
        is_correction = bool(row["flags"] & AMENDS)
        if is_correction:
            assert opened in [each for each, _, _ in tape]
        while tape and (
            sum(n for _, n, _ in tape) + len(line) > window.tokens
            or (window.records and len(tape) >= window.records)
            or (window.span_ns and tape[0][2] < event - window.span_ns)
        ):
            tape.pop(0)
        tape.append((-1 if is_correction else opened, len(line), event))


def test_a_correction_is_the_line_as_it_is_now_after_a_word() -> None:
    second = 10**9
    items = [(at * second // 10, price * second) for at, price in ((1, 10), (12, 11), (5, 12), (25, 13))]
    rows, _, _ = amended(items, BarPolicy(second, late="amend"), [])
    assert [bar_line(row, LineSpec(0, 0, says_empty=True)) for row in rows] == [
        "000000,10,10,10,10,0\n",
        "amend,000000,10,12,10,12,0\n",
        "000001,11,11,11,11,0\n",
        "000002,13,13,13,13,0\n",
    ]


def test_a_late_ready_made_bar_replaces_the_first_one() -> None:
    writer = RecordWriter(4)
    for opened, close in ((60, 2), (120, 3), (60, 4), (180, 3)):
        writer.add(READY, 0, opened, opened, (1, 9, 1, close, 5), x=60)
    builder, amender = builder_of(1, BarPolicy(60, late="amend")), Amender(lines_of, WIDE)
    rows, _, _ = amender.encode(builder.update(writer.records, 0))
    assert [(int(r["ts_open"]), int(r["c"]), int(r["flags"])) for r in rows] == [
        (60, 2, 0), (120, 3, 0), (60, 4, AMENDS | REORDERED), (180, 3, 0)
    ]  # fmt: skip


def test_a_dropped_record_hands_its_gap_to_the_next_bar() -> None:
    amender = Amender(lines_of, WIDE)
    rows = np.zeros(2, BAR)
    rows["flags"] = (LATE | GAP, 0)
    rows["n_ticks"] = 1
    made, lines, _ = amender.encode(rows)
    assert (made["flags"].tolist(), len(lines), amender.amended) == ([GAP], 1, 0)


@given(items=st.lists(ticks, max_size=60), cuts=st.lists(st.integers(0, 60), max_size=3))
@settings(max_examples=100)
def test_refused_late_records_are_those_that_are_else_dropped(
    items: list[tuple[int, int]], cuts: list[int]
) -> None:
    records = trades(items)
    refusing, dropping = (builder_of(1, BarPolicy(10, late=how)) for how in ("refuse", "drop"))
    made, expected = built(refusing, records, cuts), built(dropping, records)
    refused = refusing.take_refused()
    assert made["refused_open"].tolist() == expected["late_open"].tolist()
    without = "refused_open", "late_open"
    assert as_rows(made, *without) == as_rows(expected, *without)
    newest, late = 0, []
    for number, (moment, _) in enumerate(items):
        newest = max(newest, moment)
        if moment // 10 < newest // 10:
            late.append(number)
    assert [int(each.record["offset"]) for each in refused] == late
    assert {each.reason for each in refused} <= {"late"}
    assert refusing.counts("late") == dropping.counts("late") == [len(late)]
    assert refusing.take_refused() == []


@given(
    prices=st.lists(st.sampled_from([10, 11, 99, 100, 101, 1000, 1001, 10_000]), max_size=60),
    refuses=st.booleans(),
)
@settings(max_examples=300)
def test_prices_beyond_the_limit_are_flagged_or_refused_until_ten_agree(
    prices: list[int], refuses: bool
) -> None:
    builder = builder_of(1, BarPolicy(1, price_jump=10, refuse_jumps=refuses))
    bars = built(builder, trades((START + n, price) for n, price in enumerate(prices)))
    last, run, jumps, expected, refused = 0, [], 0, [], []
    for number, price in enumerate(prices):
        jumped = last > 0 and (price > 10 * last or last > 10 * price)
        jumps += jumped
        if jumped and refuses:
            run = [*run, price] if run and 10 * run[-1] >= price and 10 * price >= run[-1] else [price]
            if len(run) < CONFIRMED:
                refused.append(number)
                continue
        last, run = price, []
        expected.append((START + number, price, JUMP if jumped else 0))
    assert [(int(b["ts_open"]), int(b["c"]), int(b["flags"])) for b in bars] == expected
    assert builder.counts("jumps") == [jumps]
    found = builder.take_refused()
    assert [int(each.record["offset"]) for each in found] == refused
    assert {each.reason for each in found} <= {"price_jump"}


def test_a_refused_price_does_not_close_bars() -> None:
    """Neither by its time: a wrong record a year ahead, with a wrong price, changes nothing."""
    items = [(START, 10), (START + 10**16, 5000), (START + 1, 11)]
    builder = builder_of(1, BarPolicy(10, price_jump=10, refuse_jumps=True))
    assert len(builder.update(trades(items), 0)) == 0
    (bar,) = builder.flush()
    assert (int(bar["n_ticks"]), int(bar["c"]), builder.counts("late")) == (2, 11, [0])


@pytest.mark.parametrize("factor", [0.5, 1.0, -3.0, float("nan")])
def test_a_senseless_limit_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="price_jump"):
        BarPolicy(10, price_jump=factor)
