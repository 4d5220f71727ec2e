"""Labels against a slow reference: generated tapes, small integer tapes full of ties, and too few bars."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapes.generate import EVALUATION, generate
from tapes.rules import LOOKBACK, RULES, UNDEFINED, VOLUMES, Levels, Rule
from tests.tapes import reference
from tests.tapes.reference import Bar

NAMES = [rule.name for rule in RULES]


def bars_of(levels: Levels, tape: int) -> list[Bar]:
    fields = (levels.open, levels.high, levels.low, levels.close, levels.volume)
    return [Bar(*row) for row in zip(*(field[tape].tolist() for field in fields), strict=True)]


def levels_of(bars: Sequence[Bar], percent: int, window: int = 0) -> Levels:
    opened, high, low, close, volume = (np.array([column], np.int64) for column in zip(*bars, strict=True))
    return Levels(opened, high, low, close, volume, np.array([percent]), window)


def expected(rule: Rule, levels: Levels, tape: int) -> list[int]:
    """The reference's labels at every bar, on the bars that the window shows."""
    bars, percent = bars_of(levels, tape), int(levels.percent[tape])
    found = []
    for end in range(1, len(bars) + 1):
        shown = bars[max(end - levels.window, 0) : end] if levels.window else bars[:end]
        label = reference.label(rule.name, shown, percent)
        found.append(UNDEFINED if label is None else label)
    return found


@st.composite
def small_tapes(draw: st.DrawFn) -> tuple[list[Bar], int]:
    """Bars of few levels, so that ties, empty ranges and equal volumes abound."""
    top = draw(st.sampled_from((0, 1, 3, 12)))
    level = st.integers(500, 500 + top)
    volume = st.sampled_from(draw(st.sampled_from(((0,), (500,), (0, 500, 501), (1, 420, 500, 560, 999)))))
    bars = []
    for _ in range(draw(st.integers(1, 45))):
        opened, close, a, b = (draw(level) for _ in range(4))
        bars.append(Bar(opened, max(opened, close, a), min(opened, close, b), close, draw(volume)))
    return bars, draw(st.sampled_from((1, 5, 150)))


def test_every_rule_has_a_reference() -> None:
    assert list(reference.RULES) == NAMES


@pytest.mark.parametrize("window", [0, 32, 48])
@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_labels_of_generated_tapes_equal_the_reference(rule: Rule, window: int) -> None:
    """A window of 0 shows all bars; the others slide."""
    levels = generate(np.random.default_rng(11), 4, 90, EVALUATION, window)
    value = rule.label(levels).value
    for tape in range(4):
        assert value[tape].tolist() == expected(rule, levels, tape)


@given(drawn=small_tapes(), window=st.sampled_from((0, 32)))
@settings(max_examples=60)
def test_ties_and_short_tapes_equal_the_reference(drawn: tuple[list[Bar], int], window: int) -> None:
    bars, percent = drawn
    levels = levels_of(bars, percent, window)
    for rule in RULES:
        assert rule.label(levels).value[0].tolist() == expected(rule, levels, 0), rule.name


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_every_choice_occurs_and_undefined_where_the_table_says_so(rule: Rule) -> None:
    levels = generate(np.random.default_rng(5), 60, 96)
    value = rule.label(levels).value
    assert np.all(value[:, : rule.bars - 1] == UNDEFINED)
    later = set(value[:, rule.bars - 1 :].ravel().tolist())
    assert later >= set(range(len(rule.choices)))
    if not rule.undefined:
        assert UNDEFINED not in later


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if len(rule.choices) == 2], ids=lambda rule: rule.name
)
def test_the_margin_is_positive_on_the_side_of_the_first_choice(rule: Rule) -> None:
    label = rule.label(generate(np.random.default_rng(6), 20, 96))
    defined = label.value != UNDEFINED
    assert np.all(np.isfinite(label.margin))
    assert np.array_equal(label.margin[defined] > 0, label.value[defined] == 0)


def test_the_margin_of_a_third_is_zero_at_its_boundary_and_grows_inwards() -> None:
    rule = next(rule for rule in RULES if rule.name == "range_location")
    bars = [Bar(500, 590, 500, 545, 500)] * 29
    closes = {
        close: rule.label(levels_of([*bars, Bar(500, 590, 500, close, 500)], 5)) for close in range(500, 591)
    }
    value = {close: int(label.value[0, -1]) for close, label in closes.items()}
    assert [close for close, index in value.items() if index == reference.MIDDLE] == list(range(530, 561))
    margin = {close: float(label.margin[0, -1]) for close, label in closes.items()}
    assert margin[561] < margin[575] < margin[590]
    assert margin[529] > margin[515] > margin[500]


def test_rules_read_no_bar_that_the_window_has_evicted() -> None:
    """The labels of a sliding reader equal those of a tape that begins with its window."""
    whole = generate(np.random.default_rng(8), 3, 100, EVALUATION, 40)
    fields = (whole.open, whole.high, whole.low, whole.close, whole.volume)
    opened, high, low, close, volume = (field[:, 60:] for field in fields)
    shown = Levels(opened, high, low, close, volume, whole.percent, 40)
    for rule in RULES:
        assert np.array_equal(rule.label(whole).value[:, -1], rule.label(shown).value[:, -1]), rule.name


def test_volume_codes_are_millionths_of_the_session_volume() -> None:
    assert VOLUMES[0] == 0
    assert VOLUMES[500] == 1_000_000
    assert VOLUMES[700] == 10_000_000
    assert np.all(np.diff(VOLUMES) > 0)
    assert all(VOLUMES[code] == Bar(0, 0, 0, 0, code).traded for code in range(1000))


def test_no_rule_but_those_of_all_bars_looks_further_back_than_stated() -> None:
    """Bars before the last LOOKBACK ones change no label, except of `recent_high` and `drawdown`."""
    levels = generate(np.random.default_rng(9), 4, 80)
    changed = {field: getattr(levels, field).copy() for field in ("open", "high", "low", "close", "volume")}
    for field in changed.values():
        field[:, : 80 - LOOKBACK] = 7
    other = Levels(**changed, percent=levels.percent)
    for rule in RULES:
        if rule.name not in ("recent_high", "drawdown"):
            assert np.array_equal(rule.label(levels).value[:, -1], rule.label(other).value[:, -1]), rule.name
