"""Volumes in three integers against Python's own, which have no limit."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingest.bar_kernel import BAR
from ingest.late_updates import merge
from ingest.volumes import MAX_INT64, Volume, add_volume, no_volume, put_volume, volume_of

units = st.sampled_from([0, 1, 9, 10**9 - 1, 10**9, 10**18 - 1, 10**18, MAX_INT64]) | st.integers(
    0, MAX_INT64
)
finer = st.integers(-9, 9)


@given(st.integers(0, 10**45))
@example(MAX_INT64 * 10**9 + 10**9 - 1)
@example((MAX_INT64 + 1) * 10**9)
def test_every_volume_has_one_form(exact: int) -> None:
    volume = Volume.of(exact)
    assert volume.exact == exact
    assert 0 <= volume.low < 10**9
    assert (volume.high == 0) == (exact // 10**9 <= MAX_INT64)
    assert volume.high == 0 or volume.nano < 10**18


@settings(max_examples=500)
@given(st.lists(st.tuples(units, finer), max_size=30))
@example([(MAX_INT64, 0), (1, 0)])
@example([(MAX_INT64, 0), (10**9 - 1, 9), (1, 9)])
@example([(9, -9), (223_372_036_854_775_807, 0), (1, 0)])
@example([(9, -9), (223_372_036_854_775_807, 0), (MAX_INT64, 9)])
def test_compiled_sums_are_exact(sizes: list[tuple[int, int]]) -> None:
    bar = np.zeros(1, BAR)[0]
    total = 0
    for size, scale in sizes:
        add_volume(bar, size, scale)
        total += size * 10 ** (9 - scale)
        assert volume_of(bar) == Volume.of(total)
    no_volume(bar)
    assert volume_of(bar) == (0, 0, 0)


@pytest.mark.parametrize("first", [0, 1, MAX_INT64 * 10**9, 10**30 + 1])
@pytest.mark.parametrize("late", [0, 1, MAX_INT64 * 10**9, 10**30 + 10**9 - 1])
@pytest.mark.parametrize("ready_made", [False, True])
def test_a_late_record_adds_its_volume_exactly_and_a_ready_made_bar_replaces_it(
    first: int, late: int, ready_made: bool
) -> None:
    bars = np.zeros(2, BAR)
    bars["n_ticks"] = 1, 1 - ready_made
    for bar, exact in zip(bars, (first, late), strict=True):
        put_volume(bar, Volume.of(exact))
    merge(bars[0], bars[1])
    assert volume_of(bars[0]).exact == (late if ready_made else first + late)
