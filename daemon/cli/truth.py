"""The right answers to the questions of `tapes.rules`, from the trades themselves."""

from collections import deque
from dataclasses import dataclass, field

from daemon.ring_numbers import ring_values
from feeds.market_data import Answer, Trade
from flash.question import EXACT_VALUE
from ingest.bar_kernel import Bars
from ingest.compact import CompactSpec
from ingest.lines import decimal
from tapes.real_bars import anchor_of, bars_of, levels_of
from tapes.rules import RULES, UNDEFINED

_RULES = {rule.name: rule for rule in RULES}
_SLACK = 64
"""Bars kept beyond a window, for answers that come late."""

_Row = tuple[int, int, int, int, int, int]


@dataclass
class Tally:
    """Answers to one question whose rule was defined, and how many of them were right."""

    judged: int = 0
    right: int = 0
    undefined: int = 0
    probability: float = 0.0
    """Sum of the calibrated probabilities of the judged answers."""
    calibrated: int = 0


@dataclass
class Truth:
    """Builds bars of ``interval_ns`` from trades in event time order, and compares answers with the rules.

    A plain reference: it shares the rules with the model's training, but no code with the daemon's way from
    the feed to the bars. ``specs`` by symbol (`VENUE:SYMBOL`); ``window``: bars that the model sees.
    """

    interval_ns: int
    window: int
    specs: dict[str, CompactSpec]
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    """By question and model."""
    _bars: dict[str, deque[_Row]] = field(default_factory=dict)

    def add(self, trade: Trade) -> None:
        """Take the next trade of its symbol."""
        bars = self._bars.setdefault(trade.key, deque(maxlen=self.window + _SLACK))
        at, size = trade.ts_event, int(trade.size)
        price = ring_values(trade, self.specs[trade.key].price_scale).values[0]
        if bars and bars[-1][0] // self.interval_ns == at // self.interval_ns:
            _, opened, high, low, _, volume = bars[-1]
            bars[-1] = (at, opened, max(high, price), min(low, price), price, volume + size)
        else:
            bars.append((at, price, price, price, price, size))

    def judge(self, answer: Answer) -> bool | None:
        """Whether an answer is right, and count it; None where there is no right answer, or no rule."""
        if answer.question != EXACT_VALUE.name and answer.question not in _RULES:
            return None
        tally = self.tallies.setdefault((answer.question, answer.model), Tally())
        expected = self.expected(answer)
        if expected is None:
            tally.undefined += 1
            return None
        right = answer.text == expected
        tally.judged += 1
        tally.right += right
        if answer.probability is not None:
            tally.calibrated += 1
            tally.probability += answer.probability
        return right

    def expected(self, answer: Answer) -> str | None:
        """The right answer for the bars up to the answer's newest record; None where the rule has none."""
        shown = self._shown(answer)
        if not len(shown):
            return None
        spec = self.specs[answer.symbol]
        if answer.question == EXACT_VALUE.name:
            return decimal(int(shown["c"][-1]), spec.price_decimals, spec.price_scale)
        rule = _RULES[answer.question]
        levels = levels_of(shown, anchor_of(shown, spec), self.window)
        value = int(rule.label(levels).value[0, -1])
        return None if value == UNDEFINED else rule.choices[value]

    def _shown(self, answer: Answer) -> Bars:
        kept = self._bars.get(answer.symbol, ())
        shown = [row for row in kept if row[0] <= answer.as_of][-self.window :]
        forgotten = len(kept) == self.window + _SLACK and len(shown) < self.window
        return bars_of(() if forgotten else shown)
