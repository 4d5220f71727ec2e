"""Exact decimal text against Python's decimal module."""

from decimal import ROUND_HALF_EVEN, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeds.decimal9 import LIMIT, Fixed9, check_fixed9, format_fixed9, parse_fixed9, round_fixed9

decimals = st.decimals(-9_200_000_000, 9_200_000_000, places=9, allow_nan=False, allow_infinity=False)


@given(decimals)
def test_parse_agrees_with_decimal(value: Decimal) -> None:
    assert parse_fixed9(f"{value:f}") == int(value.scaleb(9))


@given(st.integers(-LIMIT, LIMIT))
def test_format_and_parse_are_inverse(nano: int) -> None:
    text = format_fixed9(nano)
    assert parse_fixed9(text) == nano
    assert Decimal(text).scaleb(9) == nano
    assert not text.endswith(".")


@given(st.decimals(-(10**6), 10**6, places=14, allow_nan=False, allow_infinity=False))
def test_round_is_half_to_even(value: Decimal) -> None:
    expected = value.quantize(Decimal("1e-9"), rounding=ROUND_HALF_EVEN)
    assert round_fixed9(f"{value:f}") == int(expected.scaleb(9))


@pytest.mark.parametrize(
    ("text", "nano"),
    [
        ("0.0000000005", 0),
        ("0.0000000015", 2),
        ("-0.0000000015", -2),
        ("-0.0000000006", -1),
        ("0.00000000050000001", 1),
        ("218102.59507500002", 218_102_595_075_000),
    ],
)
def test_round_at_the_half(text: str, nano: int) -> None:
    assert round_fixed9(text) == nano


@pytest.mark.parametrize(
    ("text", "nano"),
    [
        ("61837.63000000", 61_837_630_000_000),
        ("5", 5 * 10**9),
        ("5.", 5 * 10**9),
        ("+0.1", 10**8),
        ("-0.000000001", -1),
        ("1.0000000000000", 10**9),
        ("9200000000", LIMIT),
    ],
)
def test_decimal_text_is_read_exactly(text: str, nano: int) -> None:
    value = parse_fixed9(text)
    assert value == nano
    assert type(value) is Fixed9


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", ".5", "-", "--1", "1.2.3", "1.+2", " 1", "1 "),
        *("1e5", "1E-7", "nan", "NaN", "inf", "-Infinity", "1_000", "1,5", "0x10", "٣", "1.٣"),
        *("0.0000000001", "9200000000.000000001", "1" * 65, "1" * 5000),
    ],
)
def test_text_that_is_no_decimal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_fixed9(text)
    if text != "0.0000000001":
        with pytest.raises(ValueError, match=r".+"):
            round_fixed9(text)


def test_integers_beyond_the_limit_are_refused() -> None:
    assert check_fixed9(-LIMIT) == -LIMIT
    with pytest.raises(ValueError, match="beyond"):
        check_fixed9(LIMIT + 1)


def test_text_forms() -> None:
    assert str(Fixed9(1_500_000_000)) == "1.5"
    assert f"{Fixed9(-1)}" == "-0.000000001"
    assert repr(Fixed9(10**9)) == "Fixed9('1')"
