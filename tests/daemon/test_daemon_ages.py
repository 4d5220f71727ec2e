"""Ages of records by three clocks, and how far a venue's clock is ahead."""

from hypothesis import given
from hypothesis import strategies as st

from daemon.ages import Ages, Times, VenueClock, ages

S = 1_000_000_000


def test_ages_count_from_the_event_the_source_and_the_daemon() -> None:
    times = Times(as_of=100 * S, source=103 * S, ring=7 * S)
    assert ages(times, 0, 110 * S, 9 * S) == Ages(10 * S, 7 * S, 2 * S)


def test_a_venue_s_clock_that_is_ahead_makes_events_older() -> None:
    times = Times(as_of=112 * S, source=109 * S, ring=8 * S)
    assert ages(times, 4 * S, 110 * S, 9 * S) == Ages(2 * S, S, S)


def test_a_replay_counts_from_its_sending() -> None:
    times = Times(as_of=1, source=103 * S, ring=7 * S, replay=True)
    assert ages(times, 5 * S, 110 * S, 9 * S) == Ages(7 * S, 7 * S, 2 * S)


def test_a_clock_that_was_set_back_makes_nothing_younger_than_new() -> None:
    assert ages(Times(100 * S, 100 * S, 100), 0, 40 * S, 100) == Ages(0, 0, 0)
    assert ages(None, 5, 40 * S, 100) == Ages()


records = st.lists(
    st.tuples(st.integers(0, 20 * S), st.integers(-5 * S, 30 * S)), min_size=1, max_size=60
)  # (pause before its arrival, delay since its event)


@given(records)
def test_a_venue_is_ahead_by_the_earliest_arrival_of_the_last_minute_or_two(
    arrived: list[tuple[int, int]],
) -> None:
    """At least that of the last minute, at most that of the last two."""
    clock, now, seen = VenueClock(), 1_000 * S, list[tuple[int, int]]()
    for pause, delay in arrived:
        now += pause
        clock.observe(now - delay, now)
        seen.append((now, delay))
        within = [[d for at, d in seen if now - at < limit] for limit in (60 * S, 120 * S)]
        least, most = (max(0, -min(delays)) for delays in within)
        assert least <= clock.ahead_ns <= most
        assert min(within[1]) <= (clock.delay_ns(now) or 0) <= min(within[0])


def test_a_clock_of_ours_that_is_set_back_starts_anew() -> None:
    clock = VenueClock()
    assert (clock.delay_ns(0), clock.ahead_ns) == (None, 0)
    clock.observe(1_000 * S, 1_000 * S)
    clock.observe(900 * S + 3, 900 * S)
    assert clock.ahead_ns == 3
    assert [clock.delay_ns((900 + later) * S) for later in (0, 60, 180)] == [-3, -3, None]
