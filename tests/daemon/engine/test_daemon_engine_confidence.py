"""A standing answer is judged, and labelled, by what was fitted for the way it was asked."""

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from daemon.config.schema import Config, FlashConfig, ModelConfig, QuestionConfig, SessionConfig
from daemon.engine.confidence_metrics import Confidence
from flash.confidence import COVERAGE, UNCALIBRATED, Calibration, QuestionCalibration
from flash.late_labels import LabelError
from flash.learnt_calibration import LEAST, fitted_on
from flash.question import PreparedQuestion, Question
from flash.registry import BadQuestion, Standing
from metrics.catalogue import BY_NAME
from metrics.store import MetricStore

TREND = Question("trend", "Up or down?", ("UP", "DOWN"))
TEXT, NUMBER, LOGITS = (1, 2, 3), (4,), (2.0, 1.0)
STANDING = Standing("a", TREND, TREND.hash, PreparedQuestion(TEXT, (5, 6), frozenset()))
BY_TEXT = QuestionCalibration(
    name="trend",
    text=TREND.text,
    choices=["UP", "DOWN"],
    temperature=1.0,
    scores=[0.5],
    labels=1,
    mean_gap=1.0,
)
BY_NUMBER = replace(BY_TEXT, temperature=4.0, numbered=True)


def confidence(*fitted: QuestionCalibration, remembered: int = 100, **model: Any) -> Confidence:
    """Of a session whose prefix has numbered questions, though not always each of them."""
    config = Config(
        model=ModelConfig(remembered_answers=remembered, **model),
        sessions=(SessionConfig(name="a", symbol="V:A"),),
        flash=FlashConfig(placement="frozen"),
    )
    calibration = Calibration(model="m", lines="compact", data={}, questions=list(fitted))
    store = MetricStore.local({"session": ["a"], "source": [], "sink": []})
    return Confidence(config, cast(Any, SimpleNamespace(terse=None)), calibration, store)


def refused(judge: Confidence, version: int) -> str:
    with pytest.raises(LabelError) as error:
        judge.label(STANDING, version, "UP")
    return error.value.code


@pytest.mark.parametrize(("fitted", "asked", "other"), [(BY_TEXT, TEXT, NUMBER), (BY_NUMBER, NUMBER, TEXT)])
def test_an_answer_is_judged_and_labelled_as_it_was_asked(
    fitted: QuestionCalibration, asked: tuple[int, ...], other: tuple[int, ...]
) -> None:
    judge = confidence(fitted)
    assert refused(judge, 1) == "unknown_version", "nothing is answered yet"
    assert judge.of_standing(STANDING, 1, LOGITS, "UP", other) is None
    assert judge.label(STANDING, 1, "UP").right, "it is remembered all the same"
    judged = judge.of_standing(STANDING, 2, LOGITS, "UP", asked)
    assert judged is not None
    assert judged.probability == fitted.probabilities(LOGITS)[0]
    assert judge.label(STANDING, 2, "UP").right
    assert refused(judge, 2) == "repeated"


def test_there_is_always_a_reason_where_nothing_is_judged() -> None:
    judge = confidence(BY_TEXT)
    other, free = (dataclasses.replace(TREND, choices=each) for each in (("UP", "FLAT"), None))
    found = [judge.uncalibrated(each) for each in (TREND, other, free, None)]
    assert found == ["by_number", "not_calibrated", "free_text", "no_session"]
    off = confidence(calibration="off")
    assert off.uncalibrated(TREND) == "off"
    assert {*found, "off"} <= UNCALIBRATED.keys()


def test_each_way_of_asking_has_its_own_calibration() -> None:
    judge = confidence(BY_TEXT, BY_NUMBER)
    found = [judge.of_standing(STANDING, n, LOGITS, "UP", asked) for n, asked in enumerate((TEXT, NUMBER))]
    expected = [each.probabilities(LOGITS)[0] for each in (BY_TEXT, BY_NUMBER)]
    assert [judged and judged.probability for judged in found] == expected
    assert all(judge.label(STANDING, version, "UP").right for version in (0, 1))


ASKED = Config(
    standing="none",
    sessions=(SessionConfig(name="a", symbol="V:A"),),
    questions=(QuestionConfig("trend", TREND.text, ("UP", "DOWN")), QuestionConfig("why", "Why?")),
)


