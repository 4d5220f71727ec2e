"""The rules once more, slowly: plain loops in exact arithmetic, written from the words of the table."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

YES, NO = 0, 1
UP, DOWN = 0, 1
BUY, SELL = 0, 1
UPPER, MIDDLE, LOWER = 0, 1, 2


class Bar(NamedTuple):
    """A bar as the compact line prints it: prices as levels, volume as a code."""

    open: int
    high: int
    low: int
    close: int
    volume: int

    @property
    def traded(self) -> int:
        """The volume in millionths of the session's."""
        return 0 if self.volume == 0 else round(10 ** (6 + (self.volume - 500) / 200))


Bars = Sequence[Bar]
"""The bars shown, oldest first; the last one is the newest."""


def unit_range(bars: Bars) -> Fraction:
    """R: the mean range of the last 20 bars (of all, where there are fewer) plus half a price unit."""
    last = bars[-20:]
    return Fraction(sum(bar.high - bar.low for bar in last), len(last)) + Fraction(1, 2)


def highest(bars: Bars) -> int:
    return max(bar.high for bar in bars)


def lowest(bars: Bars) -> int:
    return min(bar.low for bar in bars)


def width(bars: Bars) -> int:
    return highest(bars) - lowest(bars)


def mean_volume(bars: Bars) -> Fraction:
    return Fraction(sum(bar.traded for bar in bars), len(bars))


def yes(holds: bool) -> int:
    return YES if holds else NO


def trend(bars: Bars, percent: int) -> int | None:
    now, then = bars[-1].close, bars[-11].close
    if now == then:
        return None
    return UP if now > then else DOWN


def pullback(bars: Bars, percent: int) -> int | None:
    before = bars[-6].close - bars[-26].close
    move = bars[-1].close - bars[-6].close
    if abs(before) < 2 * unit_range(bars) or move == 0:
        return None
    return yes((move > 0) != (before > 0))


def recent_high(bars: Bars, percent: int) -> int | None:
    return yes(highest(bars[-5:]) > highest(bars[:-5]))


def consolidation(bars: Bars, percent: int) -> int | None:
    return yes(2 * width(bars[-10:]) < width(bars[-30:-10]))


def volume(bars: Bars, percent: int) -> int | None:
    if mean_volume(bars[-25:]) == 0:
        return None
    return yes(mean_volume(bars[-5:]) > mean_volume(bars[-25:-5]))


def breakout(bars: Bars, percent: int) -> int | None:
    return yes(bars[-1].close > highest(bars[-21:-1]))


def failed_breakout(bars: Bars, percent: int) -> int | None:
    top = highest(bars[-26:-6])
    if not any(bar.close > top for bar in bars[-6:-1]):
        return None
    return yes(bars[-1].close <= top)


def volatility(bars: Bars, percent: int) -> int | None:
    recent, earlier = bars[-10:], bars[-30:-10]
    return yes(2 * sum(b.high - b.low for b in recent) > sum(b.high - b.low for b in earlier))


def volume_spike(bars: Bars, percent: int) -> int | None:
    if mean_volume(bars[-21:]) == 0:
        return None
    return yes(bars[-1].traded > 3 * mean_volume(bars[-21:-1]))


def vwap_reclaim(bars: Bars, percent: int) -> int | None:
    last = bars[-30:]
    weights = [bar.traded for bar in last]
    if not any(weights):
        return None
    typical = [Fraction(bar.high + bar.low + bar.close, 3) for bar in last]
    vwap = sum(w * price for w, price in zip(weights, typical, strict=True)) / sum(weights)
    if bars[-6].close >= vwap:
        return None
    return yes(bars[-1].close > vwap)


def drawdown(bars: Bars, percent: int) -> int | None:
    units_at_500 = 100 * percent  # the reference price, in price units
    top = units_at_500 + highest(bars) - 500
    last = units_at_500 + bars[-1].close - 500
    return yes(last < Fraction(98, 100) * top)


def jump(bars: Bars, percent: int) -> int | None:
    closes = [bar.close for bar in bars[-22:]]
    changes = [after - before for before, after in pairwise(closes)]
    *usual, last = changes
    return yes(20 * last * last > 25 * sum(change * change for change in usual))


def higher_closes(bars: Bars, percent: int) -> int | None:
    closes = [bar.close for bar in bars[-7:]]
    return yes(all(after > before for before, after in pairwise(closes)))


def divergence(bars: Bars, percent: int) -> int | None:
    if highest(bars[-5:]) <= highest(bars[-25:-5]):
        return None
    now, ten, twenty = (bars[-1 - k].close for k in (0, 10, 20))
    return yes(now - ten < ten - twenty)


def range_location(bars: Bars, percent: int) -> int | None:
    last = bars[-30:]
    if width(last) == 0:
        return None
    share = Fraction(bars[-1].close - lowest(last), width(last))
    if share > Fraction(2, 3):
        return UPPER
    return LOWER if share < Fraction(1, 3) else MIDDLE


def flow(bars: Bars, percent: int) -> int | None:
    up = sum(bar.traded for bar in bars[-10:] if bar.close > bar.open)
    down = sum(bar.traded for bar in bars[-10:] if bar.close < bar.open)
    if up == down:
        return None
    return BUY if up > down else SELL


def block(bars: Bars, percent: int) -> int | None:
    if mean_volume(bars[-20:]) == 0:
        return None
    return yes(4 * max(bar.traded for bar in bars[-5:]) > sum(bar.traded for bar in bars[-20:]))


Rule = Callable[[Bars, int], int | None]
FEWEST: dict[Rule, int] = {
    trend: 11,
    pullback: 26,
    recent_high: 11,
    consolidation: 30,
    volume: 25,
    breakout: 21,
    failed_breakout: 26,
    volatility: 30,
    volume_spike: 21,
    vwap_reclaim: 30,
    drawdown: 11,
    jump: 22,
    higher_closes: 7,
    divergence: 25,
    range_location: 30,
    flow: 10,
    block: 20,
}
"""The rules, and the fewest bars each can be answered on."""
RULES: dict[str, Rule] = {rule.__name__: rule for rule in FEWEST}


def label(name: str, bars: Bars, percent: int) -> int | None:
    """The index of the right choice; None where the rule is undefined or there are too few bars."""
    rule = RULES[name]
    return None if len(bars) < FEWEST[rule] else rule(bars, percent)
