"""What `foretick bench recovery` makes of its rounds."""

from bench.figures import Goal
from bench.recovery.restart import Took, figures_of
from bench.run import SuiteRun, run


def test_rounds_become_medians_with_the_slowest_and_the_fastest() -> None:
    ours, log = [Took(1, 2, 3), Took(3, 3, 9), Took(2, 4, 4)], [Took(4, 8, 8)]
    first, whole, live = figures_of(ours, log, {}, Goal(2.0, of="ours"))
    assert (first.ours, first.reference, first.low, first.high) == (2, 4, 3, 1)
    assert first.verdict == "undecided", "the slowest round was slower"
    assert (whole.ours, live.ours, live.n, live.samples) == (3, 4, 3, [3, 9, 4])
    assert (whole.goal, live.goal) == (None, None)


def test_a_checkpoint_stores_what_changed() -> None:
    """Where all sessions stand, or one, and exactly once their answers; a bare client stores the same."""
    (part,) = run("recovery", "", SuiteRun(quick=True, say=lambda text: None), ["checkpoint"]).parts
    how = [(figure.setting["delivery"], figure.setting["of these answered"]) for figure in part.figures]
    assert how == [(name, answered) for name in ("at_least_once", "exactly_once") for answered in (1, 3)]
    one, all_, one_with_answers, all_with_answers = (int(figure.setting["bytes"]) for figure in part.figures)
    assert 0 < one < all_ < all_with_answers
    assert one < one_with_answers < all_with_answers
    assert all(figure.ours > 0 and figure.reference for figure in part.figures)
