"""Which answers each `publish_when` publishes, against series of answers."""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from flash.publishing import PublishedValue, suppressed
from flash.question import Question


def series(question: Question, answers: Sequence[dict[str, Any]]) -> list[str | None]:
    """Why each answer is suppressed; None: it is published. Versions count from 1."""
    last: PublishedValue | None = None
    reasons: list[str | None] = []
    for version, members in enumerate(answers, 1):
        said = replace(PublishedValue(version, "UP", None, None, 1.5), **members)
        reasons.append(suppressed(question, said, last))
        if reasons[-1] is None:
            last = said
    return reasons


def asked(**policy: Any) -> Question:
    return Question("q", "Up?", **policy)


def texts(*answers: str) -> list[dict[str, Any]]:
    return [{"text": text} for text in answers]


def numbers(*values: str | None) -> list[dict[str, Any]]:
    return [{"text": value or "none", "value": None if value is None else Decimal(value)} for value in values]


def test_always_publishes_everything() -> None:
    assert series(asked(), texts("UP", "UP")) == [None, None]


def test_changed_publishes_the_first_answer_and_then_each_change() -> None:
    found = series(asked(publish_when="changed"), texts("UP", "UP", "DOWN", "DOWN", "UP"))
    assert found == [None, "unchanged", None, "unchanged", None]


def test_confident_takes_the_probability_and_the_gap_only_without_one() -> None:
    question = asked(publish_when="confident", min_probability=0.7, min_logit_gap=1.0)
    pairs = [(0.7, 0.0), (0.69, 9.0), (None, 1.0), (None, 0.99)]
    answers = [{"probability": probability, "logit_gap": gap} for probability, gap in pairs]
    assert series(question, answers) == [None, "low_confidence", None, "low_confidence"]


def test_crossed_publishes_a_number_on_the_other_side_of_the_level() -> None:
    question = asked(publish_when="crossed", level="100.5")
    values = ["100.4", "99", "100.5", "100.500000001", None, "-100.5", "1", "200"]
    out = "not_crossed"
    assert series(question, numbers(*values)) == [None, out, None, out, out, None, out, None]


def test_crossed_waits_for_the_first_number() -> None:
    question = asked(publish_when="crossed", level="1")
    assert series(question, numbers(None, "0", None, "2")) == ["not_crossed", None, "not_crossed", None]


def test_every_counts_data_versions_also_skipped_ones() -> None:
    question = asked(publish_when="every", publish_every=3)
    answers = [{"version": version} for version in (5, 6, 7, 8, 12, 14, 15)]
    out = "not_due"
    assert series(question, answers) == [None, out, out, None, None, out, None]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"publish_when": "crossed", "choices": ("A", "B")}, "only a number crosses"),
        ({"level": "high"}, "level 'high' is not a plain decimal"),
        ({"publish_every": 0}, "publish_every must be at least 1"),
    ],
)
def test_contradictory_policies_are_refused(members: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked(**members)


def test_a_policy_does_not_change_the_identity_of_a_question() -> None:
    assert asked(publish_when="changed").hash == asked().hash