def test_questions_whose_answers_have_no_probability_are_known_before_any_is_asked() -> None:
    def found(by_number: bool, *fitted: QuestionCalibration) -> dict[tuple[str, str], str]:
        return confidence(*fitted).unjudged(ASKED, lambda question: by_number)

    free = {("a", "why"): "free_text"}
    assert found(False, BY_TEXT) == found(True, BY_NUMBER) == free
    assert found(True, BY_TEXT) == free | {("a", "trend"): "by_number"}
    assert found(False, BY_NUMBER) == found(False) == free | {("a", "trend"): "not_calibrated"}


def test_labels_calibrate_a_question_without_a_calibration_over_a_restart() -> None:
    judge, choices = confidence(), ("UP", "DOWN")
    pairs = [((n % 7 - 3.0, 0.0), n % 7 * 3 % 5 % 2) for n in range(LEAST)]
    packed = np.array([[*logits, right] for logits, right in pairs])
    for version, (logits, right) in enumerate(pairs):
        choice = "UP" if logits[0] > 0 else "DOWN"
        assert judge.of_standing(STANDING, version, logits, choice, TEXT) is None
        if version == LEAST // 2:
            judge, before = confidence(), judge
            judge.restore("a", before.cut("a"))
            waits = before.waiting("a", [(TREND.hash, version)])
            judge.remember("a", waits)
        assert judge.label(STANDING, version, choices[right]).right == (choice == choices[right])
    fitted = fitted_on(TREND.hash, choices, packed, numbered=False)
    assert fitted is not None
    judged = judge.of_standing(STANDING, LEAST, LOGITS, "UP", TEXT)
    assert judged is not None
    assert judged.probability == fitted.probabilities(LOGITS)[0]
    assert judged.choice_set == fitted.choice_set(LOGITS, COVERAGE)
    assert judge.of("a", TREND, LOGITS, "UP") == judged
    assert judge.of_standing(STANDING, 0, LOGITS, "UP", NUMBER) is None, "asked another way"
    assert judge.unjudged(ASKED, lambda question: False) == {("a", "why"): "free_text"}
    off = confidence(calibration="off")
    off.restore("a", judge.cut("a"))
    assert off.of("a", TREND, LOGITS, "UP") is None


def test_an_answer_that_is_repeated_is_judged_and_neither_counted_nor_labelled() -> None:
    judge = confidence(BY_TEXT)
    again = judge.of_standing(STANDING, None, LOGITS, "UP", TEXT)
    assert again == judge.of_standing(STANDING, 1, LOGITS, "UP", TEXT)
    assert judge.label(STANDING, 1, "UP").right
    sizes = [
        judge._store.value("foretick_choice_sets_total", session="a", size=s) for s in ("one", "several")
    ]
    assert sum(sizes) == 1


def test_sessions_share_evenly_what_is_remembered_whenever_they_come() -> None:
    judge = confidence(BY_TEXT, remembered=4)
    for version in range(1, 6):
        judge.of_standing(STANDING, version, LOGITS, "UP", TEXT)
    assert refused(judge, 1) == "unknown_version"
    judge._store.add_session("b")
    judge.add("b")
    assert [refused(judge, version) for version in (2, 3)] == ["unknown_version"] * 2
    judge.remove("b")
    for version in range(6, 8):
        judge.of_standing(STANDING, version, LOGITS, "UP", TEXT)
    assert all(judge.label(STANDING, version, "UP").right for version in (4, 5, 6, 7))
    nothing = confidence(BY_TEXT, remembered=0)
    assert nothing.of_standing(STANDING, 1, LOGITS, "UP", TEXT) is not None
    assert refused(nothing, 1) == "unknown_version"


def within(error: float | None) -> Standing:
    """The question with a `max_error`."""
    asked = dataclasses.replace(TREND, max_error=error)
    return dataclasses.replace(STANDING, question=asked)


SURE = replace(BY_TEXT, temperature=0.1)


def test_answers_are_marked_where_an_error_is_to_be_kept() -> None:
    judge = confidence(SURE)
    plain = judge.of_standing(STANDING, 1, LOGITS, "UP", TEXT)
    assert plain is not None
    assert plain.act is None
    assert judge.of("a", TREND, LOGITS, "UP") == plain
    marked = judge.of_standing(within(0.02), 2, LOGITS, "UP", TEXT)
    assert marked is not None
    assert (marked.act, marked.abstain_reason) == (True, None)
    assert judge.of("a", TREND, LOGITS, "UP") == marked, "an ask gets the same"
    assert judge._store.value("foretick_acted_total", session="a") == 1
    assert not judge.label(within(0.02), 2, "DOWN").right
    assert judge._store.value("foretick_acted_error_ratio", session="a") == 1.0
    unmarked = judge.of_standing(STANDING, 3, LOGITS, "UP", TEXT)
    assert unmarked is not None
    assert unmarked.act is None, "the question has no max_error any more"
    judge.keep("a", [STANDING])
    asked = judge.of("a", TREND, LOGITS, "UP")
    assert asked is not None
    assert asked.act is None
    judge.of_standing(within(0.02), 4, LOGITS, "UP", TEXT)
    judge.label(within(0.02), 4, "UP")
    assert judge._store.value("foretick_acted_error_ratio", session="a") == 0.5, "it was only paused"


