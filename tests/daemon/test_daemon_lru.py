"""The cache of the most recently used values, beside a plain reference."""

from hypothesis import given
from hypothesis import strategies as st

from daemon.lru import Lru

OWNERS = st.sampled_from(["", "a", "b", "c"])


@given(st.integers(1, 6), st.lists(st.tuples(st.booleans(), OWNERS, st.integers(0, 5)), max_size=60))
def test_the_owner_of_the_most_loses_what_it_used_longest_ago(
    most: int, steps: list[tuple[bool, str, int]]
) -> None:
    cache: Lru[int, str] = Lru(most)
    used: list[tuple[str, int]] = []
    """Oldest first."""
    for puts, owner, key in steps:
        known = (owner, key) in used
        if puts:
            cache.put(key, f"{owner}{key}", owner)
        else:
            assert cache.get(key, owner) == (f"{owner}{key}" if known else None)
        if known:
            used.remove((owner, key))
        if puts or known:
            used.append((owner, key))
        if len(used) > most:
            counts = {each: sum(one == each for one, _ in used) for each, _ in used}
            before = dict(counts)
            gone = [pair for pair in used if cache.get(pair[1], pair[0]) is None]
            assert len(gone) == 1
            (loser, lost) = gone[0]
            assert before[loser] == max(before.values())
            assert lost == next(k for o, k in used if o == loser)
            used.remove((loser, lost))
            # looking made every value the newest of its owner, in this order
        assert len(cache) == len(used)


def test_an_owner_with_few_values_keeps_them_whatever_another_puts_in() -> None:
    outcomes: list[str] = []
    cache: Lru[int, int] = Lru(8, outcomes.append)
    for key in range(3):
        cache.put(key, key, "few")
    for key in range(1000):
        cache.put(key, -key, "many")
    assert [cache.get(key, "few") for key in range(3)] == [0, 1, 2]
    assert [cache.get(999, "many"), cache.get(1, "many")] == [-999, None]
    assert outcomes == ["hit"] * 4 + ["miss"]


def test_what_cannot_be_made_is_not_kept() -> None:
    cache: Lru[str, int] = Lru(2)
    for _ in range(2):
        try:
            cache.made("x", lambda: int("no"))
        except ValueError:
            continue
        raise AssertionError
    assert cache.made("x", lambda: 7) == 7
    assert cache.made("x", lambda: 8) == 7
