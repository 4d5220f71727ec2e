"""Faults in records: the compiled rules beside their oracle, and what becomes of records that have them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingest.bar_kernel import BAR as BAR_ROWS
from ingest.bar_kernel import INCOMPLETE, JUMP, SKEWED
from ingest.bars import BarBuilder, BarPolicy, Feeds
from ingest.feed_rules import BITS, actions_code
from ingest.record import BAR, HEARTBEAT, QUOTE, TRADE, Records, RecordWriter
from metrics.feed_faults import RULED, Action
from tests.ingest.building import COUNTED, SECOND, batches
from tests.ingest.reference_rules import Fed, ReferenceRules

KINDS = {"trade": TRADE, "quote": QUOTE, "bar": BAR, "heartbeat": HEARTBEAT}
START = 1_000 * SECOND
LEVEL = 100_000
COUNTING = {kind.name: "count" for kind in RULED}


def packed(records: Sequence[Fed], symbol: int = 0) -> Records:
    writer = RecordWriter(max(1, len(records)))
    for offset, each in enumerate(records):
        values = (*each.values, 0, 0, 0, 0, 0)[:5]
        writer.add(
            KINDS[each.kind], symbol, each.event, each.received, values, x=each.interval, gap=each.gap,
            stream=1, offset=offset, token=hash(each.content) & 0xFFFFFF | 1 if each.identified else 0,
        )  # fmt: skip
    return writer.records


def policy(**actions: Action) -> BarPolicy:
    return BarPolicy(SECOND, late="amend", ready="any", actions=actions_code(COUNTING | actions))


def trade(at_s: float, price: int = LEVEL, size: int = 1, **more: object) -> Fed:
    event = START + int(at_s * SECOND)
    return replace(Fed("trade", event, (price, size), event), **more)


def quote(at_s: float, bid: int = LEVEL, ask: int = LEVEL + 2, sizes: tuple[int, int] = (1, 1)) -> Fed:
    event = START + int(at_s * SECOND)
    return Fed("quote", event, (bid, ask, *sizes), event)


def bar(at_s: float, received_s: float = 0.0, interval_s: int = 1) -> Fed:
    event = START + int(at_s * SECOND)
    received = event + int(received_s * SECOND)
    return Fed("bar", event, (LEVEL, LEVEL + 1, LEVEL - 1, LEVEL, 9), received, interval=interval_s * SECOND)


def calm(n: int = 80) -> list[Fed]:
    """Prices around a level, which bad ticks stand out from; 0.1 s apart, up to second 0."""
    return [trade((k - n) / 10, LEVEL + (k * 7) % 5) for k in range(n)]


def found(records: Sequence[Fed], kind: str, own: BarPolicy | None = None) -> list[int]:
    builder = BarBuilder([Feeds((0,), own or policy())])
    builder.update(packed(records), 0)
    return np.flatnonzero(builder.newest_faults & np.uint32(BITS[kind])).tolist()


@st.composite
def tapes(draw: st.DrawFn) -> list[Fed]:
    """After a calm beginning steps in time and price, most of them small; now and then records come again."""
    kind = draw(st.sampled_from(["trade", "quote", "bar"]))
    made, event, price = list[Fed](), START, LEVEL
    steps = st.tuples(
        st.sampled_from([0, 1, 1, 5, -3]),  # in time
        st.sampled_from([1.0, 1.0, 1.0, 1.001, 0.8, 1.25, 2.0, 0.5, 3.03, 20.5]),
        st.integers(-2, 2),
        st.integers(0, 9),
        st.booleans(),
    )
    calm_steps = [(1, 1.0, n % 3 - 1, 5, False) for n in range(draw(st.sampled_from([0, 63, 70])))]
    for dt, factor, step, number, flag in calm_steps + draw(st.lists(steps, max_size=60)):
        event += dt * SECOND
        if number == 0 and made:
            made.append(replace(made[-draw(st.integers(1, min(9, len(made))))], gap=flag))
            continue
        price = max(3, int(price * factor) + step)
        size = number % 4
        received = event + (number - 4) * SECOND // 4
        values: tuple[int, ...] = (price, size)
        if kind == "quote":
            values = (price, price + step, size, number % 3)
        elif kind == "bar":
            values = (price, price, price, price, size)
        interval = (1 + number % 3) * SECOND if kind == "bar" else 0
        made.append(Fed(kind, event, values, received, flag and number == 9, number > 6, interval))
        if factor not in (1.0, 2.0):
            price = LEVEL  # it comes back
    return made


@given(
    tape=tapes(),
    cuts=st.lists(st.integers(0, 140), max_size=3),
    split=st.integers(0, 80),
    rolls=st.lists(st.integers(0, 80), max_size=2),
)
@settings(max_examples=300, deadline=None)
@example(tape=[*calm(), trade(0.1, 2 * LEVEL), trade(0.2, 2 * LEVEL)], cuts=[], split=0, rolls=[])
def test_faults_are_those_of_the_reference_in_any_batches(
    tape: list[Fed], cuts: list[int], split: int, rolls: list[int]
) -> None:
    splits = ((START + split * SECOND, 0.5),)
    moments = tuple(START + each * SECOND for each in rolls)
    reference = ReferenceRules(policy(), splits, moments)
    expected = [reference.judge(each) for each in tape]
    feeds = Feeds((0,), policy(), splits=(splits,), rolls=(moments,))
    builder, masks = BarBuilder([feeds]), list[int]()
    for batch in batches(packed(tape), cuts):
        builder.update(batch, 0)
        masks += builder.newest_faults.tolist()
    named = [{name for name, bit in BITS.items() if mask & bit} for mask in masks]
    assert named == expected
    totals = [sum(kind.name in each for each in expected) for kind in RULED]
    assert builder.faults.tolist() == totals


def test_every_kind_occurs_in_what_the_reference_is_compared_on() -> None:
    seen = set[str]()

    @given(tape=tapes())
    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    def collect(tape: list[Fed]) -> None:
        reference = ReferenceRules(policy(), ((START + 70 * SECOND, 0.5),))
        for each in tape:
            seen.update(reference.judge(each))

    collect()
    assert seen == {kind.name for kind in RULED} - {"venue_behind"}


FAULTY = {
    "reordered": [trade(5), trade(1.5)],
    "crossed": [quote(1), quote(1.5, LEVEL + 9)],
    "locked": [quote(1), quote(1.5, LEVEL + 2)],
    "one_sided": [quote(1), quote(1.5, sizes=(0, 4))],
    "zero_size": [trade(1), trade(1.5, size=0)],
    "overlapping": [bar(1, interval_s=2), bar(2)],
    "close_stamped": [bar(1, 1.1), bar(2, 0.1)],
    "skewed_clock": [trade(1), trade(1.5, received=START)],
}
"""By kind, records of which only the last one has the fault."""


def of_last(bars: np.ndarray, kind: str) -> np.ndarray:
    """Bars that have, or lack, the record with the fault."""
    opened = START + SECOND if kind not in ("overlapping", "close_stamped") else START + 2 * SECOND
    return bars[bars["ts_open"] == opened]


@pytest.mark.parametrize(
    ("kind", "action"), [(rule.name, each) for rule in RULED if rule.name in FAULTY for each in rule.actions]
)
def test_a_record_with_a_fault_meets_the_action_of_its_kind(kind: str, action: Action) -> None:
    own = replace(policy(**{kind: action}), lateness_ns=10 * SECOND)
    builder = BarBuilder([Feeds((0,), own)])
    first, *_ = FAULTY[kind]
    after = [replace(first, event=first.event + 5 * SECOND, received=first.received + 5 * SECOND)]
    records = packed(FAULTY[kind] + after)
    bars = np.concatenate([builder.update(records, 0), builder.flush()])
    kept = action in ("flag", "count", "hold")
    last = len(records) - 2
    assert np.flatnonzero(builder.newest_faults & BITS[kind]).tolist() == [last]
    assert builder.counts("taken") == [len(records) - (not kept)]
    assert builder.counts("dropped") == [action == "drop"]
    refused = builder.take_refused()
    assert [each.reason for each in refused] == [kind] * (action == "dead_letter")
    assert all(each.record["offset"] == last for each in refused)
    flag = SKEWED if kind == "skewed_clock" else BITS[kind]
    flagged = bool(of_last(bars, kind)["flags"].any() and (of_last(bars, kind)["flags"] & flag).any())
    assert flagged == (action == "flag")
    lacks = (bars["refused_open"].max() > 0) or bool((bars["flags"] & INCOMPLETE).any())
    assert lacks == (not kept)


@pytest.mark.parametrize("kind", [each for each in FAULTY if each != "reordered"])
def test_a_record_that_is_left_out_changes_nothing_for_the_next_ones(kind: str) -> None:
    *first, faulty = FAULTY[kind]
    follows = replace(first[0], event=first[0].event + 3 * SECOND, received=first[0].received + 3 * SECOND)
    own = policy(**{kind: "drop"})
    with_it, without = (BarBuilder([Feeds((0,), own)]) for _ in range(2))
    with_it.update(packed([*first, faulty, follows]), 0)
    without.update(packed([*first, follows]), 0)
    assert with_it.newest_faults[-1] == without.newest_faults[-1] == 0


@pytest.mark.parametrize(("action", "ticks", "high"), [("count", 3, 2 * LEVEL), ("hold", 2, LEVEL)])
def test_a_bad_tick_is_taken_or_held_until_the_price_comes_back(
    action: Action, ticks: int, high: int
) -> None:
    builder = BarBuilder([Feeds((0,), policy(bad_tick=action))])
    builder.update(packed([*calm(), trade(0.1), trade(0.2, 2 * LEVEL)]), 0)
    assert builder.newest_faults.any() == np.False_  # the next record decides
    builder.update(packed([trade(0.3)]), 0)
    assert builder.faults[[kind.name for kind in RULED].index("bad_tick")] == 1
    (last,) = builder.flush()
    assert (int(last["n_ticks"]), int(last["h"])) == (ticks, high)
    held = action == "hold"
    assert builder.counts("dropped") == [held]
    assert bool(last["flags"] & INCOMPLETE) == held


@pytest.mark.parametrize("reverts", [True, False])
def test_a_held_tick_far_away_jumps_only_if_it_is_taken(reverts: bool) -> None:
    """A price jump of its own marks the tick, and not the one after it."""
    own = replace(policy(bad_tick="hold"), price_jump=10.0)
    builder = BarBuilder([Feeds((0,), own)])
    tape = [*calm(), trade(0.1), trade(0.2, 15 * LEVEL), trade(0.3, LEVEL if reverts else 15 * LEVEL)]
    builder.update(packed(tape), 0)
    (last,) = builder.flush()
    assert bool(last["flags"] & JUMP) == (not reverts)
    assert (int(last["n_ticks"]), builder.counts("dropped")) == ((2, [1]) if reverts else (3, [0]))
    assert builder.newest_faults[-1] & JUMP == 0


def test_a_bad_tick_flags_the_bar_that_it_is_in() -> None:
    builder = BarBuilder([Feeds((0,), policy(bad_tick="flag"))])
    builder.update(packed([*calm(), trade(0.1), trade(0.9, 2 * LEVEL)]), 0)
    closed = np.concatenate([builder.update(packed([trade(1.5)]), 0), builder.flush()])
    flagged = closed["ts_open"][closed["flags"] & BITS["bad_tick"] != 0]
    assert flagged.tolist() == [START]


@pytest.mark.parametrize("after", ["stays", "heartbeat", "idle", "flush", "other symbol"])
def test_a_held_tick_is_taken_when_its_price_stays_or_its_bar_has_to_close(after: str) -> None:
    own = replace(policy(bad_tick="hold"), idle_close_ns=SECOND)
    builder = BarBuilder([Feeds((0, 1), own)])
    bars = [builder.update(packed([*calm(), trade(0.2, 2 * LEVEL)]), 0)]
    assert builder.low_watermarks(0) == {1: 0 if len(bars[0]) == 0 else 80}
    match after:
        case "stays":
            bars.append(builder.update(packed([trade(0.4, 2 * LEVEL + 1)]), 0))
        case "heartbeat":
            bars.append(builder.update(packed([Fed("heartbeat", START + 2 * SECOND, ())]), 0))
        case "idle":
            bars.append(builder.close_idle(10 * SECOND))
        case "other symbol":
            bars.append(builder.update(packed([trade(2)], symbol=1), 0))
    bars.append(builder.flush())
    own_bars = np.concatenate(bars)
    (last,) = own_bars[(own_bars["ts_open"] == START) & (own_bars["leg"] == 0)]
    assert (int(last["n_ticks"]), int(last["h"])) == (
        (2, 2 * LEVEL + 1) if after == "stays" else (1, 2 * LEVEL)
    )
    assert builder.counts("dropped") == [0]
    assert builder.low_watermarks(0)[1] > 0


@pytest.mark.parametrize("reverts", [True, False])
def test_a_session_that_is_cut_with_a_held_tick_goes_on_with_it(reverts: bool) -> None:
    feeds = Feeds((0,), policy(bad_tick="hold"))
    builder, restored = BarBuilder([feeds]), BarBuilder([feeds])
    builder.update(packed([*calm(), trade(0.1), trade(0.2, 2 * LEVEL)]), 0)
    restored.restore(0, builder.cut(0), [False], 0)
    follows = packed([trade(0.5, LEVEL if reverts else 2 * LEVEL)])
    names = [name for name in BAR_ROWS.names or () if name in ("ts_open", "o", "h", "l", "c", "v", "n_ticks")]
    rows = []
    for each in (builder, restored):
        each.update(follows, 0)
        rows.append(each.flush()[names].tolist())
    assert rows[0] == rows[1]
    assert rows[0][-1][-1] == (2 if reverts else 3)


@given(
    tape=tapes(),
    actions=st.fixed_dictionaries({k.name: st.sampled_from(k.actions) for k in RULED if k.actions}),
    late=st.sampled_from(["drop", "amend", "refuse"]),
    lateness=st.sampled_from([0, 3 * SECOND]),
)
@settings(max_examples=300, deadline=None)
def test_no_record_is_lost_silently(
    tape: list[Fed], actions: dict[str, Action], late: str, lateness: int
) -> None:
    """Records in = in bars + late + refused + dropped + duplicates."""
    own = BarPolicy(SECOND, lateness, late=late, ready="any", actions=actions_code(actions))  # type: ignore[arg-type]
    builder = BarBuilder([Feeds((0,), own)])
    builder.update(packed(tape), 0)
    refused = [each for each in builder.take_refused() if each.reason != "late"]
    builder.flush()
    names = ("taken", "late", "dropped", "duplicates", "ignored")
    assert sum(builder.counts(name)[0] for name in names) + len(refused) == len(tape)  # type: ignore[arg-type]


@given(
    steps=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=80),
    behind=st.integers(0, 4),
)
@settings(max_examples=200, deadline=None)
def test_a_slower_venue_is_never_late_for_a_faster_one(steps: list[tuple[int, int]], behind: int) -> None:
    """Its clock is behind by no more than `venue_lag`, and each venue's own records come in order."""
    own = BarPolicy(SECOND, venue_lag_ns=8 * SECOND, actions=COUNTED)
    builder, now, writer, newest = (
        BarBuilder([Feeds((0, 1), own, venues=(0, 1))]),
        0,
        RecordWriter(80),
        [0, 0],
    )
    for leg, dt in steps:
        now += min(dt, 3 if now - min(newest) < 4 else 0)
        newest[leg] = now
        event = START + (now - behind * leg) * SECOND
        writer.add(TRADE, leg, event, event, (LEVEL, 1, 0, 0, 0), stream=1, offset=len(writer))
    bars = np.concatenate([builder.update(writer.records, 0), builder.flush()])
    assert builder.counts("late") == [0]
    order = list(zip(bars["ts_open"].tolist(), bars["leg"].tolist(), strict=True))
    assert order == sorted(order)


