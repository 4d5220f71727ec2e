"""The tape's text against Python's exact decimals and calendar."""

from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Context, Decimal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.model.embedded import build_tokenizer
from ingest.bar_kernel import AMENDS, BAR, EMPTY, ROLLED
from ingest.lines import DAY_NS, MINUTE_NS, Form, LineSpec, bar_line, clock_text, decimal, time_text
from ingest.tokens import Tokeniser

NANO = 10**9
START = int(datetime(2026, 3, 2, 14, 30, tzinfo=UTC).timestamp()) * NANO


EXACT = Context(prec=80)


@given(
    st.integers(-(2**63), 2**63 - 1) | st.integers(-(10**40), 10**40), st.integers(0, 18), st.integers(0, 18)
)
@example(5, 8, 9)
@example(15, 8, 9)
@example(2_500_000_000, 0, 9)
@example(999_999_999, 2, 9)
@example(25, 17, 18)
@example(7, 0, 0)
def test_decimals_are_rounded_half_to_even(value: int, decimals: int, scale: int) -> None:
    decimals = min(decimals, scale)
    given = EXACT.scaleb(EXACT.create_decimal(value), -scale)
    exact = given.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_EVEN, EXACT)
    expected = f"{exact:f}"
    assert decimal(value, decimals, scale) == (expected.removeprefix("-") if exact == 0 else expected)


@given(st.integers(0, 4 * 10**18))
def test_time_is_utc_time_of_day(moment: int) -> None:
    date = datetime.fromtimestamp(moment // NANO, UTC)
    assert clock_text(moment, MINUTE_NS - 1) == date.strftime("%H%M%S")
    assert clock_text(moment, MINUTE_NS) == date.strftime("%H%M")


def test_a_line() -> None:
    bar = np.zeros(1, BAR)[0]
    bar["ts_open"] = int(datetime(2026, 3, 2, 14, 30, tzinfo=UTC).timestamp()) * NANO
    bar["interval"] = NANO
    prices = {"o": 101_250_000_000, "h": 101_500_000_000, "l": 101_245_000_000, "c": 101_375_000_001}
    for name, value in prices.items():
        bar[name] = value
    bar["v"] = 12_500_000_000
    assert bar_line(bar, LineSpec(2, 3)) == "143000,101.25,101.50,101.24,101.38,12.500\n"
    bar["interval"] = MINUTE_NS
    assert bar_line(bar, LineSpec(0, 0)) == "1430,101,102,101,101,12\n"


@given(st.integers(0, 4 * 10**18), st.integers(1, 3 * DAY_NS))
def test_a_time_with_its_date_is_that_of_the_calendar(moment: int, interval: int) -> None:
    day = datetime.fromtimestamp(moment // NANO, UTC).strftime("%Y-%m-%d")
    whole = day if interval >= DAY_NS else f"{day} {clock_text(moment, interval)}"
    assert time_text(moment, interval, dates=True) == whole
    assert time_text(moment, interval) == whole.removeprefix(f"{day} ")


def test_a_line_with_its_date_is_encoded_as_it_is_written() -> None:
    tokeniser = build_tokenizer()
    bars = np.zeros(3, BAR)
    bars["ts_open"] = START + NANO * np.arange(3)
    bars["interval"] = NANO
    spec = LineSpec(2, 3, dates=True)
    lines = Tokeniser(lambda text: tokeniser.encode(text, add_special_tokens=False)).lines(bars, spec)
    texts = [tokeniser.decode(line) for line in lines]
    assert texts == [bar_line(bar, spec) for bar in bars]
    assert texts[0].startswith("2026-03-02 143000,")


@pytest.mark.parametrize(
    ("name", "value"),
    [("price_decimals", -1), ("price_decimals", 10), ("volume_decimals", -1), ("volume_decimals", 19),
     ("price_scale", 1), ("price_scale", 19)],
)  # fmt: skip
def test_decimals_outside_the_fixed_point_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        LineSpec(**{name: value})


FORMS: dict[Form, tuple[str, str, str, str]] = {
    "decimal": (
        "ES,143000,101.25,101.50,101.24,101.38,12.500\n",
        "amend,ES,143000,101.25,101.50,101.24,101.38,12.500\n",
        "ES,143000,no trade\n",
        "roll,ESH7\nES,143000,101.25,101.50,101.24,101.38,12.500\n",
    ),
    "table": (
        "| ES | 143000 | 101.25 | 101.50 | 101.24 | 101.38 | 12.500 |\n",
        "| amend | ES | 143000 | 101.25 | 101.50 | 101.24 | 101.38 | 12.500 |\n",
        "| ES | 143000 | no trade |\n",
        "| roll | ESH7 |\n| ES | 143000 | 101.25 | 101.50 | 101.24 | 101.38 | 12.500 |\n",
    ),
    "words": (
        "ES 143000 open 101.25 high 101.50 low 101.24 close 101.38 volume 12.500\n",
        "amend ES 143000 open 101.25 high 101.50 low 101.24 close 101.38 volume 12.500\n",
        "ES 143000 no trade\n",
        "roll ESH7\nES 143000 open 101.25 high 101.50 low 101.24 close 101.38 volume 12.500\n",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_writes_bars_corrections_empty_ones_and_rolls(form: Form) -> None:
    tokeniser = build_tokenizer()
    bars = np.zeros(4, BAR)
    bars["ts_open"], bars["interval"] = START, NANO
    for name, value in {"o": 101_250, "h": 101_500, "l": 101_245, "c": 101_375, "v": 12_500}.items():
        bars[name] = value * 10**6
    bars["flags"] = [0, AMENDS, EMPTY, ROLLED]
    spec = LineSpec(2, 3, ("ES",), says_empty=True, rolls=(((0, "ESH7"),),), form=form)
    lines = Tokeniser(lambda text: tokeniser.encode(text, add_special_tokens=False)).lines(bars, spec)
    assert tuple(tokeniser.decode(line) for line in lines) == FORMS[form]
