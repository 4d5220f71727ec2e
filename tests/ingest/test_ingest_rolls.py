"""Rolls of continuous contracts: the first bar behind one, and what the tape has before it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.backlog import Backlog, TapeWindow
from ingest.bar_kernel import BAR, JUMP, ROLLED
from ingest.bars import BarBuilder, BarPolicy, Feeds, reads_of
from ingest.compact import CompactSpec, Restart
from ingest.feed_rules import BITS, ROLLS
from ingest.lines import LineSpec, bar_line
from ingest.plane import SessionSpec
from ingest.record import BAR as READY
from ingest.record import RecordWriter
from tests.ingest.building import SECOND, TOKENISER, Consumer, batches, built, plane_on, text_of, trades
from tests.ingest.reference_bars import ReferenceSession, Tick
from tests.ingest.test_ingest_bars import START as TICKS_START
from tests.ingest.test_ingest_bars import packed, policies, rows, ticks

PRICE = 10**9
UNIT = 100 * PRICE
ROLL = 10 * SECOND
MINE = (((ROLL, "ESH7"),),)


@given(
    policy=policies,
    items=st.lists(ticks, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    rolls=st.lists(st.integers(TICKS_START, TICKS_START + 130), max_size=3),
)
@settings(max_examples=250, deadline=None)
def test_rolled_bars_are_those_of_the_reference_in_any_batches(
    policy: BarPolicy, items: list[Tick], cuts: list[int], rolls: list[int]
) -> None:
    """Whatever is late, empty or out of order. A bar remembers a record of the bar before it."""
    moments = tuple(roll - roll % policy.interval_ns for roll in rolls)
    for tick in items:
        tick.says_gap = True
    builder = BarBuilder([Feeds((0,), policy, rolls=(moments,))])
    bars = built(builder, packed([(0, tick) for tick in items])[: len(items)], cuts)
    reference = ReferenceSession(policy, moments)
    for tick in items:
        reference.tick(tick)
    reference.flush()
    assert rows(bars, 0) == reference.closed
    assert reads_of(bars) == reference.reads


@given(
    opens=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    rolls=st.lists(st.integers(0, 12), max_size=3),
    cuts=st.lists(st.integers(0, 12), max_size=2),
)
@settings(deadline=None)
def test_a_ready_made_bar_is_rolled_where_the_one_before_it_is_another_contracts(
    opens: list[int], rolls: list[int], cuts: list[int]
) -> None:
    writer = RecordWriter(len(opens))
    for offset, at in enumerate(opens):
        values = (UNIT, UNIT, UNIT, UNIT, 1)
        writer.add(READY, 0, at * SECOND, at * SECOND, values, x=SECOND, stream=1, offset=offset)
    moments = tuple(each * SECOND for each in rolls)
    bars = built(BarBuilder([Feeds((0,), BarPolicy(SECOND), rolls=(moments,))]), writer.records, cuts)
    expected, before, read = [], None, 0
    for offset, at in enumerate(opens):
        if before is None or at > before:
            rolled = before is not None and any(before < roll <= at for roll in rolls)
            expected.append((at * SECOND, rolled, (1, read if rolled else offset, offset)))
            before, read = at, offset
    assert [(b["ts_open"], bool(b["flags"] & ROLLED)) for b in bars] == [each[:2] for each in expected]
    assert [tuple(reads[0]) for reads in reads_of(bars)] == [each[2] for each in expected]


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("factor", [2, 50])
def test_the_price_of_another_contract_is_no_fault(factor: int, refuses: bool) -> None:
    """Nor is that of a record of the old one that comes behind it, nor the next of the new one."""
    before = [(n * SECOND // 10, UNIT + n % 3) for n in range(100)]
    behind = [(ROLL, factor * UNIT), (ROLL - 1, UNIT), (ROLL + 1, factor * UNIT), (ROLL + 2, factor * UNIT)]
    own = BarPolicy(SECOND, lateness_ns=SECOND, price_jump=10.0, refuse_jumps=refuses)
    wrong = {}
    for moments in ((), (ROLL,)):
        builder = BarBuilder([Feeds((0,), own, rolls=(moments,))])
        bars = built(builder, trades(before + behind))
        masks = builder.newest_faults
        found = {name for name, bit in BITS.items() if (masks & bit).any()} - {"reordered"}
        wrong[moments] = found | ({"jump"} if (masks & JUMP).any() or (bars["flags"] & JUMP).any() else set())
    assert wrong[(ROLL,)] == set()
    assert wrong[()] != set()


def test_the_newest_rolls_of_a_symbol_count_and_may_change() -> None:
    moments = tuple(each * SECOND for each in range(1, ROLLS + 6))
    feeds = Feeds((0,), BarPolicy(SECOND), rolls=(moments,))
    builder = BarBuilder([feeds])
    bars = built(builder, trades([(at, UNIT) for at in (0, *moments)]))
    assert [bool(flags & ROLLED) for flags in bars["flags"]] == [False] * 6 + [True] * ROLLS
    builder.change([Feeds((0,), BarPolicy(SECOND), rolls=((200 * SECOND,),))], [0])
    later = built(builder, trades([(at * SECOND, UNIT) for at in (199, 200, 201)]))
    assert [bool(flags & ROLLED) for flags in later["flags"]] == [False, True, False]


def test_empty_bars_end_where_another_contract_begins() -> None:
    """They have the last close, which is the old contract's."""
    policy = BarPolicy(SECOND, empty="fill")
    builder = BarBuilder([Feeds((0,), policy, rolls=((3 * SECOND,),))])
    bars = built(builder, trades([(0, UNIT), (5 * SECOND, 2 * UNIT), (7 * SECOND, 2 * UNIT)]))
    assert (bars["ts_open"] // SECOND).tolist() == [0, 1, 2, 5, 6, 7]
    assert [bool(flags & ROLLED) for flags in bars["flags"]] == [False] * 3 + [True] + [False] * 2


def test_a_roll_among_skipped_bars_is_said_of_the_next_one_of_its_symbol() -> None:
    bars = np.zeros(6, BAR)
    bars["leg"], bars["flags"][1] = [0, 1, 0, 0, 1, 1], ROLLED
    backlog = Backlog(TapeWindow(records=4), skips=True)
    backlog.add(bars)
    assert [bool(flags & ROLLED) for flags in backlog.bars["flags"]] == [False, False, True, False]


def lines_of(
    line: LineSpec | CompactSpec, late: str = "drop", cuts: tuple[int, ...] = (), *, resets: bool = False
) -> list[object]:
    """What a plane makes of two contracts: the text of records, and `Restart`s."""
    consumer = Consumer()
    policy = BarPolicy(SECOND, lateness_ns=0, late=late)  # type: ignore[arg-type]
    spec = SessionSpec(
        "es", Feeds((0,), policy, rolls=((ROLL,),), roll_resets=resets), line, TapeWindow(4096)
    )
    records = trades([(8 * SECOND, UNIT), (9 * SECOND, UNIT + PRICE), (9 * SECOND + 1, UNIT + 2 * PRICE)])
    behind = trades(
        [(11 * SECOND, 3 * UNIT), (9 * SECOND, UNIT), (12 * SECOND, 3 * UNIT), (13 * SECOND, UNIT)]
    )
    with plane_on([spec], consumer) as (plane, ring, _):
        for batch in batches(np.concatenate([records, behind]), cuts):
            ring.push(batch)
            plane.step()
        plane.flush()
    return [each if isinstance(each, Restart) else text_of(each.tokens) for _, each in consumer.seen]


@pytest.mark.parametrize("late", ["drop", "amend"])
@pytest.mark.parametrize("cuts", [(), (3,), (1, 2, 3, 4, 5, 6)])
def test_a_line_or_a_new_window_comes_before_the_first_decimal_line(late: str, cuts: tuple[int, ...]) -> None:
    old = ["000008,100,100,100,100,0\n", "000009,101,102,101,102,0\n"]
    amended = ["amend,000009,101,102,100,102,0\n"] if late == "amend" else []
    new = ["000011,300,300,300,300,0\n", "000012,300,300,300,300,0\n", "000013,100,100,100,100,0\n"]
    said = lines_of(LineSpec(0, 0, rolls=MINE), late, cuts)
    first = "roll,ESH7\n" + new[0]
    assert sorted(said, key=str) == sorted([*old, first, *amended, *new[1:]], key=str)
    assert said.index(old[1]) + 1 == said.index(first) - (said[2] in amended)
    reset = lines_of(LineSpec(0, 0, rolls=MINE), late, cuts, resets=True)
    assert [each for each in reset if each not in amended] == [*old, Restart(None, ()), *new]


@pytest.mark.parametrize("cuts", [(), (3,), (1, 2, 3, 4, 5, 6)])
def test_compact_lines_begin_anew_around_the_new_contract(cuts: tuple[int, ...]) -> None:
    *old, restart, first, second, _ = lines_of(CompactSpec(0), cuts=cuts, resets=True)
    assert isinstance(restart, Restart)
    assert restart.window == ()
    assert restart.anchor is not None
    assert (restart.anchor.reference, first[:12], second[:12]) == (3 * UNIT, "500" * 4, "500" * 4)
    assert len([each for each in old if not isinstance(each, Restart)]) == 2
    without = lines_of(CompactSpec(0), cuts=cuts)
    assert without[-3:] == ["700700700700500\n", "700700700700500\n", "500500500500500\n"]


def test_a_rolled_bar_names_the_contract_that_is_active_then() -> None:
    rolls = (((SECOND, "A"), (3 * SECOND, "B")),)
    bar = np.zeros(1, BAR)
    bar["flags"], bar["interval"], bar["ts_open"] = ROLLED, SECOND, 3 * SECOND
    for at, name in ((1, "A"), (2, "A"), (3, "B"), (9, "B")):
        bar["ts_open"] = at * SECOND
        said = bar_line(bar[0], LineSpec(0, 0, ("X",), rolls=rolls))
        assert said == f"roll,{name}\nX,{at:06d},0,0,0,0,0\n"
        assert TOKENISER.lines(bar, LineSpec(0, 0, ("X",), rolls=rolls)) == [list(map(ord, said))]
    assert "roll" not in bar_line(bar[0], LineSpec(0, 0, ("X",)))