def test_a_venue_that_is_further_behind_is_not_waited_for_and_named() -> None:
    def built(lag_s: int) -> tuple[BarBuilder, list[int]]:
        own = BarPolicy(SECOND, venue_lag_ns=lag_s * SECOND, actions=COUNTED)
        builder = BarBuilder([Feeds((0, 1), own, venues=(0, 1))])
        closed = [len(builder.update(packed([trade(0.5)], symbol=1), 0))]
        closed += [len(builder.update(packed([trade(at)]), 0)) for at in (0.5, 1.5, 2.5, 6.5)]
        builder.update(packed([trade(1.6)], symbol=1), 0)
        return builder, closed

    builder, closed = built(2)
    assert closed == [0, 0, 0, 0, 4]  # two seconds behind the fast venue
    assert (builder.counts("late"), builder.faults.tolist()[-1]) == ([1], 1)
    builder, closed = built(20)
    assert closed == [0, 0, 0, 0, 0]
    assert (builder.counts("late"), builder.faults.tolist()[-1]) == ([0], 0)


def test_an_announced_split_is_no_price_jump() -> None:
    own = replace(policy(), price_jump=10.0, refuse_jumps=True)
    tape = [*calm(), trade(1, LEVEL // 20), trade(2, LEVEL // 20)]
    splits = ((START + SECOND, 20.0),)
    for announced, refused in (((splits,), 0), ((), 2)):
        builder = BarBuilder([Feeds((0,), own, splits=announced)])
        builder.update(packed(tape), 0)
        assert len(builder.take_refused()) == refused
        assert bool(builder.newest_faults[-2] & BITS["split"]) == bool(announced)
