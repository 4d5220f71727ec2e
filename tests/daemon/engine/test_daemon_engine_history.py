"""Which bars are asked, against the plain rule: each once, by the daemon that answers when it closes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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


Step = tuple[int, int, bool]
"""A bar's leg and opening, and whether it is written again."""


def until(steps: Sequence[Step]) -> tuple[tuple[int, ...], int]:
    """The newest bar of each leg, and the corrections behind the last bar."""
    closed = tuple(max((at for of, at, _ in steps if of == leg), default=-1) for leg in (0, 1))
    corrections = list(itertools.takewhile(lambda step: step[2], reversed(steps)))
    return closed, len(corrections)


@given(bars, st.data(), st.sampled_from(["log", "snapshot", "standby"]))
def test_each_correction_is_asked_once(script: list[tuple[int, int]], data: st.DataObject, how: str) -> None:
    """Whatever was acknowledged. The newest bar of each symbol is read again, or a snapshot has it."""
    steps = list[Step]()
    for leg, at in opened(script):
        steps.append((leg, at, False))
        steps += [(leg, at, True)] * data.draw(st.integers(0, 2))
    answered = data.draw(st.integers(0, len(steps)))
    closed, corrected = until(steps[:answered])
    newest = [steps.index((leg, at, False)) for leg, at in enumerate(closed) if at >= 0]
    begins = data.draw(st.integers(0, answered if how == "snapshot" else min(newest, default=0)))
    restored = until(steps[:begins]) if how == "snapshot" else ((), 0)
    if how == "standby":
        history = History(2, follows=True)
        taken = data.draw(st.integers(begins, answered))
        assert all(history.take(*step) for step in steps[begins:taken])
        history.take_over(closed, corrected)
    else:
        history = History(2, closed, restored[0], corrected=corrected, corrections=restored[1])
        taken = begins
    asked = [step for step in steps[taken:] if not history.take(*step)]
    assert asked == steps[answered:]
    assert (history.closed, history.corrections) == until(steps) or not steps[taken:]


def test_a_take_over_without_anything_acknowledged_asks_all() -> None:
    history = History(1, follows=True)
    history.take_over(())
    assert not history.rebuilding
    assert not history.take(0, 5)
    assert history.closed == (5,)
