"""Partitions by weight: near the best maximum, as few moves as equal weights need, the same each time."""

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeds.placement import loads_of, moves, place

TOPIC = "md.trades.v1"
NAMES = [f"desk-{n}" for n in range(5)]


def numbered(weights: list[float]) -> dict[tuple[str, int], float]:
    return {(TOPIC, n): weight for n, weight in enumerate(weights)}


def best(weights: list[float], members: int) -> float:
    """The smallest maximum of all placements."""
    found = (
        max(sum(w for w, m in zip(weights, each, strict=True) if m == member) for member in range(members))
        for each in product(range(members), repeat=len(weights))
    )
    return min(found)


SMALL = st.lists(st.integers(0, 40).map(float), min_size=1, max_size=7)


@st.composite
def owned(draw: st.DrawFn) -> tuple[list[float], int, dict[tuple[str, int], str]]:
    """Weights, members, and owners that may have left, or are missing."""
    weights = draw(SMALL)
    owners = draw(st.lists(st.sampled_from([*NAMES, ""]), min_size=len(weights), max_size=len(weights)))
    return weights, draw(st.integers(1, 3)), {(TOPIC, n): name for n, name in enumerate(owners) if name}


@given(owned())
def test_the_busiest_is_within_the_bound_of_the_best_and_every_partition_is_placed(
    case: tuple[list[float], int, dict[tuple[str, int], str]],
) -> None:
    weights, members, owners = case
    placed = place(numbered(weights), NAMES[:members], owners)
    assert placed.keys() == numbered(weights).keys()
    loads = loads_of(numbered(weights), placed, NAMES[:members])
    assert max(loads.values()) <= (4 / 3 - 1 / (3 * members)) * best(weights, members) * (1 + 1e-9)


@given(owned(), st.randoms(use_true_random=False))
def test_the_order_of_what_is_given_changes_nothing(
    case: tuple[list[float], int, dict[tuple[str, int], str]], random: Random
) -> None:
    weights, members, owners = case
    given_ = place(numbered(weights), NAMES[:members], owners)
    shuffled, names, others = list(numbered(weights).items()), NAMES[:members], list(owners.items())
    for each in (shuffled, names, others):
        random.shuffle(each)  # type: ignore[arg-type]
    assert place(dict(shuffled), names, dict(others)) == given_


@given(owned())
def test_a_placement_that_is_given_as_owners_stays(
    case: tuple[list[float], int, dict[tuple[str, int], str]],
) -> None:
    weights, members, owners = case
    first = place(numbered(weights), NAMES[:members], owners)
    assert place(numbered(weights), NAMES[:members], first) == first


@pytest.mark.parametrize("partitions", [5, 7, 12, 30])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (4, 5), (5, 4), (3, 1), (2, 5)])
def test_equal_weights_move_no_more_than_an_even_division_needs(
    partitions: int, before: int, after: int
) -> None:
    """And no fewer than the smallest maximum needs: what is above it, or leaves with its member."""
    weights = numbered([7.0] * partitions)
    old = place(weights, NAMES[:before])
    new = place(weights, NAMES[:after], old)
    counts = [list(old.values()).count(name) for name in NAMES[:before]]
    left, staying = sum(counts[after:]), sorted(counts[:after], reverse=True)
    most, (least, larger) = -(-partitions // after), divmod(partitions, after)
    even = sum(max(0, count - (least + (n < larger))) for n, count in enumerate(staying))
    needed = sum(max(0, count - most) for count in staying)
    assert left + needed <= len(moves(old, new)) <= left + even
    assert max(list(new.values()).count(name) for name in NAMES[:after]) == most


def test_hot_partitions_are_on_daemons_of_their_own() -> None:
    weights = numbered([100.0, 90.0, 80.0, *[1.0] * 9])
    placed = place(weights, NAMES[:3])
    assert len({placed[TOPIC, n] for n in range(3)}) == 3


def test_a_daemon_more_takes_from_the_busiest_and_the_others_keep_theirs() -> None:
    weights = numbered([4.0, 3.0, 3.0, 2.0, 2.0, 2.0])
    old = place(weights, NAMES[:2])
    new = place(weights, NAMES[:3], old)
    assert all(name == NAMES[2] for _, name in moves(old, new).values())
    assert max(loads_of(weights, new, NAMES[:3]).values()) == 6.0


def test_no_daemon_is_idle_while_there_are_partitions_for_all() -> None:
    old = place(numbered([1.0] * 4), NAMES[:2])
    new = place(numbered([1.0] * 4), NAMES[:3], old)
    assert len(moves(old, new)) == 1
    assert set(new.values()) == set(NAMES[:3])
    assert len(set(place(numbered([9.0, 0.0, 0.0]), NAMES[:3]).values())) == 3


def test_a_gain_below_a_tenth_moves_nothing() -> None:
    owners = {(TOPIC, 0): "a", (TOPIC, 1): "a", (TOPIC, 2): "b", (TOPIC, 3): "b"}
    assert place(numbered([10.5, 10.0, 10.0, 10.0]), ["a", "b"], owners) == owners
    uneven = numbered([20.0, 20.0, 1.0, 1.0])
    moved = place(uneven, ["a", "b"], owners)
    assert max(loads_of(uneven, moved, ["a", "b"]).values()) == 21.0


def test_partitions_without_records_are_spread_by_number() -> None:
    placed = place(numbered([0.0] * 6), NAMES[:3])
    assert sorted(list(placed.values()).count(name) for name in NAMES[:3]) == [2, 2, 2]


@pytest.mark.parametrize(
    ("weights", "members"), [([1.0], []), ([1.0], ["a", "a"]), ([-1.0], ["a"]), ([float("nan")], ["a"])]
)
def test_what_makes_no_sense_is_refused(weights: list[float], members: list[str]) -> None:
    with pytest.raises(ValueError, match="must be"):
        place(numbered(weights), members)
