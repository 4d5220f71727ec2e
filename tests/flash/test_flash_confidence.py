"""Probabilities, choice sets and scores of confidence: against brute force and values known in advance."""

from math import ceil, exp, inf
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash.confidence import (
    AdaptiveCoverage,
    Calibration,
    CalibrationCurve,
    CalibrationError,
    QuestionCalibration,
    judge,
    read_calibration,
    threshold,
    write_calibration,
)
from tests.kit.tolerance import near, of_float64
from training.scores import order_statistics

EXACT = of_float64(1.0)


def fitted(
    temperature: float = 2.0,
    curves: tuple[CalibrationCurve, ...] = (),
    scores: tuple[float, ...] = (0.1, 0.3, 0.6, 0.9),
) -> QuestionCalibration:
    return QuestionCalibration(
        name="trend",
        text="Up or down?",
        choices=["UP", "DOWN"],
        temperature=temperature,
        curves=list(curves),
        scores=list(scores),
        labels=len(scores),
        mean_gap=3.0,
    )


class TestProbability:
    def test_a_temperature_divides_the_logits(self) -> None:
        up, down = fitted(2.0).probabilities([3.0, 1.0])
        assert up == near(1 / (1 + exp(-1.0)), EXACT)
        assert up + down == near(1.0, EXACT)

    def test_large_logits_do_not_overflow(self) -> None:
        assert fitted(0.01).probabilities([5000.0, -5000.0]) == [1.0, 0.0]

    def test_curves_apply_behind_the_temperature_and_sum_to_one(self) -> None:
        curves = (CalibrationCurve([0.0, 1.0], [0.1, 0.5]), CalibrationCurve([0.0, 1.0], [0.3, 0.3]))
        up, down = fitted(1.0, curves).probabilities([0.0, 0.0])
        assert (up, down) == (near(0.5, EXACT), near(0.5, EXACT))
        up, down = fitted(1.0, curves).probabilities([50.0, 0.0])
        assert up == near(0.5 / 0.8, EXACT)

    @given(value=st.floats(-1, 2), n=st.integers(1, 6))
    def test_a_curve_is_interpolation(self, value: float, n: int) -> None:
        x = [i / 5 for i in range(n)]
        y = [i * i / 25 for i in range(n)]
        assert CalibrationCurve(x, y)(value) == near(float(np.interp(value, x, y)), EXACT)


class TestChoiceSets:
    @given(
        scores=st.lists(st.integers(0, 20), min_size=1, max_size=40),
        coverage=st.sampled_from((0.5, 0.8, 0.9, 0.99)),
    )
    def test_the_threshold_is_the_conformal_quantile(self, scores: list[int], coverage: float) -> None:
        """The ceil((n + 1) coverage)-th smallest."""
        found = threshold(order_statistics(np.array(scores, float)), len(scores), coverage)
        rank = ceil(round((len(scores) + 1) * coverage, 9))
        assert found == (inf if rank > len(scores) else sorted(scores)[rank - 1])

    @given(n=st.integers(1, 400), most=st.integers(1, 50), coverage=st.floats(0.01, 0.999))
    def test_fewer_order_statistics_never_cover_less(self, n: int, most: int, coverage: float) -> None:
        scores = np.random.default_rng(n).random(n)
        thinned = threshold(order_statistics(scores, most), n, coverage)
        full = threshold(order_statistics(scores, n), n, coverage)
        assert thinned >= full
        assert np.mean((scores > full) & (scores <= thinned)) <= 1 / min(most, n) + EXACT

    def test_coverage_of_exchangeable_data_is_the_one_asked_for(self) -> None:
        """Over many splits, but for the noise of the mean: 90 of 100 ranks are covered."""
        rng, held = np.random.default_rng(0), []
        for _ in range(2000):
            scores = rng.random(100)
            limit = threshold(order_statistics(scores[:99]), 99, 0.9)
            held.append(scores[99] <= limit)
        assert abs(np.mean(held) - 0.9) < 4 * (0.09 / 2000) ** 0.5

    def test_sets_grow_with_coverage_and_list_the_likeliest_first(self) -> None:
        question = fitted(1.0)
        logits = [0.0, 1.0]  # DOWN at 0.73: scores 0.73 and 0.27
        sizes = [question.choice_set(logits, coverage) for coverage in (0.1, 0.4, 0.5, 0.99)]
        assert sizes == [(), ("DOWN",), ("DOWN",), ("DOWN", "UP")]

    def test_nothing_is_kept_below_a_coverage_of_zero_and_everything_at_one(self) -> None:
        assert fitted().choice_set([9.0, 0.0], -0.1) == ()
        assert set(fitted().choice_set([90.0, 0.0], 1.0)) == {"UP", "DOWN"}

    def test_judge_gives_probability_set_and_abstention_of_the_given_answer(self) -> None:
        found = judge(fitted(1.0), [1.0, 0.0], 0, 0.5, 0.8)
        assert found.probability == near(1 / (1 + exp(-1.0)), EXACT)
        assert found.choice_set == ("UP",)
        assert found.abstained
        assert not judge(fitted(1.0), [1.0, 0.0], 0, 0.5, 0.7).abstained


