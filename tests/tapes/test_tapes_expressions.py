"""Expressions over bars against a plain reference, and what the language refuses."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapes.expressions import MAX_LENGTH, Expression, ExpressionError, parse
from tapes.generate import EVALUATION, generate
from tapes.question_file import MAX_CHOICES, QuestionFile, rule_of
from tapes.rules import RULES, Levels
from tests.tapes.expression_reference import Shown, truth
from tests.tapes.reference import Bar
from tests.tapes.test_tapes_rules import bars_of, levels_of, small_tapes

EXAMPLES = (
    "close > close[10]",
    "close > highest(high, 20)[1]",
    "highest(high, 10) - lowest(low, 10) < (highest(high, 20) - lowest(low, 20))[10] / 2",
    "mean(volume, 5) > mean(volume, 20)[5]",
    "volume > 3 * mean(volume, 20)[1]",
    "all(close > close[1], 6)",
    "count(close > open, 10) >= 7",
    "any(abs(close - close[1]) > 2 * R, 3)",
    "close < 0.98 * highest(high, shown)",
    "highest(high, 5) > highest(high, shown)[5]",
    "crossover(close, mean(close, 10))",
    "crossunder(mean(close, 3), mean(close, 8)) or crossover(mean(close, 3), mean(close, 8))",
    "stdev(close, 10) > 2 * stdev(close, 10)[10]",
    'time >= "09:45" and time < "10:15"',
    "not (close > open) and volume > 0",
    "sum(volume * sign(close - open), 10) > 0",
    "close > sum((high + low + close) * volume, 20) / (3 * sum(volume, 20))",
    "lowest(low, 5)[3] <= min(open, close) <= max(open[1], close[1])",
    "mean(close - close[1], shown) >= 0",
    "volume / volume[1] > 2",
    "close - R > -(-open)",
)


def minutes_of(bars: int) -> list[int]:
    return [570 + i for i in range(bars)]


def timed(levels: Levels) -> Levels:
    minute = np.tile(minutes_of(levels.close.shape[1]), (len(levels.close), 1))
    return replace(levels, minute=minute)


def expected(source: str, bars: Sequence[Bar], percent: int, window: int) -> list[bool | None]:
    """The reference at every bar, on what is shown there."""
    found = []
    for end in range(1, len(bars) + 1):
        first = max(end - window, 0) if window else 0
        found.append(truth(source, Shown(bars[first:end], minutes_of(len(bars))[first:end], percent)))
    return found


def told(expression: Expression, levels: Levels, tape: int) -> list[bool | None]:
    condition = expression.condition(levels)
    pairs = zip(condition.truth[tape].tolist(), condition.defined[tape].tolist(), strict=True)
    return [value if defined else None for value, defined in pairs]


@pytest.mark.parametrize("window", [0, 32])
@pytest.mark.parametrize("source", EXAMPLES)
def test_generated_tapes_equal_the_reference(source: str, window: int) -> None:
    levels = timed(generate(np.random.default_rng(4), 2, 70, EVALUATION, window))
    for tape in range(2):
        wanted = expected(source, bars_of(levels, tape), int(levels.percent[tape]), window)
        assert told(parse(source), levels, tape) == wanted
        assert {True, False} & set(wanted)


@st.composite
def conditions(draw: st.DrawFn, depth: int = 2) -> str:
    """Any condition of the language, of prices and numbers that whole levels keep exact."""
    deeper = ("cross", "and", "or", "not", "window", "shift") if depth else ()
    kind = draw(st.sampled_from(("compare", *deeper)))
    if kind in ("and", "or"):
        return f"({draw(conditions(depth=depth - 1))} {kind} {draw(conditions(depth=depth - 1))})"
    if kind == "not":
        return f"(not {draw(conditions(depth=depth - 1))})"
    if kind == "shift":
        return f"{draw(conditions(depth=depth - 1))}[{draw(st.integers(0, 4))}]"
    if kind == "window":
        name = draw(st.sampled_from(("any", "all")))
        return f"{name}({draw(conditions(depth=0))}, {draw(st.sampled_from(('2', '5', 'shown')))})"
    a, b = draw(prices(depth=depth)), draw(prices(depth=depth))
    if kind == "cross":
        return f"{draw(st.sampled_from(('crossover', 'crossunder')))}({a}, {b})"
    return f"({a} {draw(st.sampled_from(('<', '<=', '>', '>=')))} {b})"


@st.composite
def prices(draw: st.DrawFn, depth: int) -> str:
    name = draw(st.sampled_from(("open", "high", "low", "close")))
    kind = draw(st.sampled_from(("name", "shift", "window", "sum", "half") if depth else ("name", "shift")))
    if kind == "shift":
        return f"{name}[{draw(st.integers(0, 5))}]"
    if kind == "window":
        reduce = draw(st.sampled_from(("highest", "lowest")))
        return f"{reduce}({name}, {draw(st.sampled_from(('1', '3', '7')))})[{draw(st.integers(0, 3))}]"
    if kind == "sum":
        return f"max({draw(prices(depth=0))} - {draw(prices(depth=0))} + close, open)"
    return f"({name} + {draw(prices(depth=0))}) / 2" if kind == "half" else name


@given(drawn=small_tapes(), source=conditions(), window=st.sampled_from((0, 24)))
@settings(max_examples=150)
def test_drawn_expressions_equal_the_reference(
    drawn: tuple[list[Bar], int], source: str, window: int
) -> None:
    """Tapes full of ties."""
    bars, percent = drawn
    levels = timed(levels_of(bars, percent, window))
    assert told(parse(source), levels, 0) == expected(source, bars, percent, window), source


@given(source=st.sampled_from(EXAMPLES), cut=st.integers(40, 69), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_no_expression_looks_ahead(source: str, cut: int, seed: int) -> None:
    """Other bars after ``cut`` change nothing up to it, not by a bit."""
    a, b = (timed(generate(np.random.default_rng([seed, i]), 1, 70, EVALUATION, 32)) for i in (0, 1))
    names = ("open", "high", "low", "close", "volume")
    later = {n: np.concatenate([getattr(a, n)[:, :cut], getattr(b, n)[:, cut:]], 1) for n in names}
    mixed = replace(a, **later)
    before, after = parse(source).condition(a), parse(source).condition(mixed)
    for name in ("truth", "margin", "defined"):
        assert np.array_equal(getattr(before, name)[:, :cut], getattr(after, name)[:, :cut])


@pytest.mark.parametrize("source", EXAMPLES)
def test_the_margin_is_on_the_side_of_the_answer_and_finite(source: str) -> None:
    condition = parse(source).condition(timed(generate(np.random.default_rng(3), 6, 80, EVALUATION, 48)))
    assert np.all(np.isfinite(condition.margin))
    kept = condition.defined & (condition.margin != 0)  # at the boundary itself, >= and > differ
    assert kept.any()
    assert np.array_equal(condition.margin[kept] > 0, condition.truth[kept])


SAME = {
    "trend": "close > close[10]",
    "recent_high": "highest(high, 5) > highest(high, shown)[5]",
    "consolidation": "2 * (highest(high, 10) - lowest(low, 10)) < (highest(high, 20) - lowest(low, 20))[10]",
    "volume": "mean(volume, 5) > mean(volume, 20)[5]",
    "breakout": "close > highest(high, 20)[1]",
    "volume_spike": "volume > 3 * mean(volume, 20)[1]",
    "drawdown": "close < 0.98 * highest(high, shown)",
    "higher_closes": "all(close > close[1], 6)",
    "block": "highest(volume, 5) > sum(volume, 20) / 4",
}


@pytest.mark.parametrize("name", SAME)
def test_questions_of_the_tape_model_can_be_written(name: str) -> None:
    """Where both are defined they are equal, and R and log ratios are the same distances."""
    levels = generate(np.random.default_rng(9), 8, 90, EVALUATION, 48)
    rule = next(rule for rule in RULES if rule.name == name)
    label, condition = rule.label(levels), parse(SAME[name]).condition(levels)
    both = (label.value >= 0) & condition.defined & (np.arange(90) >= rule.bars)
    assert both.any()
    assert np.array_equal(label.value[both] == 0, condition.truth[both])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("close > close[-1]", "looks ahead"),
        ("close > volume", "mixes a price and a volume"),
        ("close > 100", "mixes a number and a price"),
        ("close", "is a price, but must be true or false"),
        ("close and open > close", "is a price, not true or false"),
        ("mean(close > open, 3) > 1", "is true or false, not a number"),
        ("closing > open", "there is no closing, only R, close"),
        ("median(close, 3) > close", "there is no median, only abs"),
        ("highest(close) > close", "takes 2 arguments"),
        ("highest(close, n=3) > close", "takes 2 arguments"),
        ("highest(close, 0) > close", "whole number of bars, 1 to"),
        ("highest(close, 2.5) > close", "whole number of bars"),
        ("highest(close, open) > close", "whole number of bars"),
        ("highest(highest(close, shown), shown) > close", "cannot contain another"),
        ("close[70] > close", "reads 71 bars, but 64 are shown"),
        ("close > close[1:3]", "whole number of bars"),
        ("close == open", "only <, <=, > and >= compare"),
        ("close >", "cannot be read: invalid syntax"),
        ("__import__('os').system('true')", "there is no"),
        ("().__class__", "not part of the language"),
        ("[c for c in close]", "not part of the language"),
        ("(lambda: 1)() > 0", "there is no"),
        ("close ** 2 > open", "not part of the language"),
        ("True", "no number and no time"),
        ('time > "25:00"', "no time of day"),
        ('time > "noon"', "no time of day"),
        ("1" * (MAX_LENGTH + 1), "at most 2,000 characters"),
        ("+".join(["1"] * 300) + " > close", "more than 400 parts"),
        ("(" * 900 + "close" + ")" * 900 + " > 0", "cannot be read"),
    ],
)
def test_what_is_refused(source: str, message: str) -> None:
    levels = timed(generate(np.random.default_rng(1), 1, 70, window=64))
    with pytest.raises(ExpressionError, match=message.replace("(", r"\(")) as error:
        parse(source).condition(levels)
    assert len(str(error.value)) < 2_300
    assert "\n" not in str(error.value)


def test_bars_without_a_time_of_day_are_refused() -> None:
    with pytest.raises(ExpressionError, match="bars do not show"):
        parse('time > "10:00"').condition(generate(np.random.default_rng(1), 1, 70))


def test_definitions_stand_for_expressions() -> None:
    levels = generate(np.random.default_rng(2), 3, 80)
    short = parse("close > top - edge", {"top": "highest(high, 30)", "edge": "2 * R"})
    long = parse("close > highest(high, 30) - 2 * R")
    assert np.array_equal(short.condition(levels).truth, long.condition(levels).truth)
    assert short.lookback == long.lookback == 29


def test_the_last_of_the_most_choices_can_be_right() -> None:
    choices = tuple(f"C{n}" for n in range(MAX_CHOICES))
    rule = rule_of(QuestionFile("q", "?", ("close > 2 * high",) * (MAX_CHOICES - 1), choices))
    value = rule.label(generate(np.random.default_rng(2), 3, 80)).value
    assert np.all(value == MAX_CHOICES - 1)


@pytest.mark.parametrize("name", ["close", "mean", "shown", "2x", "a b", ""])
def test_a_definition_needs_a_name_of_its_own(name: str) -> None:
    with pytest.raises(ExpressionError, match="cannot be defined"):
        parse("close > open", {name: "close"})


def test_definitions_that_grow_without_end_are_refused() -> None:
    doubled = {f"a{i}": f"a{i - 1} + a{i - 1}" if i else "close" for i in range(40)}
    with pytest.raises(ExpressionError, match="more than 400 parts"):
        parse("a39 > close", doubled)
