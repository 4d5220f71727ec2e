"""Generated tapes: uptrends, corrections, consolidations and random walks with microstructure noise.

The first three regimes are those of *Attention Once* section 4.2; jumps, gaps, volume regimes and price
scales are added, so that a model can't learn one scale. Everything is drawn from one `numpy` generator and
is equal for equal seeds. `EVALUATION` is wider than `TRAINING` in every range.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ingest.compact import CENTRE, CODES_PER_DECADE, HIGHEST
from tapes.rules import Floats, Ints, Levels

UP, DOWN, SIDEWAYS, WALK = range(4)


@dataclass(frozen=True)
class Ranges:
    """What tapes are drawn from; lengths in bars, prices in standard deviations of a bar's close."""

    segment: tuple[int, int] = (5, 36)
    regimes: tuple[float, ...] = (0.27, 0.22, 0.28, 0.23)
    drift: float = 0.5
    spread: float = 0.3
    """Standard deviation of the log volatility between segments."""
    calm: tuple[float, float] = (0.2, 0.6)
    """Volatility of a consolidation, as a share of the others'."""
    pull: tuple[float, float] = (0.05, 0.5)
    """Share of the way back to its centre that a consolidation goes in a bar."""
    tails: float = 0.0
    """Degrees of freedom of Student's t; 0 is normal."""
    bounce: tuple[float, float] = (0.0, 0.35)
    """Bid-ask bounce of a close."""
    jump: float = 0.012
    gap: float = 0.15
    wick: tuple[float, float] = (0.12, 0.8)
    units: tuple[float, float] = (1.0, 32.0)
    """Price units in a standard deviation."""
    volume_segment: tuple[int, int] = (3, 28)
    volume_step: float = 0.5
    volume_noise: tuple[float, float] = (0.12, 0.7)
    burst: float = 0.025
    no_volume: float = 0.03
    """Share of tapes without any volume, such as those of an index or of quotes."""
    thin: float = 0.06
    """Share of tapes where some bars have none."""
    percent: tuple[float, float] = (8.0, 2000.0)
    """Price units in one percent of the price; the line prints at most 999."""


TRAINING = Ranges()
EVALUATION = Ranges(
    segment=(5, 46),
    regimes=(0.26, 0.25, 0.24, 0.25),
    drift=0.55,
    spread=0.36,
    calm=(0.18, 0.66),
    pull=(0.03, 0.55),
    tails=5.0,
    bounce=(0.0, 0.4),
    jump=0.015,
    gap=0.2,
    wick=(0.1, 0.9),
    units=(0.9, 38.0),
    volume_segment=(3, 36),
    volume_step=0.56,
    volume_noise=(0.1, 0.8),
    burst=0.03,
    no_volume=0.04,
    thin=0.08,
    percent=(6.0, 2500.0),
)


def generate(
    rng: np.random.Generator, tapes: int, bars: int, ranges: Ranges = TRAINING, window: int = 0
) -> Levels:
    """``tapes`` tapes of ``bars`` bars. The labels of a reader of ``window`` bars (0: of all)."""
    at = np.arange(tapes)[:, None]
    shape = (tapes, bars)
    segment, centre_from = _segments(rng, shape, ranges.segment)
    n = segment.max() + 1
    regime = rng.choice(4, (tapes, n), p=ranges.regimes)[at, segment]
    mean = (np.abs(rng.normal(0, ranges.drift, (tapes, n))) + 0.03)[at, segment]
    volatility = np.exp(rng.normal(0, ranges.spread, (tapes, n)))[at, segment]
    volatility = volatility * np.where(
        regime == SIDEWAYS, rng.uniform(*ranges.calm, (tapes, n))[at, segment], 1.0
    )
    volatility = volatility * np.where(regime == DOWN, 1.2, 1.0)
    noise = rng.standard_t(ranges.tails, shape) * 0.775 if ranges.tails else rng.normal(size=shape)
    drift = np.where(regime == UP, mean, np.where(regime == DOWN, -1.2 * mean, 0.0))
    shock = (rng.random(shape) < ranges.jump) * rng.normal(0, 5.0, shape)
    pull = np.where(regime == SIDEWAYS, rng.uniform(*ranges.pull, (tapes, n))[at, segment], 0.0)
    step = volatility * (noise + drift) + shock
    path = _walk(step, pull, centre_from)
    close = path + rng.uniform(*ranges.bounce, (tapes, 1)) * volatility * rng.choice((-1.0, 1.0), shape)
    gap = (rng.random(shape) < ranges.gap) * rng.normal(0, 0.4, shape) * volatility
    opened = np.concatenate([close[:, :1] - step[:, :1], close[:, :-1]], 1) + gap
    wick = rng.uniform(*ranges.wick, (tapes, 1)) * volatility
    high = np.maximum(opened, close) + rng.exponential(1.0, shape) * wick
    low = np.minimum(opened, close) - rng.exponential(1.0, shape) * wick
    opened, high, low, close = _in_units(rng, (opened, high, low, close), ranges)
    volume = _volumes(rng, shape, np.abs(step), ranges)
    percent = np.exp(rng.uniform(np.log(ranges.percent[0]), np.log(ranges.percent[1]), tapes)).astype(
        np.int64
    )
    return Levels(opened, high, low, close, volume, np.clip(percent, 1, HIGHEST), window)


