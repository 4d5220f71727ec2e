"""Budgets of engine time: a question takes its share, skips versions meanwhile, and is asked again."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.budgets import QuestionBudgets
from flash.question import PreparedQuestion, Question
from flash.registry import Standing
from tests.kit import tolerance

S = 10**9
WINDOW_S = 10.0


def standing(share: float, name: str = "q", session: str = "a") -> Standing:
    question = Question(name, "Up?", ("UP", "DOWN"), engine_share=share)
    return Standing(session, question, question.hash, PreparedQuestion((1,), (2, 3), frozenset()))


class Time:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@given(
    share=st.floats(0.001, 1.0),
    steps=st.lists(st.tuples(st.integers(0, 5 * S), st.integers(1, 3 * S)), min_size=1, max_size=60),
)
def test_in_any_time_a_question_takes_its_share_of_it_and_of_the_window(
    share: float, steps: list[tuple[int, int]]
) -> None:
    """And its last answer, against plain sums over all pairs of moments."""
    time, item = Time(), standing(share)
    budgets = QuestionBudgets(time, WINDOW_S)
    taken: list[tuple[int, int]] = []
    for later, takes in steps:
        time.now += later
        if budgets.allows(item):
            budgets.charge(item, takes)
            taken.append((time.now, takes))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            spent = sum(takes for _, takes in taken[first:last]) / S
            allowed = share * ((taken[last][0] - taken[first][0]) / S + WINDOW_S)
            assert spent <= allowed + tolerance.of_float64(allowed)


def test_a_question_without_a_budget_takes_what_it_wants() -> None:
    budgets = QuestionBudgets(Time(), WINDOW_S)
    budgets.charge(standing(0.0), 10**15)
    assert budgets.allows(standing(0.0))


def test_sessions_that_ask_one_question_share_its_budget_and_others_have_their_own() -> None:
    time = Time()
    budgets = QuestionBudgets(time, WINDOW_S)
    budgets.charge(standing(0.1), 2 * S)  # one second may be taken at once
    assert budgets.used(standing(0.1)) == pytest.approx(2)
    assert budgets.used(standing(0.0)) == 0
    assert not budgets.allows(standing(0.1, session="b"))
    assert budgets.allows(standing(0.1, name="other"))
    time.now += 9 * S
    assert not budgets.allows(standing(0.1))
    time.now += S + 10
    assert budgets.allows(standing(0.1))


def test_another_share_begins_anew() -> None:
    budgets = QuestionBudgets(Time(), WINDOW_S)
    budgets.charge(standing(0.1), 5 * S)
    assert budgets.allows(standing(0.2))


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_from_0_to_1(share: float) -> None:
    with pytest.raises(ValueError, match="must be from 0"):
        replace(standing(0.5).question, engine_share=share)
