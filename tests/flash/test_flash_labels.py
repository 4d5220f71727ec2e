"""Labels that arrive later: in any order, late, at once, unknown."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash.confidence import AdaptiveCoverage, QuestionCalibration
from flash.late_labels import AdaptationState, JudgedAnswer, LabelError, LateLabels
from tests.kit import tolerance

CHOICES = ["UP", "DOWN"]
TARGET = 0.9
EXACT = tolerance.of_float64(1.0)
FITTED = QuestionCalibration(
    name="trend",
    text="Up?",
    choices=CHOICES,
    temperature=1.0,
    scores=[(n + 1) / 250 for n in range(200)],
    labels=2000,
    mean_gap=1.0,
)


def answer(gap: float, coverage: float = TARGET) -> JudgedAnswer:
    """UP by ``gap``, or DOWN if it is negative."""
    logits = (gap, 0.0)
    choice_set = FITTED.choice_set(logits, coverage)
    return JudgedAnswer(FITTED, ("UP", "DOWN"), False, logits, int(gap < 0), choice_set)


def test_a_label_says_of_an_answer_what_is_right_covered_and_asked_for_now() -> None:
    labels = LateLabels(TARGET, 10)
    labels.remember("q", 1, answer(5.0))
    labels.remember("q", 2, answer(5.0))
    labels.remember("r", 2, answer(0.1))
    assert labels.largest == TARGET
    right, wrong = labels.label("q", 2, "UP"), labels.label("q", 1, "DOWN")
    first = AdaptiveCoverage.of(TARGET).after(True)
    assert (right.right, right.covered, right.coverage) == (True, True, first.asked)
    assert (wrong.right, wrong.covered, wrong.coverage) == (False, False, first.after(False).asked)
    assert labels.coverage("q") == wrong.coverage > TARGET
    assert labels.coverage("r") == TARGET, "each question has its own"
    both = labels.label("r", 2, "DOWN")
    assert (both.right, both.covered) == (False, True)
    assert labels.largest == labels.coverage("q")


def test_without_a_calibration_a_label_adapts_nothing() -> None:
    labels = LateLabels(TARGET, 10)
    labels.remember("q", 1, JudgedAnswer(None, ("UP", "DOWN"), False, (1.0, 0.0), 0, None))
    found = labels.label("q", 1, "DOWN")
    assert (found.right, found.covered, found.coverage) == (False, None, TARGET)
    assert labels.cut() == AdaptationState(TARGET, {})


@pytest.mark.parametrize(
    ("question", "version", "choice", "code", "message"),
    [
        ("q", 3, "UP", "unknown_version", "the session's latest 2 judged answers"),
        ("r", 2, "UP", "unknown_version", "version 2"),
        ("q", 1, "MAYBE", "bad_request", "'MAYBE' is no choice; there are: UP, DOWN"),
        ("q", 2, "UP", "repeated", "version 2 has its label"),
        ("q", 2, "MAYBE", "repeated", "version 2 has its label"),
    ],
)
def test_a_label_of_no_use_changes_nothing(
    question: str, version: int, choice: str, code: str, message: str
) -> None:
    labels = LateLabels(TARGET, 2)
    labels.remember("q", 1, answer(5.0))
    labels.remember("q", 2, answer(5.0))
    before = labels.label("q", 2, "DOWN").coverage
    with pytest.raises(LabelError, match=message) as refused:
        labels.label(question, version, choice)
    assert refused.value.code == code
    assert labels.coverage("q") == before


def test_the_oldest_answers_are_forgotten() -> None:
    labels = LateLabels(TARGET, 3)
    for version in range(1, 6):
        labels.remember("q", version, answer(5.0))
    for version in (1, 2):
        with pytest.raises(LabelError, match=f"version {version}"):
            labels.label("q", version, "UP")
    assert all(labels.label("q", version, "UP").right for version in (3, 4, 5))


def test_the_coverage_asked_for_stays_between_none_and_all() -> None:
    labels = LateLabels(TARGET, 1000)
    for version in range(1000):
        labels.remember("q", version, answer(9.0))
    found = [labels.label("q", version, "DOWN").coverage for version in range(1000)]
    assert max(found) == 1.0
    assert found[-1] > TARGET


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), delay=st.integers(0, 400), wrong=st.floats(0.0, 1.0))
def test_the_coverage_follows_the_labels_however_late_they_come(seed: int, delay: int, wrong: float) -> None:
    """Its steps are those of `AdaptiveCoverage` alone, and its sets keep the paper's proposition 4.1.

    The state with late labels is that with labels at once, one for one: it depends on the order of the labels
    and on the logits, not on the sets that were published meanwhile.
    """
    rng = random.Random(seed)
    labels, alone, steps = LateLabels(TARGET, 1000), AdaptiveCoverage.of(TARGET), 600
    gaps = [rng.gauss(0, 2) for _ in range(steps)]
    told = [CHOICES[(gap < 0) != (rng.random() < wrong)] for gap in gaps]
    covered = 0
    for version in range(steps + delay):
        if version < steps:
            labels.remember("q", version, answer(gaps[version], labels.coverage("q")))
        if version >= delay:
            past = version - delay
            found = labels.label("q", past, told[past])
            hit = told[past] in FITTED.choice_set([gaps[past], 0.0], alone.asked)
            covered += hit
            alone = alone.after(hit)
            assert found.coverage == min(1.0, max(0.0, alone.asked))
    assert abs(covered / steps - TARGET) <= (TARGET + alone.rate) / (alone.rate * steps) + EXACT


@given(given=st.lists(st.tuples(st.sampled_from("qr"), st.booleans()), max_size=30), data=st.data())
def test_coverage_goes_on_from_a_cut(given: list[tuple[str, bool]], data: st.DataObject) -> None:
    """Labels before and after it adapt as if there had been none; one for another target is not used."""
    at = data.draw(st.integers(0, len(given)))
    whole, first, second = (LateLabels(TARGET, 100) for _ in range(3))
    for number, (question, right) in enumerate(given):
        if number == at:
            second.restore(first.cut())
        for labels in (whole, first if number < at else second):
            labels.remember(question, number, answer(5.0))
            labels.label(question, number, "UP" if right else "DOWN")
    assert (second if at < len(given) else first).cut() == whole.cut()
    other = LateLabels(0.5, 100)
    other.restore(whole.cut())
    assert other.cut() == AdaptationState(0.5, {})
