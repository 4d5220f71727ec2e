"""Worked examples: right by the slow reference, the same every time, with different answers."""

from collections import defaultdict

from flash.question import EXACT_VALUE
from ingest.compact import Anchor, fields_of
from ingest.lines import bar_line
from tapes.rules import RULES
from tapes.worked_examples import BARS, WorkedExample, worked_examples
from tests.tapes import reference
from tests.tapes.reference import Bar


def shown_bars(example: WorkedExample) -> tuple[list[Bar], int]:
    """Its bars as levels around the only anchor that they can have, and the units of one percent."""
    spec = example.spec
    middle = (int(example.bars["l"].min()) + int(example.bars["h"].max())) // 2
    anchor = Anchor(middle // 10**7 * 10**7, 10**7, 1000 * 10**18, 2, spec.price_scale)
    return [Bar(*fields) for fields in fields_of(example.bars, anchor).tolist()], anchor.percent


def test_answers_are_right_by_the_reference() -> None:
    for example in worked_examples(8):
        bars, percent = shown_bars(example)
        assert len(bars) == BARS
        asked = {question.name: answer for question, answer in example.answers}
        for rule in RULES:
            name = rule.name
            if name != "drawdown":  # relative to the price: see below
                label = reference.label(name, bars, percent)
                assert asked.get(name) == (None if label is None else rule.choices[label]), name
        close, high = example.bars["c"][-1], example.bars["h"].max()
        assert asked["drawdown"] == ("YES" if close < high * 0.98 else "NO")
        assert bar_line(example.bars[-1], example.spec).split(",")[4] == asked[EXACT_VALUE.name]


def test_they_are_drawn_once_and_fewer_are_the_first_of_more() -> None:
    few, many = worked_examples(2), worked_examples(8)
    worked_examples.cache_clear()
    again = worked_examples(8)
    for one, other in zip((*few, *again), (*many[:2], *many), strict=True):
        assert (one.bars == other.bars).all()
        assert one.answers == other.answers


def test_two_examples_give_most_questions_both_answers() -> None:
    given = defaultdict(set)
    for example in worked_examples(2):
        for question, answer in example.answers:
            given[question.name].add(answer)
    both = [name for name, answers in given.items() if len(answers) == 2 and name != EXACT_VALUE.name]
    assert len(both) > len(RULES) / 2
    assert {"trend", "recent_high", "volume", "range_location"} <= set(both)