class TestAdaptiveCoverage:
    def test_a_miss_asks_for_more_and_a_hit_for_a_little_less(self) -> None:
        start = AdaptiveCoverage.of(0.9, 0.01)
        assert start.after(False).asked == near(0.9 + 0.009, EXACT)
        assert start.after(True).asked == near(0.9 - 0.001, EXACT)

    @settings(max_examples=30)
    @given(seed=st.integers(0, 1000), drift=st.floats(-0.9, 0.9))
    def test_the_share_covered_is_kept_whatever_the_data_do(self, seed: int, drift: float) -> None:
        """Scores whose scale drifts away from the calibration's; the bound is the paper's proposition 4.1."""
        rng = np.random.default_rng(seed)
        scores = order_statistics(rng.random(200))
        state, covered, steps = AdaptiveCoverage.of(0.9, 0.05), 0, 600
        for step in range(steps):
            score = rng.random() * (1 + drift * step / steps)
            hit = bool(score <= threshold(scores, 200, state.asked))
            covered += hit
            state = state.after(hit)
        assert abs(covered / steps - 0.9) <= (0.9 + 0.05) / (0.05 * steps) + EXACT


class TestFile:
    @staticmethod
    def written(path: Path) -> Calibration:
        found = Calibration(
            model="0123abcd",
            lines="compact",
            data={"tape": "generated", "seed": 7},
            questions=[fitted()],
        )
        write_calibration(path, found)
        return found

    def test_it_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        path = tmp_path / "calibration.json"
        expected = self.written(path)
        assert read_calibration(path, "0123abcd", "compact") == expected

    def test_a_question_is_found_by_name_or_text_with_its_choices_in_order(self, tmp_path: Path) -> None:
        found = self.written(tmp_path / "calibration.json")
        assert found.find("trend", ("UP", "DOWN")) == found.find("Up or down?", ("UP", "DOWN")) == fitted()
        assert found.find("trend", ("DOWN", "UP")) is None
        assert found.find("trend", ("UP", "DOWN", "NONE")) is None
        assert found.find("volume", ("UP", "DOWN")) is None

    def test_a_question_asked_by_number_has_a_calibration_of_its_own(self) -> None:
        numbered = msgspec.structs.replace(fitted(), numbered=True, temperature=3.0)
        found = Calibration(model="m", lines="compact", data={}, questions=[fitted(), numbered])
        assert found.find("trend", ("UP", "DOWN")) == fitted()
        assert found.find("trend", ("UP", "DOWN"), numbered=True) == numbered
        one = msgspec.structs.replace(found, questions=[fitted()])
        assert one.find("trend", ("UP", "DOWN"), numbered=True) is None

    @pytest.mark.parametrize(
        ("model", "lines", "message"),
        [
            (
                "ffff0000",
                "compact",
                "was fitted for model 0123abcd, this one is ffff0000; fit it again",
            ),
            (
                "0123abcd",
                "decimal",
                "was fitted on 'compact' lines, this session writes 'decimal'; fit it",
            ),
        ],
    )
    def test_another_model_or_line_schema_is_refused(
        self, tmp_path: Path, model: str, lines: str, message: str
    ) -> None:
        path = tmp_path / "calibration.json"
        self.written(path)
        with pytest.raises(CalibrationError, match=message):
            read_calibration(path, model, lines)

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "calibration.json"
        with pytest.raises(CalibrationError, match="calibration"):
            read_calibration(path, "a", "b")
        path.write_text("{}")
        with pytest.raises(CalibrationError, match="is no calibration"):
            read_calibration(path, "a", "b")
        self.written(path)
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | {"version": 2}))
        with pytest.raises(CalibrationError, match="version 2"):
            read_calibration(path, "0123abcd", "compact")
