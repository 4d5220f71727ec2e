"""What `foretick bench recovery` makes of its rounds."""

from bench.figures import Goal
from bench.recovery.restart import Took, figures_of


def test_rounds_become_medians_with_the_slowest_and_the_fastest() -> None:
    ours, log = [Took(1, 2, 3), Took(3, 3, 9), Took(2, 4, 4)], [Took(4, 8, 8)]
    first, whole, live = figures_of(ours, log, {}, Goal(2.0, of="ours"))
    assert (first.ours, first.reference, first.low, first.high) == (2, 4, 3, 1)
    assert first.verdict == "undecided", "the slowest round was slower"
    assert (whole.ours, live.ours, live.n, live.samples) == (3, 4, 3, [3, 9, 4])
    assert (whole.goal, live.goal) == (None, None)
