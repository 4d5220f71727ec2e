"""Segments behave as the list of their tokens does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulation.tokens import EMPTY, Segments

# Few different starts, so that prefixes, equal sequences and runs that continue one another are common.
RUNS = st.lists(
    st.builds(lambda start, n: range(start, start + n), st.integers(0, 6), st.integers(0, 4)), max_size=5
)


def tokens_of(runs: list[range]) -> list[int]:
    return [token for run in runs for token in run]


@given(RUNS, st.integers(-25, 25), st.integers(-25, 25))
def test_segments_have_the_length_items_and_slices_of_the_list(
    runs: list[range], start: int, stop: int
) -> None:
    ours, plain = Segments(runs), tokens_of(runs)
    assert len(ours) == len(plain)
    assert list(ours) == plain
    assert [ours[at] for at in range(-len(plain), len(plain))] == plain * 2
    assert list(ours[start:stop]) == plain[start:stop]
    assert ours[start:stop] == plain[start:stop]
    assert ours[:start] + ours[start:] == ours or start < -len(plain) or start > len(plain)


@given(RUNS, RUNS)
def test_segments_are_equal_and_add_up_as_the_lists_do(left: list[range], right: list[range]) -> None:
    a, b, x, y = Segments(left), Segments(right), tokens_of(left), tokens_of(right)
    assert (a == b) is (x == y)
    assert (a == y) is (x == y)
    assert a + b == x + y
    if x == y:
        assert hash(a) == hash(b)
        assert a.ranges == b.ranges


@given(RUNS)
def test_segments_convert_to_the_int32_array_of_the_list(runs: list[range]) -> None:
    found = np.asarray(Segments(runs))
    assert found.dtype == np.int32
    assert found.tolist() == tokens_of(runs)


def test_a_whole_slice_is_the_same_object() -> None:
    ours = Segments([range(3)])
    assert ours[0:3] is ours
    assert len(EMPTY) == 0
    assert not EMPTY


def test_a_prompt_of_a_billion_tokens_costs_a_few_ranges() -> None:
    ours = Segments([range(10**9), range(5, 10**9)])
    assert len(ours) == 2 * 10**9 - 5
    assert ours[10**9] == 5
    assert len(ours[10**9 - 2 : 10**9 + 2].ranges) == 2


def test_segments_refuse_steps_other_than_1() -> None:
    with pytest.raises(ValueError, match="step 1"):
        Segments([range(0, 4, 2)])
    with pytest.raises(ValueError, match="steps of 1"):
        Segments([range(4)])[::2]
    with pytest.raises(IndexError):
        Segments([range(4)])[4]
