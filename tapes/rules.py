"""The questions a desk asks of a tape, as computable rules with distances to the boundary, vectorised.

All rules read what the compact line prints: price levels (integers, one price unit apart) and volume codes
(`ingest.compact`). A label is the index of the right choice, or `UNDEFINED`: too few bars, a tie, or the
question does not arise (nothing to reclaim, no trend to pull back from). `docs/questions.md` has the same
table in words; `tests/tapes` has a slow reference for each rule.

Prices are measured in R, the mean range (high less low) of the last 20 bars plus half a unit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ingest.compact import CENTRE, CODES_PER_DECADE, HIGHEST

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

UNDEFINED = -1
YES_NO = ("YES", "NO")
LOOKBACK = 30
"""Most bars a rule reads, but for those about all bars shown."""

VOLUMES = np.concatenate(
    [[0.0], np.rint(10 ** (6 + (np.arange(1, HIGHEST + 1) - CENTRE) / CODES_PER_DECADE))]
)
"""The volume of each code, in millionths of the session's reference volume; code 0 is no volume."""


@dataclass(frozen=True)
class Levels:
    """Tapes as the compact line prints them; each array is [tapes, bars].

    Prices are levels, volumes are codes. ``percent`` [tapes]: price units in one percent of the reference.
    ``window``: bars that a reader sees, 0 for all. ``minute`` [tapes, bars] or [1, bars]: that of the day
    (UTC) at which each bar opens, where it is known; ``at`` [tapes, bars]: the time of its newest record, ns.
    """

    open: Ints
    high: Ints
    low: Ints
    close: Ints
    volume: Ints
    percent: Ints
    window: int = 0
    minute: Ints | None = None
    at: Ints | None = None


class Labels(NamedTuple):
    """Labels of one question at every bar, [tapes, bars].

    ``value``: index of the right choice or UNDEFINED. ``margin``: signed distance to the boundary in the
    rule's unit, positive on the side of the first choice.
    """

    value: npt.NDArray[np.int16]
    margin: Floats


@dataclass(frozen=True)
class Rule:
    """A question with its labeller.

    ``text`` is how it is asked; ``means`` says when the first choice is right; it needs at least ``bars``
    bars; ``unit`` is that of the margin; ``timed``: it reads the time of day; ``horizon``: bars after which
    its label is known, 0 at once; ``partial``: only some of the bars that have a right answer have a label.
    """

    name: str
    text: str
    choices: tuple[str, ...]
    means: str
    undefined: str
    label: Callable[[Levels], Labels]
    bars: int
    unit: str = "R"
    timed: bool = False
    horizon: int = 0
    partial: bool = False


def lag(x: Ints, k: int) -> Ints:
    """The value ``k`` bars ago; the first bar's where there are fewer."""
    return x[:, np.maximum(np.arange(x.shape[1]) - k, 0)]


def rolling(x: Ints | Floats, k: int, reduce: Callable[..., Floats]) -> Floats:
    """``reduce`` (np.max, np.min or np.sum) over the last ``k`` bars at each bar; over fewer at the start."""
    if k >= x.shape[1] and reduce is not np.sum:
        accumulate = np.maximum if reduce is np.max else np.minimum
        return accumulate.accumulate(x, 1).astype(np.float64)
    empty = {np.max: -np.inf, np.min: np.inf, np.sum: 0.0}[reduce]
    padded = np.concatenate([np.full((x.shape[0], k - 1), empty), x.astype(np.float64)], 1)
    return reduce(np.lib.stride_tricks.sliding_window_view(padded, k, axis=1), axis=-1)


def before(x: Floats, k: int, empty: float) -> Floats:
    """The value ``k`` bars ago; ``empty`` where there are fewer."""
    return np.concatenate([np.full((x.shape[0], min(k, x.shape[1])), empty), x[:, :-k]], 1)


