"""Which bars are asked, against the plain rule: each once, by the daemon that answers when it closes."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from daemon.engine.replayed_bars import History
from daemon.session_life import Life, State
from ingest.record import LowWatermarks, ReadRange

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


Step = tuple[int, int] | ReadRange
"""A bar's leg and opening, or the record that has a line of its own: a correction, or an event."""


def until(steps: Sequence[Step]) -> tuple[tuple[int, ...], LowWatermarks]:
    """The newest bar of each leg, and the newest record with a line of its own of each stream."""
    bars, singles = ([each for each in steps if isinstance(each, ReadRange) == own] for own in (False, True))
    closed = tuple(max((at for of, at in bars if of == leg), default=-1) for leg in (0, 1))
    newest: dict[int, int] = {}
    for stream, _, offset in singles:
        newest[stream] = max(newest.get(stream, -1), offset)
    return closed, tuple(sorted(newest.items()))


def take(history: History, step: Step) -> bool:
    return history.take_single(step) if isinstance(step, ReadRange) else history.take(*step)


@given(bars, st.data(), st.sampled_from(["log", "snapshot", "standby"]))
def test_each_line_of_one_record_is_asked_once(
    script: list[tuple[int, int]], data: st.DataObject, how: str
) -> None:
    """Whatever was acknowledged, from wherever the bars are read again, and whichever make none then."""
    steps, offsets = list[Step](), {7: 0, 8: 1000}
    for bar in opened(script):
        steps.append(bar)
        for stream in data.draw(st.lists(st.sampled_from([7, 8]), max_size=2)):
            offsets[stream] += data.draw(st.integers(1, 3))
            steps.append(ReadRange(stream, offsets[stream], offsets[stream]))
    answered = data.draw(st.integers(0, len(steps)))
    closed, written = until(steps[:answered])
    begins = data.draw(st.integers(0, answered))
    restored = until(steps[:begins]) if how == "snapshot" else ((), ())
    again = [
        step for step in steps[begins:answered] if not isinstance(step, ReadRange) or data.draw(st.booleans())
    ]
    if how == "standby":
        history = History(followed(), 2)
        read = data.draw(st.integers(0, len(again)))
        assert all(take(history, step) for step in again[:read])
        history.promote(closed, written)
        again = again[read:]
    else:
        life = Life("aaa", state=State.REPLAYING)
        history = History(life, 2, closed, restored[0], written=written, restored_written=restored[1])
    assert [take(history, step) for step in again] == [True] * len(again)
    assert (history.closed, history.written) == (closed, written)
    assert [step for step in steps[answered:] if not take(history, step)] == steps[answered:]
    assert (history.closed, history.written) == until(steps)


def test_a_take_over_without_anything_acknowledged_asks_all() -> None:
    history = History(followed(), 1)
    history.promote(())
    assert not history.rebuilding
    assert not history.take(0, 5)
    assert history.closed == (5,)
