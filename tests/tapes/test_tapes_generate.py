"""Generated tapes: equal for equal seeds, within the printable levels, with regimes that show."""

from dataclasses import fields, replace

import numpy as np
import pytest

from tapes.generate import EVALUATION, TRAINING, Ranges, generate
from tapes.rules import Levels

FIELDS = ("open", "high", "low", "close", "volume", "percent")


def only(regime: int) -> Ranges:
    """Tapes of one regime, in units small enough that no tape is clipped."""
    shares = [0.0] * 4
    shares[regime] = 1.0
    return replace(TRAINING, regimes=tuple(shares), jump=0.0)


def drawn(seed: int, ranges: Ranges = TRAINING, tapes: int = 40, bars: int = 96) -> Levels:
    return generate(np.random.default_rng(seed), tapes, bars, ranges)


@pytest.mark.parametrize("ranges", [TRAINING, EVALUATION], ids=["training", "evaluation"])
def test_equal_seeds_make_equal_tapes_and_others_do_not(ranges: Ranges) -> None:
    one, same, other = drawn(1, ranges), drawn(1, ranges), drawn(2, ranges)
    assert all(np.array_equal(getattr(one, name), getattr(same, name)) for name in FIELDS)
    assert not np.array_equal(one.close, other.close)


@pytest.mark.parametrize("ranges", [TRAINING, EVALUATION], ids=["training", "evaluation"])
def test_bars_are_well_formed_and_printable(ranges: Ranges) -> None:
    x = drawn(3, ranges)
    assert np.all((x.low <= np.minimum(x.open, x.close)) & (np.maximum(x.open, x.close) <= x.high))
    assert x.low.min() >= 0
    assert x.high.max() <= 999
    assert x.volume.min() >= 0
    assert x.volume.max() <= 999
    assert x.percent.min() >= 1
    assert x.percent.max() <= 999


def test_each_regime_shows_in_the_closes() -> None:
    """Uptrends rise, corrections fall, consolidations keep a narrower range than random walks."""
    up, down, sideways, walk = (drawn(4, only(regime)) for regime in range(4))

    def risen(x: Levels) -> float:
        return float(np.mean((x.close[:, -1] - x.close[:, 0]) / (x.high.max(1) - x.low.min(1))))

    assert risen(up) > 0.5
    assert risen(down) < -0.5
    assert abs(risen(walk)) < 0.25

    def steps_from_the_middle(x: Levels) -> float:
        """How far closes spread, in steps from one close to the next: a walk's grows with its length."""
        return float(np.mean(x.close.std(1) / np.abs(np.diff(x.close, axis=1)).mean(1)))

    assert steps_from_the_middle(sideways) < 0.6 * steps_from_the_middle(walk)


def test_all_regimes_occur_in_every_range() -> None:
    assert all(share > 0 for ranges in (TRAINING, EVALUATION) for share in ranges.regimes)


def test_evaluation_is_wider_than_training_in_every_range() -> None:
    """Each interval contains training's and is longer; single numbers are larger; shares may move."""
    for field in fields(Ranges):
        training, evaluation = getattr(TRAINING, field.name), getattr(EVALUATION, field.name)
        if field.name == "regimes":
            continue
        if isinstance(training, tuple):
            assert evaluation[0] <= training[0], field.name
            assert evaluation[1] >= training[1], field.name
            assert evaluation[1] - evaluation[0] > training[1] - training[0], field.name
        else:
            assert evaluation > training, field.name


def test_some_tapes_have_no_volume_and_some_have_bars_without_any() -> None:
    empty = (drawn(8, tapes=2000).volume == 0).mean(1)
    assert 0.02 < np.mean(empty == 1) < 0.04
    assert 0.04 < np.mean((empty > 0) & (empty < 1)) < 0.08


def test_volumes_have_regimes_and_grow_with_the_move() -> None:
    x = drawn(7, tapes=200)
    moves = np.abs(np.diff(x.close, axis=1)) / np.abs(np.diff(x.close, axis=1)).mean(1, keepdims=True)
    large, small = x.volume[:, 1:][moves > 2], x.volume[:, 1:][moves < 0.5]
    assert large.mean() > small.mean()
    near = np.mean(np.abs(x.volume[:, 1:] - x.volume[:, :-1]))
    far = np.mean(np.abs(x.volume[:, 40:] - x.volume[:, :-40]))
    assert near < far
