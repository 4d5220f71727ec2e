"""Market regimes by bar: volatility, time of day, gaps."""

import pytest

from flash.regimes import RegimeTracker

MINUTE, HOUR = 60 * 10**9, 3600 * 10**9


def after(bars: int, spread: int, begin: RegimeTracker | None = None, step: int = MINUTE) -> RegimeTracker:
    """This many bars of this range on, all with one close."""
    found = begin or RegimeTracker()
    for _ in range(bars):
        found = found.after(found.last + step, 100_000 + spread, 100_000 - spread, 100_000)
    return found


def test_volatility_is_the_recent_range_over_the_usual_one() -> None:
    usual = after(600, 50)
    assert usual.name.split("/")[0] == "usual"
    assert after(20, 200, usual).name.split("/")[0] == "wild"
    assert after(20, 10, usual).name.split("/")[0] == "calm"
    assert after(3000, 200, usual).name.split("/")[0] == "usual", "it is the usual one by now"


def test_a_true_range_reaches_to_the_close_before() -> None:
    """Bars without a range of their own that jump from one to the next are as wild as wide ones."""
    found = after(600, 50)
    for n in range(20):
        price = 100_000 + 400 * (n % 2)
        found = found.after(found.last + MINUTE, price, price, price)
    assert found.name.startswith("wild")


@pytest.mark.parametrize(("hour", "part"), [(0, "00-06"), (5, "00-06"), (6, "06-12"), (23, "18-24")])
def test_the_time_of_day_is_that_of_the_newest_bar(hour: int, part: str) -> None:
    assert RegimeTracker().after(hour * HOUR, 101, 99, 100).name == f"usual/{part}"


def test_a_gap_is_shown_for_a_while() -> None:
    before = after(100, 50)
    night = before.after(before.last + 10 * MINUTE, 100_050, 99_950, 100_000)
    assert night.name.endswith("/gap")
    assert after(30, 50, night).name.endswith("/gap")
    assert not after(32, 50, night).name.endswith("/gap")
    told = before.after(before.last + MINUTE, 100_050, 99_950, 100_000, gap=True)
    assert told.name.endswith("/gap")
    assert not before.after(before.last + 5 * MINUTE, 100_050, 99_950, 100_000).name.endswith("/gap")


def test_slower_bars_are_no_gap_for_long() -> None:
    """Another interval is the usual one after some bars."""
    found = after(400, 50, after(100, 50), step=20 * MINUTE)
    assert not found.name.endswith("/gap")


def test_no_price_and_no_time_is_a_regime_too() -> None:
    found = RegimeTracker().after(5, 0, 0, 0).after(5, 0, 0, 0).after(4, -3, -3, -3)
    assert found.name == "usual/00-06"
