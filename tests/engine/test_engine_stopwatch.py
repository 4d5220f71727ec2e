"""Calls are timed by turns, over a bounded number of rounds."""

from itertools import count

import pytest

from engine.stopwatch import Stopwatch


class Clock:
    """Wall and CPU time that calls spend."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.cpu = 0.0
        monkeypatch.setattr("engine.stopwatch.time.monotonic", lambda: self.wall)
        monkeypatch.setattr("engine.stopwatch.time.thread_time_ns", lambda: round(self.cpu * 1e9))

    def spend(self, wall: float, cpu: float) -> None:
        self.wall += wall
        self.cpu += cpu


@pytest.mark.parametrize(("wall", "rounds"), [(0.01, 20), (0.1, 6), (10.0, 3)])
def test_rounds_go_on_for_the_budget_and_are_never_too_few(
    wall: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round is beside these."""
    clock, called = Clock(monkeypatch), ""

    def call(name: str) -> None:
        nonlocal called
        called += name
        clock.spend(wall / 2, wall / 4)

    Stopwatch(rounds=3, max_rounds=20, budget_s=0.65)([lambda: call("a"), lambda: call("b")])
    assert called == "ab" * (rounds + 1)


def test_the_least_cpu_time_counts_but_for_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, number = Clock(monkeypatch), count()
    seconds = [0.001, 0.5, 0.25, 0.75]
    timed = Stopwatch(3, 3, 100)([lambda: clock.spend(9.0, seconds[next(number)])])
    assert timed == [pytest.approx(0.25)]
