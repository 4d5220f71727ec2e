"""One plain guess per question, from the last bars alone: what a model has to beat.

For the questions of `tapes.rules` it is written down; for a desk's own it is a small decision tree over the
last bars, fitted on half of the tapes for the other half.
"""

from collections.abc import Callable

import numpy as np

from ingest.compact import CENTRE
from tapes.rules import UNDEFINED, VOLUMES, Flags, Floats, Ints, Levels, lag, mean_range, rolling

_DEPTH, _LEAF = 3, 10


def simple_guess(name: str, x: Levels) -> Ints:
    """The index of the guessed choice at every bar, [tapes, bars]. KeyError: an unknown question."""
    if name == "range_location":
        return _third(x)
    return np.where(_FIRST[name](x), 0, 1).astype(np.int64)


def shapes(x: Levels) -> Floats:
    """What the tree reads of every bar, [tapes, bars, 8]: moves, ranges and volumes of the last ten bars."""
    unit, v = mean_range(x), VOLUMES[x.volume]
    high, low = rolling(x.high, 10, np.max), rolling(x.low, 10, np.min)
    usual = np.maximum(rolling(v, 10, np.sum) / 10, 1.0)
    return np.stack(
        [
            (x.close - x.open) / unit,
            _change(x) / unit,
            _change(x, 5) / unit,
            _change(x, 10) / unit,
            _spread(x) / unit,
            (high - low) / unit,
            (x.close - low) / np.maximum(high - low, 1),
            v / usual,
        ],
        axis=-1,
    )


def fitted_guess(shape: Floats, label: Ints, tape: Ints) -> Ints:
    """The guess for each answer, of a tree fitted on the other half of the tapes; 0 where there is none.

    ``shape`` [answers, features]; ``label`` and ``tape`` [answers].
    """
    from sklearn.tree import DecisionTreeClassifier

    half = np.unique(tape, return_inverse=True)[1] % 2
    guess = np.zeros(len(label), np.int64)
    for side in (0, 1):
        known = (half != side) & (label != UNDEFINED)
        wanted = half == side
        if known.any() and wanted.any():
            tree = DecisionTreeClassifier(max_depth=_DEPTH, min_samples_leaf=_LEAF, random_state=0)
            guess[wanted] = tree.fit(shape[known], label[known]).predict(shape[wanted])
    return guess


def _third(x: Levels) -> Ints:
    """Where the close is in the range of the last ten bars."""
    low, high = rolling(x.low, 10, np.min), rolling(x.high, 10, np.max)
    share: Floats = (x.close - low) / np.maximum(high - low, 1)
    return np.where(share > 2 / 3, 0, np.where(share < 1 / 3, 2, 1)).astype(np.int64)


def _change(x: Levels, k: int = 1) -> Ints:
    change: Ints = x.close - lag(x.close, k)
    return change


def _spread(x: Levels) -> Ints:
    spread: Ints = x.high - x.low
    return spread


def _sharp_fall(x: Levels) -> Flags:
    """More than two percent below the highest high of the last ten bars."""
    top = rolling(x.high, 10, np.max)
    fall: Flags = top - x.close > 0.02 * (100 * x.percent[:, None] + top - CENTRE)
    return fall


_FIRST: dict[str, Callable[[Levels], Flags]] = {
    "trend": lambda x: _change(x) > 0,
    "pullback": lambda x: _change(x) * _change(x, 10) < 0,
    "recent_high": lambda x: x.high >= rolling(x.high, 10, np.max),
    "consolidation": lambda x: _spread(x) < rolling(_spread(x), 20, np.sum) / 40,
    "volume": lambda x: x.volume > lag(x.volume, 1),
    "breakout": lambda x: x.close > lag(x.high, 1),
    "failed_breakout": lambda x: _change(x) < 0,
    "volatility": lambda x: _spread(x) > lag(_spread(x), 1),
    "volume_spike": lambda x: x.volume > lag(x.volume, 1) + 95,  # three times as much
    "vwap_reclaim": lambda x: x.close > x.open,
    "drawdown": _sharp_fall,
    "jump": lambda x: np.abs(_change(x)) > rolling(_spread(x), 20, np.sum) * 3 / 20,
    "higher_closes": lambda x: (_change(x) > 0) & (lag(_change(x), 1) > 0),
    "divergence": lambda x: _change(x) < lag(_change(x), 1),
    "flow": lambda x: _change(x, 10) > 0,
    "block": lambda x: x.volume > lag(x.volume, 1) + 60,  # twice as much
}
