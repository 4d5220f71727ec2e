"""Rules about what comes next: against a plain reference, never before their horizon, and what is refused."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapes.expressions import ExpressionError, parse
from tapes.generate import EVALUATION, generate
from tapes.question_file import QuestionFile, rule_of
from tapes.rules import UNDEFINED, Ints, Levels
from tests.tapes.expression_reference import Shown, truth
from tests.tapes.reference import Bar
from tests.tapes.test_tapes_expressions import minutes_of, prices, timed
from tests.tapes.test_tapes_rules import bars_of, levels_of, small_tapes

EXAMPLES = (
    "last(future.close) > close",
    "highest(future.high) > 1.002 * close",
    "highest(future.high) - close > 2 * (close - lowest(future.low))",
    "until(future.high > close + 2 * R) < until(future.low < close - 2 * R)",
    "any(future.close > highest(high, 20)) and close > close[10]",
    "all(future.low > close - 3 * R)",
    "mean(future.volume) > 2 * mean(volume, 20)",
    "sum(future.volume * sign(future.close - future.open)) > 0",
    "stdev(future.close) > stdev(close, 10)",
    "count(future.close > future.open) >= 3",
    "highest(future.high) > highest(high, shown)",
)
NAMES = ("open", "high", "low", "close", "volume")


def question(rule: str | list[str], horizon: int, **more: object) -> QuestionFile:
    return msgspec.convert(
        {"name": "q", "text": "Q?", "rule": rule, "horizon": horizon, **more}, QuestionFile
    )


def labels(rule: str, horizon: int, levels: Levels, **more: object) -> Ints:
    return rule_of(question(rule, horizon, **more)).label(levels).value.astype(np.int64)


def expected(rule: str, horizon: int, bars: list[Bar], percent: int, window: int) -> list[int]:
    """The reference at every bar: the window that ends there, and as many bars to come as there are."""
    found = []
    for end in range(1, len(bars) + 1):
        first = max(end - window, 0) if window else 0
        shown = Shown(bars[first:end], minutes_of(len(bars))[first:end], percent, bars[end : end + horizon])
        held = truth(rule, shown, horizon)
        found.append(UNDEFINED if held is None else int(not held))
    return found


@pytest.mark.parametrize("horizon", [1, 5])
@pytest.mark.parametrize("rule", EXAMPLES)
def test_generated_tapes_equal_the_reference(rule: str, horizon: int) -> None:
    levels = timed(generate(np.random.default_rng(4), 2, 70, EVALUATION, 32))
    for tape in range(2):
        wanted = expected(rule, horizon, bars_of(levels, tape), int(levels.percent[tape]), 32)
        assert labels(rule, horizon, levels)[tape].tolist() == wanted
        assert {0, 1} & set(wanted)


@st.composite
def ahead(draw: st.DrawFn) -> str:
    """A condition on the bars to come and those before, of prices that whole levels keep exact."""
    column, other = (f"future.{draw(st.sampled_from(NAMES[:4]))}" for _ in range(2))
    now, side = draw(prices(depth=1)), draw(st.sampled_from(("<", "<=", ">", ">=")))
    name = draw(st.sampled_from(("highest", "lowest", "last", "any", "all", "count", "until")))
    inner = f"{column} {side} {draw(st.sampled_from((now, other)))}"
    if name in ("any", "all"):
        found = f"{name}({inner})"
    elif name in ("count", "until"):
        found = f"({name}({inner}) {side} {draw(st.integers(0, 5))})"
    else:
        found = f"({name}({draw(st.sampled_from((column, f'{column} - {other} + close')))}) {side} {now})"
    join = draw(st.sampled_from(("", "and", "or", "not")))
    if join == "not":
        return f"not {found}"
    return f"{found} {join} {draw(prices(depth=0))} > open" if join else found


@given(drawn=small_tapes(), rule=ahead(), window=st.sampled_from((0, 24)), horizon=st.integers(1, 6))
@settings(max_examples=150)
def test_drawn_rules_equal_the_reference(
    drawn: tuple[list[Bar], int], rule: str, window: int, horizon: int
) -> None:
    bars, percent = drawn
    levels = timed(levels_of(bars, percent, window))
    assert labels(rule, horizon, levels)[0].tolist() == expected(rule, horizon, bars, percent, window), rule


@given(rule=st.sampled_from(EXAMPLES), cut=st.integers(40, 69), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_a_label_reads_no_bar_behind_its_horizon_and_is_not_there_before(
    rule: str, cut: int, seed: int
) -> None:
    """Other bars from ``cut`` on change no label whose horizon ends before it; a cut tape lacks the last."""
    a, b = (timed(generate(np.random.default_rng([seed, i]), 1, 70, EVALUATION, 32)) for i in (0, 1))
    mixed = replace(
        a, **{n: np.concatenate([getattr(a, n)[:, :cut], getattr(b, n)[:, cut:]], 1) for n in NAMES}
    )
    short = replace(a, **{n: getattr(a, n)[:, :cut] for n in (*NAMES, "minute")})
    known, other, early = (labels(rule, 5, each)[0] for each in (a, mixed, short))
    assert np.array_equal(known[: cut - 5], other[: cut - 5])
    assert np.array_equal(known[: cut - 5], early[: cut - 5])
    assert np.all(early[cut - 5 :] == UNDEFINED)


@given(
    gaps=st.lists(st.sampled_from((60, 600, 601, 60_000)), min_size=30, max_size=30),
    horizon=st.integers(1, 5),
)
def test_no_label_spans_a_gap_that_is_too_long(gaps: list[int], horizon: int) -> None:
    at = np.cumsum(gaps)[None] * 10**9
    levels = replace(generate(np.random.default_rng(1), 1, 30), at=at)
    plain = labels("last(future.close) > close", horizon, levels)[0]
    whole = labels("last(future.close) > close", horizon, levels, max_gap_minutes=10)[0]
    for bar in range(30):
        broken = any(gap > 600 for gap in gaps[bar + 1 : bar + 1 + horizon])
        assert whole[bar] == (UNDEFINED if broken else plain[bar])


def test_three_outcomes_by_which_barrier_is_met_first() -> None:
    rules = ["until(future.high > close + R) < until(future.low < close - R)", "any(future.low < close - R)"]
    rule = rule_of(question(rules, 8, choices=("UP", "DOWN", "NEITHER")))
    x = generate(np.random.default_rng(7), 4, 90, EVALUATION, 48)
    found = rule.label(x)
    assert set(np.unique(found.value)) == {UNDEFINED, 0, 1, 2}
    assert np.all(np.isfinite(found.margin))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon": 0}, "looks ahead: it needs a horizon"),
        ({"rule": "future.close > close"}, "is a value for each bar to come: say which, such as last"),
        ({"rule": "close > close[10]"}, "horizon is 5, but no rule reads a column of the future"),
        ({"rule": "last(future.close)[1] > close"}, "reads the past, so future.close cannot stand in it"),
        ({"rule": "mean(last(future.close), 3) > close"}, "takes one argument|reads the past"),
        ({"rule": "highest(future.close, 3) > close"}, "takes one argument with a column of the future"),
        ({"rule": "crossover(close, last(future.close))"}, "reads the past"),
        ({"rule": "last(highest(future.high)) > close"}, "cannot contain"),
        ({"rule": "last(close) > close"}, "takes one argument with a column of the future"),
        ({"rule": "highest(close) > close"}, "takes 2 arguments"),
        ({"rule": "last(future.R) > R"}, "there is no future.R, only future.close"),
        ({"rule": "last(past.close) > close"}, "not part of the language"),
        ({"rule": "future > close"}, "there is no future"),
        ({"rule": "last(future.close) > volume"}, "mixes a price and a volume"),
        ({"where": "last(future.close) > close"}, "where` looks ahead"),
        ({"define": {"future": "close"}}, "cannot be defined"),
        ({"rule": "close > open", "horizon": 0, "max_gap_minutes": 60}, "needs a horizon"),
        ({"max_gap_minutes": 60}, "needs times of bars"),
    ],
)
def test_what_is_refused(changes: dict[str, object], message: str) -> None:
    members = {"rule": "last(future.close) > close", "horizon": 5, **changes}
    with pytest.raises(ValueError, match=message) as error:
        rule_of(question(**members)).label(generate(np.random.default_rng(1), 1, 70, window=64))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("horizon", [-1, 1_001])
def test_a_horizon_has_its_range(horizon: int) -> None:
    with pytest.raises(msgspec.ValidationError):
        question("last(future.close) > close", horizon)


def test_an_expression_that_looks_ahead_says_how_far() -> None:
    assert parse("last(future.close) > close[3]", horizon=4).horizon == 4
    assert parse("close > close[3]", horizon=4).horizon == 0
    with pytest.raises(ExpressionError, match="looks ahead"):
        parse("last(future.close) > close")
