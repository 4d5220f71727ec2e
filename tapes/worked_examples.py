"""Worked examples for a model that reads words: generated bars, questions about them, the right answers.

Drawn once and equal everywhere. Of many tapes those are taken whose answers have been given the least so
far: two examples give most questions both answers.
"""

from functools import cache
from math import floor, log10
from typing import NamedTuple

import numpy as np

from flash.question import EXACT_VALUE, Question
from ingest.bar_kernel import BAR, Bars
from ingest.compact import CENTRE, CODES_PER_DECADE, Anchor
from ingest.lines import MINUTE_NS, LineSpec, decimal
from ingest.volumes import SCALE, Volume, put_volume
from tapes.generate import TRAINING, generate
from tapes.rules import LOOKBACK, RULES, UNDEFINED, Ints, Levels

OPENED = 1_767_346_200 * 10**9
"""When the first bar of a generated tape opened, ns: 2026-01-02T09:30:00Z."""
OPENED_MINUTE = 9 * 60 + 30
"""Of the day, of the same."""
BARS = LOOKBACK + 2
_SEED, _TAPES = 990_003, 4096
_ANSWERED = 0.1
"""What an answer counts in the choice of an example, beside how much its choice has been given too seldom."""
_VOLUME_DECIMALS = 3
_NANO = 9


class WorkedExample(NamedTuple):
    """Bars, how their numbers are written, and questions with their right answers."""

    bars: Bars
    spec: LineSpec
    answers: tuple[tuple[Question, str], ...]


@cache
def worked_examples(n: int) -> tuple[WorkedExample, ...]:
    """The first ``n``, each of BARS bars with every question that has a right answer there."""
    x = generate(np.random.default_rng(_SEED), _TAPES, BARS, TRAINING, BARS)
    label = np.stack([rule.label(x).value[:, -1] for rule in RULES], 1)
    rule, choices = np.arange(len(RULES)), np.array([len(each.choices) for each in RULES])
    given = np.zeros((len(RULES), choices.max()))
    found: list[int] = []
    for _ in range(n):
        lacking = given.sum(1) / choices - given[rule, label]
        score = np.where(label == UNDEFINED, 0.0, lacking + _ANSWERED).sum(1)
        score[found] = -np.inf
        found.append(int(score.argmax()))
        answered = label[found[-1]] != UNDEFINED
        given[rule[answered], label[found[-1]][answered]] += 1
    return tuple(_worked(x, tape, label[tape].tolist()) for tape in found)


def _worked(x: Levels, tape: int, labels: list[int]) -> WorkedExample:
    unit = 10**7
    anchor = Anchor(100 * int(x.percent[tape]) * unit, unit, 1000 * 10**SCALE)
    bars, spec = bars_of_levels(x, tape, anchor)
    answers = [
        (Question(rule.name, rule.text, rule.choices), rule.choices[label])
        for rule, label in zip(RULES, labels, strict=True)
        if label != UNDEFINED
    ]
    close = decimal(int(bars["c"][-1]), spec.price_decimals, spec.price_scale)
    return WorkedExample(bars, spec, (*answers, (EXACT_VALUE, close)))


def bars_of_levels(x: Levels, tape: int, anchor: Anchor) -> tuple[Bars, LineSpec]:
    """A tape's bars, BAR [bars], with the prices and volumes that its levels and codes stand for."""
    made = np.zeros(len(x.close[tape]), BAR)
    made["ts_open"] = OPENED + MINUTE_NS * np.arange(len(made))
    made["interval"] = MINUTE_NS
    for name, levels in zip("ohlc", (x.open, x.high, x.low, x.close), strict=True):
        made[name] = anchor.price(levels[tape])
    codes = x.volume[tape]
    traded = anchor.volume / 10**SCALE * 10.0 ** ((codes - CENTRE) / CODES_PER_DECADE)
    for bar, exact in zip(made, np.where(codes > 0, traded, 0.0).tolist(), strict=True):
        put_volume(bar, Volume.of(round(exact * 10**_NANO) * 10 ** (SCALE - _NANO)))
    # as a desk sets them for its instrument: three digits of a usual volume are printed
    digits = 2 - floor(log10(anchor.volume / 10**SCALE))
    volume_decimals = min(max(_VOLUME_DECIMALS, digits), SCALE)
    return made, LineSpec(anchor.price_decimals, volume_decimals, price_scale=anchor.price_scale)


def minutes(bars: int) -> Ints:
    """The minute of the day at which each bar of a tape opens, as decimal lines print it: [1, bars]."""
    return ((OPENED_MINUTE + np.arange(bars)) % (24 * 60))[None]
