"""Exact decimal text against Python's decimal module."""

from decimal import ROUND_HALF_EVEN, Context, Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from feeds.decimals import (
    LIMIT,
    SCALE,
    Fixed,
    check_fixed,
    decimals_of,
    format_fixed,
    from_units,
    parse_fixed,
    round_fixed,
    to_units,
)

EXACT = Context(prec=2500, Emax=10**9, Emin=-(10**9))
NUMBER = r"[+-]?([0-9]{1,20}(\.[0-9]{0,24})?|\.[0-9]{1,24})([eE][+-]?[0-9]{1,3})?"
units = st.integers(-LIMIT, LIMIT)


def exact(text: str) -> int | None:
    """The number in units of 1e-18; None for one that is finer or beyond the limit."""
    value = EXACT.scaleb(EXACT.create_decimal(text), 18)
    whole = value.to_integral_exact(context=EXACT) if EXACT.abs(value) <= LIMIT else None
    return int(whole) if whole is not None and whole == value else None


@given(st.from_regex(NUMBER, fullmatch=True))
@example("7.12e-05")
@example("-0")
@example("1000000000000000.000000000000000000")
@example("1000000000000000.000000000000000001")
def test_parse_agrees_with_decimal(text: str) -> None:
    expected = exact(text)
    if expected is None:
        with pytest.raises(ValueError, match=r"decimals|beyond"):
            parse_fixed(text)
    else:
        assert parse_fixed(text) == expected
        assert type(parse_fixed(text)) is Fixed


@given(units)
def test_format_and_parse_are_inverse(value: int) -> None:
    text = format_fixed(value)
    assert parse_fixed(text) == value
    assert EXACT.scaleb(Decimal(text), 18) == value
    assert "e" not in text.lower()
    assert decimals_of(value) == len(text.partition(".")[2])


@given(st.from_regex(NUMBER, fullmatch=True), st.integers(0, 18))
@example("0.0000000005", 9)
@example("0.0000000015", 9)
@example("-0.0000000015", 9)
@example("5e-19", 18)
@example("1.5e-18", 18)
@example("9.5", 0)
def test_round_is_half_to_even(text: str, decimals: int) -> None:
    rounded = EXACT.create_decimal(text).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_EVEN, EXACT)
    expected = int(EXACT.scaleb(rounded, 18))
    if abs(expected) > LIMIT:
        with pytest.raises(ValueError, match="beyond"):
            round_fixed(text, decimals)
    else:
        assert round_fixed(text, decimals) == expected


@given(st.integers(-(10**15), 10**15), st.integers(0, 18))
def test_units_of_any_scale_are_exact(number: int, scale: int) -> None:
    assert to_units(from_units(number, scale), scale) == number
    assert to_units(1, scale) == (1 if scale == 18 else None)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("61837.63000000", "61837.63"),
        ("5.", "5"),
        (".5", "0.5"),
        ("+0.1", "0.1"),
        ("-0", "0"),
        ("-0.0e5", "0"),
        ("0e999999999", "0"),
        ("1E3", "1000"),
        ("1e15", "1000000000000000"),
        ("1e-18", "0.000000000000000001"),
        ("-7.12e-05", "-0.0000712"),
        ("100000000000000000000000e-22", "10"),
    ],
)
def test_numbers_are_written_as_the_shortest_plain_text(text: str, plain: str) -> None:
    assert str(parse_fixed(text)) == plain


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "-", "--1", "1.2.3", "1.+2", " 1", "1 ", "1\n", "e5", ".e5", "1e", "1e+", "1e1.5"),
        *("nan", "NaN", "inf", "-Infinity", "1_000", "1e1_0", "1,5", "0x10", "٣", "1.٣", "1e٣", "−1"),
        *("1e999999999", "1000000000000001", "1000000000000000.000000000000000001", "1e9" + "9" * 150),
        *("1" * 201, "1" * 5000, "0." + "1" * 1_000_000),
    ],
)
def test_text_that_is_no_decimal_is_refused_with_a_short_message(text: str) -> None:
    for read in (parse_fixed, round_fixed):
        if read is round_fixed and text == "1000000000000000.000000000000000001":
            continue  # rounds down at fewer decimals
        with pytest.raises(ValueError, match=r".+") as caught:
            read(text)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["1e-19", "1e-999999999", "1.0000000000000000001", "1e-9" + "9" * 150])
def test_finer_text_is_refused_or_rounded(text: str) -> None:
    with pytest.raises(ValueError, match="18 decimals"):
        parse_fixed(text)
    assert round_fixed(text) in (0, SCALE)


def test_integers_beyond_the_limit_are_refused() -> None:
    assert check_fixed(-LIMIT) == -LIMIT
    with pytest.raises(ValueError, match="beyond"):
        check_fixed(LIMIT + 1)


def test_text_forms() -> None:
    assert str(Fixed(1_500_000_000_000_000_000)) == "1.5"
    assert f"{Fixed(-1)}" == "-0.000000000000000001"
    assert repr(Fixed(SCALE)) == "Fixed('1')"
