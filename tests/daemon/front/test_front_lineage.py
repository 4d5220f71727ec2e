"""What a window and a state were made of, against a plain list of all versions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daemon.front.lineage import Lineage
from feeds.messages import InputRange

Version = tuple[int, int, bool, int]


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 8), st.booleans(), st.integers(0, 2)),
        min_size=1,
        max_size=40,
    )
)
def test_window_and_state_are_the_records_of_their_bars(versions: list[Version]) -> None:
    """By version: new bars, most bars of the window, whether it was prefilled before, and the partition."""
    lineage, history, next_offset = Lineage(), list[tuple[int, int, int, int]](), [0, 0, 0]
    live = state = number = merged = 0
    for bars, most, fresh, partition in versions:
        if fresh:
            number, state, merged = number + 1, live, 0
        live = min(live + bars, max(most, bars))
        state += bars
        state = max(state, live)
        merged += bars > 1 and state > live
        first = next_offset[partition]
        next_offset[partition] = first + bars
        history.append((bars, partition, first, first + bars - 1))
        basis = lineage.committed(
            bars, live, [InputRange("t", partition, first, first + bars - 1)], state=number, state_bars=state
        )

        def ranges(count: int) -> list[InputRange]:
            """Of the newest ``count`` bars, and the rest of their oldest version."""
            found: dict[int, InputRange] = {}
            for n, p, first, last in reversed(history):
                if count <= 0:
                    break
                found[p] = InputRange("t", p, first, found[p].last_offset if p in found else last)
                count -= n
            return sorted(found.values(), key=lambda each: each.partition)

        assert sorted(basis.window, key=lambda each: each.partition) == ranges(live)
        assert sorted(basis.state, key=lambda each: each.partition) == ranges(state)
        assert (basis.bars, basis.window_bars, basis.state_bars) == (bars, live, state)
        assert basis.merged == merged


def test_a_state_from_before_the_first_version_is_not_known() -> None:
    basis = Lineage().committed(1, 5, [InputRange("t", 0, 7, 9)], state=3, state_bars=40)
    assert basis.state == []
    assert (basis.window_bars, basis.state_bars) == (5, 40)


def test_bars_that_left_while_a_window_was_prefilled_are_told() -> None:
    lineage = Lineage()
    assert lineage.committed(1, 1, [InputRange("t", 0, 0, 0)], state=1, state_bars=1, left=True).merged == 1
    assert lineage.committed(1, 2, [InputRange("t", 0, 1, 1)], state=1, state_bars=2, left=True).merged == 1