def _segments(
    rng: np.random.Generator, shape: tuple[int, int], lengths: tuple[int, int]
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The segment of each bar, and whether a bar begins one."""
    tapes, bars = shape
    n = bars // lengths[0] + 2
    ends = np.cumsum(rng.integers(*lengths, (tapes, n)), 1) - rng.integers(0, lengths[0], (tapes, 1))
    segment = (np.arange(bars)[None, :, None] >= ends[:, None, :]).sum(-1)
    begins = np.concatenate([np.ones((tapes, 1), bool), segment[:, 1:] != segment[:, :-1]], 1)
    return segment, begins


def _walk(step: Floats, pull: Floats, begins: npt.NDArray[np.bool_]) -> Floats:
    """The sum of the steps, drawn back by ``pull`` to the price at which the segment began."""
    path = np.empty_like(step)
    price = np.zeros(step.shape[0])
    centre = price.copy()
    for t in range(step.shape[1]):
        centre = np.where(begins[:, t], price, centre)
        price = price + step[:, t] - pull[:, t] * (price - centre)
        path[:, t] = price
    return path


def _in_units(
    rng: np.random.Generator, prices: tuple[Floats, ...], ranges: Ranges
) -> tuple[Ints, Ints, Ints, Ints]:
    """Prices as levels, somewhere between the lowest and the highest one."""
    _, high, low, _ = prices
    bottom, span = low.min(1), high.max(1) - low.min(1)
    most = 990.0 / span
    least, largest = ranges.units
    scale = np.minimum(np.exp(rng.uniform(np.log(least), np.log(largest), len(span))), most)
    offset = rng.random(len(span)) * np.maximum(995.0 - span * scale, 0.0) + 2.0 - bottom * scale
    o, h, lowest, c = (
        np.clip(np.rint(x * scale[:, None] + offset[:, None]), 0, HIGHEST).astype(np.int64) for x in prices
    )
    return o, h, lowest, c


def _volumes(rng: np.random.Generator, shape: tuple[int, int], moves: Floats, ranges: Ranges) -> Ints:
    """Volume codes: regimes of their own, larger with larger moves; 0 where nothing was traded."""
    tapes, _ = shape
    segment, _ = _segments(rng, shape, ranges.volume_segment)
    regime = rng.normal(0, ranges.volume_step, (tapes, segment.max() + 1))[np.arange(tapes)[:, None], segment]
    log_volume = (
        regime
        + rng.uniform(*ranges.volume_noise, (tapes, 1)) * rng.normal(size=shape)
        + 0.25 * np.log1p(moves)
        + (rng.random(shape) < ranges.burst) * rng.exponential(1.2, shape)
        + rng.normal(0, 0.5, (tapes, 1))
    )
    codes: Ints = np.clip(np.rint(CENTRE + CODES_PER_DECADE * log_volume / np.log(10)), 1, HIGHEST).astype(
        np.int64
    )
    kind = rng.random((tapes, 1))
    empty = np.where(kind < ranges.thin, rng.uniform(0.02, 0.6, (tapes, 1)), 0.0)
    codes[rng.random(shape) < np.where(kind > 1 - ranges.no_volume, 1.0, empty)] = 0
    return codes
