"""Walk-forward evaluation: nothing leaks back, there is no skill in noise, and planted skill is found."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapes.rules import Floats, Ints
from training.ahead_card import NO_SKILL, Skill, lines_of, score_ahead, verdict
from training.walk_forward import (
    Decisions,
    Fold,
    WalkForwardError,
    base_rate,
    block_length,
    climatology,
    fit_in_time,
    folds,
    forecast,
    interval,
    skill,
)

HORIZON = 10
SEEDS = 100
STATED, MARGIN = 0.025, 0.055
"""A 95 % interval lies above 0 by chance in 2.5 %; of 100 seeds more than 8 say that it does more often."""


def walk(
    seed: int, answers: int = 1_200, horizon: int = HORIZON, told: float = 0.0, rise: float = 0.0
) -> Decisions:
    """A random walk, and whether it is higher by ``rise`` after the horizon.

    Answers, at every other bar, and features look at the past only, so there is nothing to find, but for what
    an oracle, which knows the move to come, tells with the weight ``told``.
    """
    rng, stride = np.random.default_rng([99, seed]), 2
    price = np.cumsum(rng.standard_normal(answers * stride + horizon + 20))
    bar = 20 + stride * np.arange(answers)
    ahead = price[bar + horizon] - price[bar]
    past = np.stack([price[bar] - price[bar - k] for k in (1, 5, 20)], axis=1)
    edge = past @ np.array([0.3, -0.2, 0.1]) + told * ahead + rng.standard_normal(answers)
    label = np.where(ahead > rise, 0, 1)
    logits = np.stack([edge, -edge], axis=1)
    return Decisions("q", "Higher?", ("YES", "NO"), horizon, bar, bar * 60 * 10**9, logits, label, past)


def test_a_random_walk_has_no_skill() -> None:
    """Neither the answers nor the plain model; in as many seeds as the interval states, with a margin."""
    found = [score_ahead(walk(seed, 900, rise=seed % 2 * 2.0), 4) for seed in range(SEEDS)]
    wrong = [each for each in found if each.verdict != NO_SKILL]
    assert len(wrong) <= (STATED + MARGIN) * SEEDS
    assert sum(each.plain_skill.brier.low > 0 for each in found) <= (STATED + MARGIN) * SEEDS
    assert all("q: no skill" in next(lines_of(each)) for each in found if each not in wrong)


def test_an_oracle_has_skill_over_the_base_rate_and_the_plain_model() -> None:
    found = [score_ahead(walk(seed, 1_500, told=0.3), 5) for seed in range(4)]
    for each in found:
        assert each.verdict == "skill"
        assert each.skill.log.low > 0
        assert each.plain_skill.brier.low < 0.02
        assert each.balanced.low > 0.6
        assert abs(each.covered - 0.9) < 0.06
        assert each.calibration_error < 0.08


def test_skill_that_the_plain_model_has_too_is_said_to_be_no_more() -> None:
    """What comes next follows from the last move, which both know."""
    d = walk(1, 1_500)
    rng = np.random.default_rng(5)
    label = np.where(d.features[:, 0] + 0.5 * rng.standard_normal(len(d.label)) > 0, 0, 1)
    logits = np.stack([d.features[:, 0], -d.features[:, 0]], axis=1)
    found = score_ahead(replace(d, label=label, logits=logits), 5)
    assert found.verdict == "skill over the base rate, none over the plain model"


def changed(d: Decisions, from_bar: int, *, labels_only: bool = False, seed: int = 1) -> Decisions:
    """The same answers, but for all that becomes known at ``from_bar`` or later, which is shuffled."""
    rng = np.random.default_rng(seed)

    def shuffled(column: Floats, which: Ints) -> Floats:
        out = column.copy()
        out[which] = column[rng.permutation(which)]
        return out

    later = np.flatnonzero(d.bar + d.horizon >= from_bar)
    label = np.where(np.isin(np.arange(len(d.label)), later), 1 - d.label, d.label)
    if labels_only:
        return replace(d, label=label)
    behind = np.flatnonzero(d.bar > from_bar)
    return replace(d, label=label, logits=shuffled(d.logits, behind), features=shuffled(d.features, behind))


def leaks(d: Decisions, fold: Fold) -> bool:
    """The canary: whether a fold's forecasts change with labels that are not known when its first answer is
    given, or with what comes behind its last one.
    """
    first, last = int(d.bar[fold.test[0]]), int(d.bar[fold.test[-1]])
    made = forecast(d, fold)
    for other in (changed(d, first, labels_only=True), changed(d, last + 1)):
        again = forecast(replace(other, label=changed(d, first, labels_only=True).label), fold)
        same = np.array_equal(made.model, again.model) and np.array_equal(made.plain, again.plain)
        if not same or made.fitted != again.fitted:
            return True
    return False


def test_nothing_leaks_back_into_a_fold() -> None:
    d = walk(3, told=0.2)
    for fold in folds(d.bar, d.horizon, 4, d.horizon):
        assert not leaks(d, fold)


@pytest.mark.parametrize("leak", ["no purge", "next fold", "random"])
def test_a_split_that_leaks_is_caught(leak: str) -> None:
    d = walk(3, told=0.2)
    fold = folds(d.bar, d.horizon, 4, d.horizon)[1]
    begin, end = int(fold.test[0]), int(fold.test[-1]) + 1
    train = {
        "no purge": np.arange(begin),
        "next fold": np.append(fold.train, np.arange(end, len(d.bar))),
        "random": np.sort(np.random.default_rng(0).permutation(len(d.bar))[: len(fold.train)]),
    }[leak]
    assert leaks(d, Fold(train, fold.test))


def test_the_base_rate_is_of_the_labels_that_were_known() -> None:
    """By brute force; labels to come change nothing."""
    d = walk(2, 60)
    test = np.arange(20, 60)
    found = climatology(d, test)
    for row, index in enumerate(test.tolist()):
        known = [i for i in range(len(d.bar)) if d.bar[i] + d.horizon <= d.bar[index]]
        weight = [1.0 if i == 0 else (d.bar[i] - d.bar[i - 1]) / d.horizon for i in known]
        first = sum(w for i, w in zip(known, weight, strict=True) if d.label[i] == 0)
        assert found[row, 0] == pytest.approx((first + 1) / (sum(weight) + 2))
        other = changed(d, int(d.bar[index]) + 1, labels_only=True)
        assert np.array_equal(climatology(other, test[row : row + 1])[0], found[row])


@given(
    steps=st.lists(st.integers(1, 9), min_size=12, max_size=90),
    horizon=st.integers(1, 12),
    count=st.integers(1, 6),
    embargo=st.integers(0, 15),
)
@settings(max_examples=200)
def test_folds_are_in_order_purged_and_apart(
    steps: list[int], horizon: int, count: int, embargo: int
) -> None:
    bar = np.cumsum(steps)
    found = folds(bar, horizon, count, embargo)
    for fold in found:
        assert all(bar[i] + horizon < bar[fold.test[0]] for i in fold.train)
        missing = set(range(int(fold.test[0]))) - set(fold.train.tolist())
        assert all(bar[i] + horizon >= bar[fold.test[0]] for i in missing)
        assert fold.test[0] >= len(bar) // 2
        assert np.all(np.diff(fold.test) == 1)
    for before, after in pairwise(found):
        assert bar[after.test[0]] > bar[before.test[-1]] + embargo


def test_a_calibration_of_the_past_keeps_its_halves_apart() -> None:
    """Labels that are known only within the second half have no say in the temperature, nor in the curves."""
    d = walk(4, told=0.3)
    past = np.arange(800)
    middle = int(d.bar[400])
    late = changed(d, middle, labels_only=True)
    a, b = fit_in_time(d, past), fit_in_time(late, past)
    assert a is not None
    assert b is not None
    assert a.temperature == b.temperature
    assert a.scores != b.scores


def test_even_odds_are_the_reference_where_the_past_is_a_poor_one() -> None:
    """As at the beginning of a walk that happened to rise."""
    d = walk(0, 200)
    label = np.where(np.arange(200) < 60, 0, np.arange(200) % 2)
    test = np.arange(100, 200)
    assert np.all(base_rate(replace(d, label=label), test) == 0.5)
    always = replace(d, label=np.zeros(200, np.int64))
    assert np.array_equal(base_rate(always, test), climatology(always, test))


def test_intervals_by_blocks_are_wider_where_answers_go_together() -> None:
    """Of equal neighbours, blocks see how few there are; one at a time, an interval would be too narrow."""
    values = np.repeat(np.random.default_rng(0).standard_normal(60), 20)[:, None] + 1
    one, many = (interval(values, lambda sums: sums[:, 0] / len(values), length) for length in (1, 40))
    assert one[0] == many[0] == pytest.approx(float(values.mean()))
    assert many[2] - many[1] > 2.5 * (one[2] - one[1])


def test_a_block_is_longer_than_the_horizon() -> None:
    for stride in (1, 3, 10, 60):
        bar = stride * np.arange(500)
        assert block_length(bar, 30) * stride > 30


def test_skill_is_0_for_the_reference_itself_and_1_for_certainty() -> None:
    loss = np.random.default_rng(1).random(200)
    assert skill(loss, loss, 5) == (0, 0, 0)
    assert skill(np.zeros(200), loss, 5) == (1, 1, 1)


@pytest.mark.parametrize("low", [0.0, -0.1, float("nan")])
def test_an_interval_that_does_not_lie_above_0_is_no_skill(low: float) -> None:
    assert verdict(Skill(0.2, low, 0.3), Skill(0.2, 0.1, 0.3)) == NO_SKILL


@pytest.mark.parametrize(("answers", "horizon"), [(300, 10), (1_000, 400), (0, 10), (2, 10)])
def test_too_little_is_refused_in_a_sentence(answers: int, horizon: int) -> None:
    with pytest.raises(WalkForwardError, match=r"too few|fewer than") as error:
        score_ahead(walk(1, answers, horizon), 5)
    assert "\n" not in str(error.value)