def after(x: Floats, k: int, empty: float) -> Floats:
    """The value ``k`` bars ahead; ``empty`` where there are fewer."""
    return np.concatenate([x[:, k:], np.full((x.shape[0], min(k, x.shape[1])), empty)], 1)


def mean_range(levels: Levels) -> Floats:
    """R at every bar, [tapes, bars]."""
    count = np.minimum(np.arange(levels.close.shape[1]) + 1, 20)
    size: Floats = rolling(levels.high - levels.low, 20, np.sum) / count + 0.5
    return size


def _enough(levels: Levels, bars: int) -> Flags:
    """Bars that have at least ``bars`` bars shown, themselves included."""
    return np.broadcast_to(np.arange(levels.close.shape[1]) + 1 >= bars, levels.close.shape)


def _binary(margin: Floats, defined: Flags) -> Labels:
    """The first choice where the margin is above 0, the second one elsewhere."""
    return Labels(np.where(defined, np.where(margin > 0, 0, 1), UNDEFINED).astype(np.int16), margin)


def _traded(levels: Levels, bars: int) -> Flags:
    """Where there was any volume in the last ``bars`` bars."""
    return rolling(levels.volume, bars, np.max) > 0


def _log_ratio(a: Floats, b: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Floats = np.log(a) - np.log(b)
    return np.nan_to_num(np.clip(ratio, -9.0, 9.0), nan=0.0)


def _shown(levels: Levels) -> int:
    return levels.window or levels.close.shape[1]


def _trend(x: Levels) -> Labels:
    change = (x.close - lag(x.close, 10)) / mean_range(x)
    return _binary(change, _enough(x, 11) & (change != 0))


def _pullback(x: Levels) -> Labels:
    size = mean_range(x)
    trend = (lag(x.close, 5) - lag(x.close, 25)) / size
    move = (x.close - lag(x.close, 5)) / size
    return _binary(-np.sign(trend) * move, _enough(x, 26) & (np.abs(trend) >= 2) & (move != 0))


def _recent_high(x: Levels) -> Labels:
    earlier = before(rolling(x.high, max(_shown(x) - 5, 1), np.max), 5, -np.inf)
    margin = (rolling(x.high, 5, np.max) - earlier) / mean_range(x)
    return _binary(np.minimum(margin, 9.0), _enough(x, 11))


def _consolidation(x: Levels) -> Labels:
    narrow = rolling(x.high, 10, np.max) - rolling(x.low, 10, np.min)
    wide = before(rolling(x.high, 20, np.max) - rolling(x.low, 20, np.min), 10, 0.0)
    return _binary((wide - 2 * narrow) / mean_range(x), _enough(x, 30))


def _volume(x: Levels) -> Labels:
    v = VOLUMES[x.volume]
    recent = rolling(v, 5, np.sum) / 5
    earlier = before(rolling(v, 20, np.sum), 5, 0.0) / 20
    return _binary(_log_ratio(recent, earlier), _enough(x, 25) & _traded(x, 25))


def _breakout(x: Levels) -> Labels:
    top = before(rolling(x.high, 20, np.max), 1, np.inf)
    return _binary(np.maximum((x.close - top) / mean_range(x), -9.0), _enough(x, 21))


def _failed_breakout(x: Levels) -> Labels:
    top = before(rolling(x.high, 20, np.max), 6, np.inf)
    broke = before(rolling(x.close, 5, np.max), 1, -np.inf) > top
    margin = np.where(np.isfinite(top), (top - x.close + 0.5) / mean_range(x), 0.0)
    return _binary(margin, _enough(x, 26) & broke)


def _volatility(x: Levels) -> Labels:
    spread = x.high - x.low
    recent = rolling(spread, 10, np.sum) / 10 + 0.5
    earlier = before(rolling(spread, 20, np.sum), 10, 0.0) / 20 + 0.5
    return _binary(_log_ratio(recent, earlier), _enough(x, 30))


def _volume_spike(x: Levels) -> Labels:
    v = VOLUMES[x.volume]
    margin = _log_ratio(v, 3 * before(rolling(v, 20, np.sum), 1, 0.0) / 20)
    return _binary(margin, _enough(x, 21) & _traded(x, 21))


def _vwap_reclaim(x: Levels) -> Labels:
    v = VOLUMES[x.volume]
    # whole numbers below 2**53, so that a tie is one
    traded = rolling((x.high + x.low + x.close) * v, LOOKBACK, np.sum)
    volume = 3 * rolling(v, LOOKBACK, np.sum)
    below = lag(x.close, 5) * volume < traded
    margin = (x.close * volume - traded) / (np.maximum(volume, 1.0) * mean_range(x))
    return _binary(margin, _enough(x, LOOKBACK) & below)


def _drawdown(x: Levels) -> Labels:
    top = rolling(x.high, _shown(x), np.max)
    limit = 0.02 * (100 * x.percent[:, None] + top - CENTRE)
    return _binary((top - x.close - limit) / mean_range(x), _enough(x, 11))


def _jump(x: Levels) -> Labels:
    change = np.abs(x.close - lag(x.close, 1)).astype(np.float64)
    usual = np.sqrt(before(rolling(change**2, 20, np.sum), 1, 0.0) / 20)
    return _binary(_log_ratio(change + 0.5, 5 * usual + 0.5), _enough(x, 22))


def _higher_closes(x: Levels) -> Labels:
    least = rolling(x.close - lag(x.close, 1), 6, np.min)
    return _binary((least - 0.5) / mean_range(x), _enough(x, 7))


def _divergence(x: Levels) -> Labels:
    new_high = rolling(x.high, 5, np.max) > before(rolling(x.high, 20, np.max), 5, np.inf)
    slowing = (2 * lag(x.close, 10) - lag(x.close, 20) - x.close) / mean_range(x)
    return _binary(slowing, _enough(x, 25) & new_high)


def _range_location(x: Levels) -> Labels:
    low, high = rolling(x.low, LOOKBACK, np.min), rolling(x.high, LOOKBACK, np.max)
    share = (x.close - low) / np.maximum(high - low, 1)
    value = np.where(share > 2 / 3, 0, np.where(share < 1 / 3, 2, 1))
    defined = _enough(x, LOOKBACK) & (high > low)
    margin = np.where(value == 0, share - 2 / 3, np.where(value == 2, share - 1 / 3, share - 0.5))
    return Labels(np.where(defined, value, UNDEFINED).astype(np.int16), 6 * margin)


def _flow(x: Levels) -> Labels:
    v = VOLUMES[x.volume]
    net = rolling(v * np.sign(x.close - x.open), 10, np.sum) / np.maximum(rolling(v, 10, np.sum), 1.0)
    return _binary(3 * net, _enough(x, 10) & (net != 0))


def _block(x: Levels) -> Labels:
    v = VOLUMES[x.volume]
    margin = _log_ratio(4 * rolling(v, 5, np.max), rolling(v, 20, np.sum))
    return _binary(margin, _enough(x, 20) & _traded(x, 20))


RULES = (
    Rule(
        "trend",
        "Is the last close above or below the close ten bars before it?",
        ("UP", "DOWN"),
        "the last close is above the close ten bars before it",
        "the two closes are equal",
        _trend,
        11,
    ),
    Rule(
        "pullback",
        "Are the last five bars pulling back against the trend of the twenty bars before them?",
        YES_NO,
        "the close moved against the trend over the last 5 bars; the trend is the move of the 20 bars before",
        "the trend is smaller than 2 R, or the close did not move",
        _pullback,
        26,
    ),
    Rule(
        "recent_high",
        "Did one of the last five bars make the highest high of all bars shown?",
        YES_NO,
        "the highest high of the last 5 bars is above that of all earlier bars shown",
        "",
        _recent_high,
        11,
    ),
    Rule(
        "consolidation",
        "Are the last ten bars in a range less than half that of the twenty bars before them?",
        YES_NO,
        "the range of the last 10 bars is below half the range of the 20 bars before them",
        "",
        _consolidation,
        30,
    ),
    Rule(
        "volume",
        "Is the mean volume of the last five bars above that of the twenty bars before them?",
        YES_NO,
        "the mean volume of the last 5 bars is above that of the 20 bars before them",
        "there was no volume",
        _volume,
        25,
        "log ratio",
    ),
    Rule(
        "breakout",
        "Did the last bar close above every high of the twenty bars before it?",
        YES_NO,
        "the last close is above the highest high of the 20 bars before it",
        "",
        _breakout,
        21,
    ),
    Rule(
        "failed_breakout",
        "Did a breakout of the last five bars fail?",
        YES_NO,
        "the last close is not above the highest high of the 20 bars that ended 6 bars ago",
        "none of the 5 closes before the last one was above that high",
        _failed_breakout,
        26,
    ),
    Rule(
        "volatility",
        "Are the last ten bars wider than the twenty bars before them?",
        YES_NO,
        "the mean range of the last 10 bars is above that of the 20 bars before them",
        "",
        _volatility,
        30,
        "log ratio",
    ),
    Rule(
        "volume_spike",
        "Is the volume of the last bar more than three times the mean of the twenty bars before it?",
        YES_NO,
        "the last volume is above 3 times the mean volume of the 20 bars before it",
        "there was no volume",
        _volume_spike,
        21,
        "log ratio",
    ),
    Rule(
        "vwap_reclaim",
        "Did the price reclaim the volume-weighted average price of the last thirty bars?",
        YES_NO,
        "the last close is above the volume-weighted mean typical price of the last 30 bars",
        "the close 5 bars ago was not below it, or there was no volume",
        _vwap_reclaim,
        LOOKBACK,
    ),
    Rule(
        "drawdown",
        "Is the last close more than two percent below the highest high of all bars shown?",
        YES_NO,
        "the last close is more than 2 % below the highest high of all bars shown",
        "",
        _drawdown,
        11,
    ),
    Rule(
        "jump",
        "Did the last close jump by more than five standard deviations?",
        YES_NO,
        "the last change of the close exceeds 5 times the root mean square of the 20 changes before it",
        "",
        _jump,
        22,
        "log ratio",
    ),
    Rule(
        "higher_closes",
        "Are the last six closes each higher than the one before?",
        YES_NO,
        "each of the last 6 closes is above the one before it",
        "",
        _higher_closes,
        7,
    ),
    Rule(
        "divergence",
        "Does the new high come with less momentum than before?",
        YES_NO,
        "the close gained less over the last 10 bars than over the 10 bars before them",
        "the highest high of the last 5 bars is not above that of the 20 bars before them",
        _divergence,
        25,
    ),
    Rule(
        "range_location",
        "In which third of the range of the last thirty bars is the last close?",
        ("UPPER", "MIDDLE", "LOWER"),
        "the last close is in the upper, middle or lower third of the range of the last 30 bars",
        "the range is empty",
        _range_location,
        LOOKBACK,
        "sixth of the range",
    ),
    Rule(
        "flow",
        "Did rising or falling bars have more volume over the last ten bars?",
        ("BUY", "SELL"),
        "over the last 10 bars, those that closed above their open had more volume than those below",
        "both had the same volume",
        _flow,
        10,
        "third of the volume",
    ),
    Rule(
        "block",
        "Did one of the last five bars have more than a quarter of the volume of the last twenty?",
        YES_NO,
        "the largest volume of the last 5 bars is above a quarter of the volume of the last 20",
        "there was no volume",
        _block,
        20,
        "log ratio",
    ),
)
"""All questions with choices, in the order of their tokens; `exact_value` has a number for an answer."""
