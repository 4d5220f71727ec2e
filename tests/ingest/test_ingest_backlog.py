"""A session's waiting bars against a plain list: what is passed over, and that nothing else is lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.backlog import Backlog, TapeWindow
from ingest.bar_kernel import BAR, GAP, Bars

windows = st.builds(TapeWindow, st.integers(1, 60), st.integers(0, 8), st.integers(0, 12))


def bars(events: list[int], first: int = 0) -> Bars:
    made = np.zeros(len(events), BAR)
    made["ts_last_event"], made["ts_open"] = events, range(first, first + len(events))
    return made


@given(
    windows,
    st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(0, 6)), max_size=20),
    st.integers(1, 9),
    st.booleans(),
)
def test_bars_leave_in_order_and_what_waits_fits_the_window(
    window: TapeWindow, steps: list[tuple[list[int], int]], length: int, skips: bool
) -> None:
    """Lines of one length: then what the window can hold is known after the first one."""
    newest = 0
    backlog = Backlog(window, skips=skips)
    backlog.learn([range(length)])
    waiting: list[tuple[int, int, bool]] = []
    skipped = number = 0
    for apart, n in steps:
        events = [newest + sum(apart[: i + 1]) for i in range(len(apart))]
        newest = events[-1]
        backlog.add(bars(events, number))
        waiting += [(number + i, event, False) for i, event in enumerate(events)]
        number += len(events)
        if skips:
            kept = list(waiting)
            while (
                len(kept) > max(1, window.tokens // length)
                or (window.records and len(kept) > window.records)
                or (window.span_ns and kept[0][1] < newest - window.span_ns)
            ):
                kept.pop(0)
            if len(kept) < len(waiting):
                skipped += len(waiting) - len(kept)
                waiting = [(*kept[0][:2], True), *kept[1:]]
        assert backlog.full == (not skips and len(waiting) >= backlog.most)
        taken = backlog.take(n, 0)
        expected, waiting = waiting[:n], waiting[n:]
        assert taken["ts_open"].tolist() == [offset for offset, _, _ in expected]
        assert [bool(flags & GAP) for flags in taken["flags"]] == [gap for _, _, gap in expected]
        assert (len(backlog), backlog.skipped) == (len(waiting), skipped)


def test_the_shortest_line_tells_how_many_bars_a_window_holds() -> None:
    backlog = Backlog(TapeWindow(100), skips=True)
    assert backlog.most == 100
    for length, most in ((20, 5), (25, 5), (10, 10)):
        backlog.learn([range(length)])
        assert backlog.most == most
    assert Backlog(TapeWindow(100, records=3), skips=True).most == 3


@pytest.mark.parametrize("jump", [-3600 * 10**9, 365 * 86400 * 10**9])
def test_a_clock_that_jumps_holds_nothing_for_long(jump: int) -> None:
    """The source's clock goes back an hour or forward a year; ours, which is monotonic, does not."""
    backlog, second = Backlog(TapeWindow(), skips=True), 10**9
    waited = 0
    for n in range(10):
        bar = bars([n])
        bar["ts_source"] = 10**18 + n * second + (jump if n >= 5 else 0)
        bar["ts_ring"] = bar["ts_closed"] = n * second
        backlog.add(bar)
        waited += backlog.held(n * second)
        assert not backlog.held(n * second + second // 5)
        backlog.take(1, n * second + second // 5)
    assert waited == (jump > 0)


def test_a_quiet_market_is_not_taken_for_one_that_catches_up() -> None:
    """The bar before a pause is closed by the record after it, so two are closed soon after each other."""
    backlog, second = Backlog(TapeWindow(), skips=True), 10**9
    for traded, closed in ((1, 2), (2, 60), (60, 61), (61, 62)):
        bar = bars([traded])
        bar["ts_source"], bar["ts_ring"] = 10**18 + traded * second, traded * second
        bar["ts_closed"] = closed * second
        backlog.add(bar)
        assert not backlog.held(closed * second)
