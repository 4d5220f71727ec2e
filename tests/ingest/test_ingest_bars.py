"""Bars against a plain Python reference: order, equal times, empty intervals, late ticks, any batches."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.bar_kernel import BAR, EMPTY, GAP, NEVER, REPLAYED, SKEWED, Bars
from ingest.bars import BarBuilder, BarPolicy, Feeds, reads_of
from ingest.record import BAR as READY
from ingest.record import HEARTBEAT, QUOTE, RECORD, TRADE, Records, RecordWriter
from ingest.volumes import volume_of
from tests.ingest.building import COUNTED, as_rows, builder_of, built
from tests.ingest.reference_bars import MOST, ReferenceSession, Tick

START = 1_000_000  # a multiple of no interval below
FIELDS = ["ts_open", "o", "h", "l", "c", "v", "n_ticks", "flags"]

ticks = st.builds(
    Tick,
    ts_event=st.integers(START, START + 120),  # few instants: equal times are common
    price=st.integers(1, 50),
    size=st.one_of(st.integers(0, 9), st.just(MOST)),
    skewed=st.sampled_from([False, False, True]),
    gap_before=st.sampled_from([False] * 9 + [True]),
    says_gap=st.booleans(),
    stream=st.sampled_from([1, 1, 1, 2, 3, 4, 5, 6]),
)
policies = st.builds(
    BarPolicy,
    interval_ns=st.sampled_from([1, 7, 10, 60]),
    lateness_ns=st.sampled_from([0, 3, 10, 45]),
    empty=st.sampled_from(["skip", "fill"]),
    max_fill=st.sampled_from([0, 1, 3, 60]),
    actions=st.just(COUNTED),
)


def packed(items: list[tuple[int, Tick]]) -> Records:
    writer = RecordWriter(max(1, len(items)))
    for offset, (session, tick) in enumerate(items):
        received, gap = tick.ts_event - tick.skewed, tick.gap_before and tick.says_gap
        values = (tick.price, tick.size, 0, 0, 0)
        tick.offset = offset
        writer.add(
            TRADE, session, tick.ts_event, received, values, stream=tick.stream, offset=offset, gap=gap
        )
    return writer.records


def rows(bars: Bars, session: int) -> list[tuple[int, ...]]:
    """Of each bar FIELDS, its volume as a whole."""
    own = bars[bars["session"] == session]
    volumes = [volume_of(bar).exact // 10**9 for bar in own]
    at = FIELDS.index("v")
    return [(*row[:at], v, *row[at + 1 :]) for row, v in zip(own[FIELDS].tolist(), volumes, strict=True)]


def build(policy: BarPolicy, items: list[tuple[int, Tick]], cuts: list[int]) -> tuple[Bars, list[int]]:
    """All bars of two sessions, fed in the batches that `cuts` and the gaps make, flushed at the end."""
    builder = builder_of(2, policy)
    records = packed(items)
    gaps = [i for i, (_, tick) in enumerate(items) if tick.gap_before and not tick.says_gap]
    borders = sorted({0, len(items), *gaps, *(cut % (len(items) + 1) for cut in cuts)})
    closed = [np.zeros(0, BAR)]
    for start, end in itertools.pairwise(borders):
        if start in gaps:
            builder.mark_gap([items[start][0]])
        closed.append(builder.update(records[start:end], 0))
    closed.append(builder.flush())
    assert len(builder.flush()) == 0
    return np.concatenate(closed), builder.counts("late")


@given(
    policy=policies,
    items=st.lists(st.tuples(st.integers(0, 1), ticks), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
@settings(max_examples=250)
def test_bars_equal_the_reference_in_any_batches(
    policy: BarPolicy, items: list[tuple[int, Tick]], cuts: list[int]
) -> None:
    bars, late = build(policy, items, cuts)
    for session in (0, 1):
        own = [tick for number, tick in items if number == session]
        reference = ReferenceSession(policy)
        for tick in own:
            reference.tick(tick)
        reference.flush()
        assert rows(bars, session) == reference.closed
        assert reads_of(bars[bars["session"] == session]) == reference.reads
        assert late[session] == reference.late


def feed(builder: BarBuilder, *moments: int, kind: int = TRADE, now: int = 0) -> Bars:
    writer = RecordWriter(len(moments))
    for moment in moments:
        writer.add(kind, 0, moment, moment, (moment, 1, 0, 0, 0))
    return builder.update(writer.records, now)


def test_newest_tick_and_its_wait_are_those_of_the_last_arrival() -> None:
    builder = builder_of(1, BarPolicy(100, lateness_ns=100))
    records = np.zeros(2, RECORD)
    records["kind"] = TRADE
    records["ts_event"], records["ts_recv"], records["ts_ring"] = (150, 120), (1000, 1001), (40, 45)
    records["a"], records["ts_source"] = 5, (900, 901)
    builder.update(records[:1], 50)
    builder.update(records[1:], 60)
    (bar,) = builder.flush()
    assert (bar["ts_last_event"], bar["ts_source"], bar["ts_ring"]) == (150, 901, 45)
    assert bar["ring_wait"] == 15


@pytest.mark.parametrize("kind", [TRADE, READY])
def test_a_replayed_record_makes_a_replayed_bar(kind: int) -> None:
    """Also an empty one behind it; a live one after it does not."""
    builder = builder_of(1, BarPolicy(100, empty="fill"))
    writer = RecordWriter(4)
    for moment, replay in ((10, False), (110, True), (120, False), (310, False)):
        writer.add(kind, 0, moment, moment, (5, 5, 5, 5, 1), x=100, replay=replay)
    bars = [*builder.update(writer.records, 0), *builder.flush()]
    flags = [int(bar["flags"]) & REPLAYED for bar in bars]
    assert flags == ([0, REPLAYED, REPLAYED, 0] if kind == TRADE else [0, REPLAYED, 0, 0])


def test_quotes_make_bars_of_the_mid_without_volume() -> None:
    writer = RecordWriter(3)
    for moment, (bid, ask) in enumerate([(10, 12), (10, 13), (MOST - 2, MOST)]):
        writer.add(QUOTE, 0, moment, moment, (bid, ask, 5, 5, 0))
    builder = builder_of(1, BarPolicy(10))
    builder.update(writer.records, 0)
    (bar,) = builder.flush()
    assert (bar["o"], bar["h"], bar["l"], bar["c"], bar["v"]) == (11, MOST - 1, 11, MOST - 1, 0)


def test_ready_made_bars_pass_through_and_old_ones_are_late() -> None:
    writer = RecordWriter(4)
    for offset, (opened, received) in enumerate([(60, 70), (120, 110), (120, 130), (60, 130)]):
        writer.add(READY, 0, opened, received, (1, 4, 1, 2, 9), x=60, offset=offset)
    builder = builder_of(1, BarPolicy(60, empty="fill", actions=COUNTED))
    builder.mark_gap([0])
    bars = builder.update(writer.records, 0)
    assert rows(bars, 0) == [(60, 1, 4, 1, 2, 9, 1, GAP), (120, 1, 4, 1, 2, 9, 1, SKEWED)]
    assert bars["interval"].tolist() == [60, 60]
    assert (builder.counts("late"), builder.counts("duplicates")) == ([1], [1])
    assert len(builder.flush()) == 0


def test_a_ready_made_bar_of_another_length_is_refused_unless_any_is_taken() -> None:
    lengths = [60, 30, 60, 120]
    writer = RecordWriter(4)
    for number, length in enumerate(lengths, 1):
        writer.add(READY, 0, 60 * number, 60 * number, (1, 4, 1, 2, 9), x=length, offset=number)
    builder = builder_of(1, BarPolicy(60))
    bars = builder.update(writer.records, 0)
    assert bars["ts_open"].tolist() == [60, 180]
    assert [(each.reason, int(each.record["x"])) for each in builder.take_refused()] == [
        ("interval", 30),
        ("interval", 120),
    ]
    assert builder.counts("taken") == [2]
    assert builder_of(1, BarPolicy(60, ready="any")).update(writer.records, 0)["interval"].tolist() == lengths


def test_a_ready_made_bar_that_came_before_with_other_values_is_late() -> None:
    """A revision: never silent, and never in place of the first one, which is on the tape."""
    writer = RecordWriter(4)
    for number, volume in enumerate((9, 9, 8)):
        writer.add(READY, 0, 60, 60, (1, 4, 1, 2, volume), x=60, offset=number)
    writer.add(READY, 0, 120, 120, (1, 4, 1, 2, 7), x=60, offset=4)
    builder = builder_of(1, BarPolicy(60))
    bars = builder.update(writer.records, 0)
    assert (bars["v"].tolist(), bars["late_open"].tolist()) == ([9, 7], [NEVER, 60])
    assert (builder.counts("late"), builder.counts("duplicates"), builder.late_events) == ([1], [1], [60])


@pytest.mark.parametrize(("first", "other"), [(QUOTE, TRADE), (TRADE, QUOTE)])
def test_the_first_record_decides_what_makes_a_sessions_bars(first: int, other: int) -> None:
    builder = builder_of(1, BarPolicy(100))
    feed(builder, 1, kind=first)
    feed(builder, 2, 3, kind=other)
    (bar,) = builder.flush()
    assert (int(bar["n_ticks"]), builder.counts("ignored")) == (1, [2])


def test_idle_sessions_are_closed_by_the_wall_clock_and_their_stragglers_are_late() -> None:
    builder = builder_of(2, BarPolicy(100, idle_close_ns=1000))
    records = packed([(0, Tick(150, 7)), (1, Tick(150, 8))])
    records["ts_ring"] = (1000, 1900)
    builder.update(records, 0)
    assert len(builder.close_idle(1999)) == 0
    closed = builder.close_idle(2000)
    assert rows(closed, 0) == [(100, 7, 7, 7, 7, 1, 1, 0)]
    assert rows(closed, 1) == []
    assert len(builder.close_idle(2000)) == 0
    assert len(feed(builder, 160, 199)) == 0
    assert builder.counts("late") == [2, 0]
    assert feed(builder, 210, 310)["ts_open"].tolist() == [200]


@given(
    policy=policies,
    items=st.lists(st.tuples(ticks, st.booleans()), max_size=40),
)
@settings(max_examples=150)
def test_a_heartbeat_closes_bars_as_a_tick_does_and_adds_nothing(
    policy: BarPolicy, items: list[tuple[Tick, bool]]
) -> None:
    builder, reference = builder_of(1, policy), ReferenceSession(policy)
    records = packed([(0, tick) for tick, _ in items])
    for row, (tick, beats) in zip(records, items, strict=True):
        if beats:
            row["kind"], row["flags"] = HEARTBEAT, 0
            tick.gap_before = False
            reference.heartbeat(tick)
        else:
            tick.gap_before &= tick.says_gap
            reference.tick(tick)
    reference.flush()
    assert rows(built(builder, records), 0) == reference.closed
    assert builder.counts("late") == [reference.late]
    assert builder.counts("ignored") == [0]


def test_more_bars_than_the_output_holds_at_once() -> None:
    builder = builder_of(1, BarPolicy(1))
    assert feed(builder, *range(5, 5005))["ts_open"].tolist() == list(range(5, 5004))


def test_a_long_silence_is_filled_up_to_the_cap_and_costs_no_more() -> None:
    builder = builder_of(1, BarPolicy(1, empty="fill", max_fill=2))
    bars = feed(builder, 10, 10**15)
    assert bars["ts_open"].tolist() == [10, 11, 12]
    assert bars["flags"].tolist() == [0, EMPTY, EMPTY]


def test_records_of_a_symbol_that_no_session_reads_are_skipped() -> None:
    builder = builder_of(1, BarPolicy(10))
    assert len(builder.update(packed([(1, Tick(5, 1)), (0, Tick(5, 2))]), 0)) == 0
    assert builder.flush()["o"].tolist() == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interval_ns": 0}, "interval"),
        ({"interval_ns": 1, "lateness_ns": -1}, "lateness"),
        ({"interval_ns": 1, "max_fill": -1}, "max_fill"),
        ({"interval_ns": 1, "lateness_ns": 10**9}, "4096 intervals"),
    ],
)
def test_senseless_policies_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BarPolicy(**arguments)  # type: ignore[arg-type]  # only integer fields are given


def both_reading(policy: BarPolicy) -> list[Feeds]:
    """Two sessions: the first reads symbols 0 and 1, the second symbol 0 in bars three times as long."""
    return [
        Feeds((0, 1), policy),
        Feeds((0,), BarPolicy(3 * policy.interval_ns, policy.lateness_ns, actions=COUNTED)),
    ]


@given(
    policy=policies.filter(lambda policy: policy.empty == "skip"),
    items=st.lists(st.tuples(st.integers(0, 1), ticks), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=3),
)
@settings(max_examples=200)
def test_several_symbols_make_one_session_and_one_symbol_several(
    policy: BarPolicy, items: list[tuple[int, Tick]], cuts: list[int]
) -> None:
    """Every bar is that of the ticks at or above the common watermark."""
    builder = BarBuilder(both_reading(policy))
    bars = built(builder, packed(items), cuts)
    for session, feeds in enumerate(both_reading(policy)):
        interval, lateness = feeds.policy.interval_ns, feeds.policy.lateness_ns
        expected: dict[tuple[int, int], list[Tick]] = {}
        newest, late = -(10**9), 0
        for symbol, tick in items:
            if symbol not in feeds.symbols:
                continue
            newest = max(newest, tick.ts_event)
            index = tick.ts_event // interval
            if index < (newest - lateness) // interval:
                late += 1
            else:
                expected.setdefault((index * interval, symbol), []).append(tick)
        own = bars[bars["session"] == session]
        found = [(int(b["ts_open"]), int(b["leg"]), int(b["n_ticks"]), int(b["h"])) for b in own]
        assert found == [(*at, len(t), max(x.price for x in t)) for at, t in sorted(expected.items())]
        assert builder.counts("late")[session] == late


@given(items=st.lists(st.tuples(st.integers(0, 1), ticks), max_size=60), at=st.integers(0, 60))
@settings(max_examples=100)
def test_a_session_that_stays_does_not_notice_that_others_come_and_go(
    items: list[tuple[int, Tick]], at: int
) -> None:
    policy = BarPolicy(10, 12)
    records, at = packed(items), min(at, len(items))
    expected = built(BarBuilder([Feeds((1,), policy)]), records)
    changing = BarBuilder([Feeds((0,), BarPolicy(7, 30)), Feeds((1,), policy)])
    first = changing.update(records[:at], 0)
    changing.change([Feeds((1,), policy), Feeds((5, 0), BarPolicy(60))], [1, None])
    second = np.concatenate([changing.update(records[at:], 0), changing.flush()])
    found = np.concatenate([first[first["session"] == 1], second[second["session"] == 0]])
    assert as_rows(found, "session") == as_rows(expected, "session")


def test_a_kept_session_has_the_interval_that_it_had() -> None:
    builder = builder_of(1, BarPolicy(10))
    with pytest.raises(ValueError, match="interval"):
        builder.change([Feeds((0,), BarPolicy(20))], [0])
