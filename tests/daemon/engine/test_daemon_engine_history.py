"""Which bars are asked, against the plain rule: each once, by the daemon that answers when it closes."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from daemon.engine.replayed_bars import History
from daemon.session_life import Life, State

bars = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3)), max_size=30)
"""Each one's leg, and how much later than the leg's last one it opens."""


def followed() -> Life:
    """A session that another daemon answers."""
    return Life("aaa", state=State.WARMING)


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
    history = History(followed(), 2, known)
    assert all(history.take(*bar) for bar in made[begins:taken])
    assert history.rebuilding
    history.promote(until)
    asked = [bar for bar in made[taken:] if not history.take(*bar)]
    assert asked == made[answered:]
    assert not history.rebuilding or answered == len(made)


Step = tuple[int, int, int | None]
"""A bar's leg and opening; of one that is written again, the offset of the late record."""


def until(steps: Sequence[Step]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The newest bar and the newest correction of each leg."""
    closed = tuple(max((at for of, at, _ in steps if of == leg), default=-1) for leg in (0, 1))
    late = [[late for of, _, late in steps if of == leg and late is not None] for leg in (0, 1)]
    corrected = tuple(max(each, default=-1) for each in late)
    return closed, corrected if max(corrected) >= 0 else ()


@given(bars, st.data(), st.sampled_from(["log", "snapshot", "standby"]))
def test_each_correction_is_asked_once(script: list[tuple[int, int]], data: st.DataObject, how: str) -> None:
    """Whatever was acknowledged, from wherever the bars are read again, and whichever make none then."""
    steps, offset = list[Step](), 0
    for leg, at in opened(script):
        steps.append((leg, at, None))
        for _ in range(data.draw(st.integers(0, 2))):
            offset += data.draw(st.integers(1, 3))
            steps.append((leg, data.draw(st.integers(1, at)), offset))
    answered = data.draw(st.integers(0, len(steps)))
    closed, corrected = until(steps[:answered])
    begins = data.draw(st.integers(0, answered))
    restored = until(steps[:begins]) if how == "snapshot" else ((), ())
    again = [step for step in steps[begins:answered] if step[2] is None or data.draw(st.booleans())]
    if how == "standby":
        history = History(followed(), 2)
        read = data.draw(st.integers(0, len(again)))
        assert all(history.take(*step) for step in again[:read])
        history.promote(closed, corrected)
        again = again[read:]
    else:
        life = Life("aaa", state=State.REPLAYING)
        history = History(life, 2, closed, restored[0], corrected=corrected, restored_corrected=restored[1])
    assert [history.take(*step) for step in again] == [True] * len(again)
    assert (history.closed, history.corrected) == (closed, corrected)
    assert [step for step in steps[answered:] if not history.take(*step)] == steps[answered:]
    assert (history.closed, history.corrected) == until(steps)


def test_a_take_over_without_anything_acknowledged_asks_all() -> None:
    history = History(followed(), 1)
    history.promote(())
    assert not history.rebuilding
    assert not history.take(0, 5)
    assert history.closed == (5,)
