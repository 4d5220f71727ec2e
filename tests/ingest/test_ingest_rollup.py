"""Longer bars against a plain Python reference: a partition of the bars, and the lines that say so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.lines import LineSpec
from ingest.rollup import Rollup, RollupTier, SummedBar, introduction, newest_within, rollup_line
from ingest.volumes import HIGH, Volume

MINUTE = 60 * 10**9
MOST = 2**63 - 1

bars = st.builds(
    SummedBar,
    ts_open=st.integers(1, 40),  # minutes since the one before
    open=st.integers(-5, MOST),
    high=st.integers(-5, MOST),
    low=st.integers(-5, MOST),
    close=st.integers(-5, MOST),
    volume=st.sampled_from([0, 1, 7, MOST]),
    bars=st.just(1),
    gap=st.sampled_from([False] * 9 + [True]),
    leg=st.integers(0, 1),
    volume_high=st.sampled_from([0, 0, 9, 10**13]),
    volume_low=st.sampled_from([0, 0, 10**9 - 1]),
).map(lambda bar: bar if bar.volume_high == 0 else bar._replace(volume=bar.volume % HIGH))
tiers = st.lists(
    st.builds(RollupTier, st.sampled_from([MINUTE, 15 * MINUTE, 60 * MINUTE]), st.integers(1, 5)),
    min_size=1,
    max_size=3,
).map(lambda found: sorted(found))


def as_one(own: list[SummedBar]) -> SummedBar:
    if len(own) == 1:
        return own[0]
    high, nano, low = Volume.of(sum(bar.exact_volume for bar in own))
    return own[0]._replace(
        high=max(bar.high for bar in own),
        low=min(bar.low for bar in own),
        close=own[-1].close,
        volume=nano,
        bars=len(own),
        gap=any(bar.gap for bar in own),
        volume_high=high,
        volume_low=low,
    )


def reference(own: list[SummedBar], levels: list[RollupTier]) -> list[SummedBar]:
    """Of one symbol: the newest bars of each tier are whole intervals of what the finer tiers passed on."""
    found: list[SummedBar] = []
    for tier in levels:
        by_interval: dict[int, list[SummedBar]] = {}
        for bar in own:
            by_interval.setdefault(bar.ts_open // tier.interval_ns, []).append(bar)
        groups = list(by_interval.values())
        cut = max(0, len(groups) - tier.bars)
        found = [as_one(group) for group in groups[cut:]] + found
        own = [bar for group in groups[:cut] for bar in group]
    return found


@given(st.lists(bars, max_size=80), tiers)
def test_every_bar_is_in_exactly_one_longer_bar_of_its_symbol(
    drawn: list[SummedBar], levels: list[RollupTier]
) -> None:
    rollup, now, fed = Rollup(levels), 0, []
    for bar in drawn:
        now += bar.ts_open * MINUTE
        fed.append(bar._replace(ts_open=now))
        rollup.add(fed[-1])
    expected = [bar for leg in (0, 1) for bar in reference([b for b in fed if b.leg == leg], levels)]
    assert rollup.bars == sorted(expected, key=lambda bar: (bar.ts_open, bar.leg))
    for leg in (0, 1):  # nothing is missing between the oldest that is kept and the newest
        own = [bar for bar in fed if bar.leg == leg]
        kept = [bar for bar in rollup.bars if bar.leg == leg]
        assert sum(bar.bars for bar in kept) == len(
            [b for b in own if not kept or b.ts_open >= kept[0].ts_open]
        )


def test_the_lines_say_when_how_many_and_what_is_missing() -> None:
    bar = SummedBar(1_723_161_600 * 10**9, 10**11, 102 * 10**9, 98_500_000_000, 10**11, 1_234_500_000, 60)
    assert rollup_line(bar, LineSpec(), MINUTE) == (
        "2024-08-09,0000,100.00,102.00,98.50,100.00,1.234,60\n"  # half to even, as in the window
    )
    lost = bar._replace(gap=True, leg=1, ts_open=bar.ts_open - 10**9)
    spec = LineSpec(1, 0, ("ES", "NQ"))
    assert rollup_line(lost, spec, 10**9) == "NQ,2024-08-08,235959,100.0,102.0,98.5,100.0,1,60,gap\n"
    assert "each line reaches to the next one: date,time," in introduction(LineSpec())
    assert "the next one of its symbol: symbol,date,time," in introduction(spec)


@pytest.mark.parametrize(("most", "kept"), [(0, 0), (2, 0), (3, 1), (6, 1), (7, 2), (8, 3), (99, 3)])
def test_the_oldest_lines_are_left_out_of_a_rollup_that_is_too_long(most: int, kept: int) -> None:
    lines = [[1], [2, 2, 2, 2], [3, 3, 3]]
    assert newest_within(lines, most) == lines[3 - kept :]