def test_no_error_is_shown_before_a_label_of_an_answer_that_was_acted_on() -> None:
    def shown(judge: Confidence) -> dict[str, float]:
        readings = judge._store.readings(BY_NAME["foretick_acted_error_ratio"])
        return {labels["session"]: value for labels, value in readings}

    judge = confidence(SURE)
    judge.of_standing(within(0.02), 1, LOGITS, "UP", TEXT)
    assert shown(judge) == {}
    judge.label(within(0.02), 1, "UP")
    assert shown(judge) == {"a": 0.0}, "it was measured"
    after = confidence(SURE)
    after.restore("a", judge.cut("a"))
    after.keep("a", [within(0.02)])
    assert shown(after) == {"a": 0.0}
    after.keep("a", [within(0.05)])
    assert shown(after) == {}, "labels told of another error"


def test_what_is_below_the_least_probability_is_not_to_be_acted_on() -> None:
    judge = confidence(SURE, abstain_below=0.99999)
    marked = judge.of_standing(within(0.02), 1, LOGITS, "UP", TEXT)
    assert marked is not None
    assert marked.abstained
    assert (marked.act, marked.abstain_reason) == (False, "low_confidence")


def test_an_error_needs_calibrations_and_labels_make_one() -> None:
    off = confidence(calibration="off")
    off.check(TREND)
    with pytest.raises(BadQuestion, match="needs a calibration") as refused:
        off.check(within(0.02).question)
    assert refused.value.member == "max_error"
    judge, asked = confidence(), within(0.02)
    judge.check(asked.question)
    for version in range(LEAST):
        logits, given = ((9.0, 0.0), "UP") if version % 2 else ((0.0, 1.0), "DOWN")
        assert judge.of_standing(asked, version, logits, given, TEXT) is None
        assert judge.of("a", asked.question, logits, given) is None
        judge.label(asked, version, "UP" if version % 8 == 2 else given)
    marked = judge.of_standing(asked, LEAST, (9.0, 0.0), "UP", TEXT)
    assert marked is not None
    assert marked.act is True
    doubted = judge.of_standing(asked, LEAST + 1, (1.0, 0.0), "UP", TEXT)
    assert doubted is not None
    assert (doubted.act, doubted.abstain_reason) == (False, "few_labels")
    judge.label(asked, LEAST, "DOWN")
    assert judge._store.value("foretick_acted_error_ratio", session="a") == 1.0


def test_labels_adapt_a_fitted_calibration_over_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    """Its probabilities: choice sets and what is acted on have an adaptation of their own."""
    caplog.set_level("INFO")
    judge, asked = confidence(BY_TEXT), within(0.02)
    plain = judge.of_standing(asked, None, (6.0, 0.0), "UP", TEXT)
    assert plain is not None
    for version in range(LEAST):
        judge.of_standing(asked, version, (6.0, 0.0), "UP", TEXT)
        judge.label(asked, version, "DOWN" if version % 5 == 0 else "UP")
    assert judge._store.value("foretick_adapted_calibrations", session="a") == 1
    assert caplog.messages == ["probabilities of a/trend are now adapted by labels"]
    adapted = judge.of_standing(asked, None, (6.0, 0.0), "UP", TEXT)
    assert adapted is not None
    assert plain.probability > 0.99
    assert adapted.probability == pytest.approx(0.8, abs=0.05)
    after = confidence(BY_TEXT)
    after.restore("a", judge.cut("a"))
    assert after.of_standing(asked, None, (6.0, 0.0), "UP", TEXT) == adapted
    assert after.of("a", asked.question, (6.0, 0.0), "UP") == adapted
    assert after.of_standing(asked, None, (6.0, 0.0), "UP", NUMBER) is None, "asked another way"
    for version in range(LEAST, LEAST + 1_500):
        after.of_standing(asked, version, (6.0, 0.0), "UP", TEXT)
        after.label(asked, version, "DOWN" if version % 400 == 0 else "UP")
    assert after._store.value("foretick_adapted_calibrations", session="a") == 0
    assert caplog.messages[1:] == ["probabilities of a/trend are now those of the calibration"]
