"""Which bars are asked, against the plain rule: each once, by the daemon that answers when it closes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daemon.engine.history import History

bars = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3)), max_size=30)
"""Each one's leg, and how much later than the leg's last one it opens."""


def opened(script: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Leg and opening of each bar."""
    newest, found = [0, 0], []
    for leg, step in script:
        newest[leg] += step
        found.append((leg, newest[leg]))
    return found


@given(bars, st.data())
def test_a_standby_asks_exactly_what_the_one_before_left(
    script: list[tuple[int, int]], data: st.DataObject
) -> None:
    """It never has a bar that is not answered, and begins anywhere, as after its own start."""
    made = opened(script)
    answered = data.draw(st.integers(0, len(made)))
    taken = data.draw(st.integers(0, answered))
    begins = data.draw(st.integers(0, taken))
    until = tuple(max((at for of, at in made[:answered] if of == leg), default=-1) for leg in (0, 1))
    known = data.draw(st.sampled_from([(), (-1, -1), until]))  # what its own start has read
    history = History(2, known, follows=True)
    assert all(history.take(*bar) for bar in made[begins:taken])
    assert history.rebuilding
    history.take_over(until)
    asked = [bar for bar in made[taken:] if not history.take(*bar)]
    assert asked == made[answered:]
    assert not history.rebuilding or answered == len(made)


def test_a_take_over_without_anything_acknowledged_asks_all() -> None:
    history = History(1, follows=True)
    history.take_over(())
    assert not history.rebuilding
    assert not history.take(0, 5)
    assert history.closed == (5,)
