"""Exact conversion between decimal text and integers of 1e-18 units.

Prices and sizes never pass through binary floating point: the digits of the text are shifted by its exponent
and read as one integer, which Python does not limit. All numbers from 1e-18 to 1e15 whole units fit.
"""

import math
import re
from fractions import Fraction
from functools import lru_cache

DIGITS = 18
SCALE: int = 10**DIGITS
LIMIT = 10**15 * SCALE
"""Largest magnitude: 1e15 whole units."""
NANO = 9
"""Decimals of the unit that msgpack integers count, and most of the ring's numbers."""

_MAX_TEXT = 200
_MAX_SHOWN = 80
_NUMBER = re.compile(r"([+-]?)(?:([0-9]+)(?:\.([0-9]*))?|\.([0-9]+))(?:[eE]([+-]?[0-9]+))?")
_LIMIT_DIGITS = len(str(LIMIT))


class Fixed(int):
    """A number in units of 1e-18. An ``int`` that the codec writes as decimal text."""

    __slots__ = ()

    def __str__(self) -> str:
        return format_fixed(self)

    def __repr__(self) -> str:
        return f"Fixed('{format_fixed(self)}')"


class BinaryFloat(str):
    """The shortest text of a binary float: a decimal number only to as many decimals as are declared."""

    __slots__ = ()


FLOAT_UNITS = 10**15
"""A binary float tells decimal numbers of fifteen digits apart."""
FLOAT_NOISE, FLOAT_PART = Fraction(1, 1000), Fraction(1, 2**51)
"""How far a float may be from its number, in units of the last decimal: this, and this part of the number."""


def fixed_of_float(text: str, decimals: int, *, rounded: bool = False) -> Fixed:
    """The number of ``decimals`` that a float stands for; ``rounded``: whatever the digits beyond are.

    Raises:
        ValueError: it is none of fifteen digits, or not near one of that many decimals.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{_shown(text)} is not a decimal number")
    units = Fraction(value) * 10**decimals
    nearest = round(units)
    if abs(nearest) >= FLOAT_UNITS:
        raise ValueError(f"{_shown(text)} with {decimals} decimals has more than the 15 digits of a float")
    if not rounded and abs(units - nearest) > FLOAT_NOISE + abs(units) * FLOAT_PART:
        raise ValueError(f"{_shown(text)} has more than {decimals} decimals")
    return _checked(from_units(nearest, decimals), text)


@lru_cache(maxsize=16384)  # cached: feeds repeat prices and sizes
def parse_fixed(text: str) -> Fixed:
    """Read decimal text exactly: a sign, digits, a point, digits and an exponent, of which most are optional.

    ``7.12e-05``, ``.5``, ``1.``, ``-0`` and ``+1`` are numbers.

    Raises:
        ValueError: NaN, infinities, blanks, separators, digits that are not ASCII, digits other than zero
            beyond the 18th decimal, or a magnitude above 1e15.
    """
    sign, digits, shift = _split(text)
    if shift < 0:
        raise ValueError(f"{_shown(text)} has more than {DIGITS} decimals")
    value = int(digits) * 10**shift
    return _checked(-value if sign == "-" else value, text)


def round_fixed(text: str, decimals: int = DIGITS) -> Fixed:
    """Read decimal text, rounding half to even at the last of ``decimals``, without floats.

    Raises:
        ValueError: as ``parse_fixed``, except for the number of decimals.
    """
    sign, digits, shift = _split(text)
    beyond = DIGITS - decimals - shift  # digits behind the last of `decimals`
    if beyond <= 0:
        value = int(digits) * 10**shift
    elif beyond > len(digits):
        value = 0
    else:
        kept, rest = int(digits[:-beyond] or "0"), digits[-beyond:]
        half = "5".ljust(beyond, "0")  # equal lengths: text compares like numbers
        value = (kept + (rest > half or (rest == half and kept % 2 == 1))) * 10 ** (DIGITS - decimals)
    return _checked(-value if sign == "-" else value, text)


def check_fixed(value: int) -> Fixed:
    """Check ``value`` in units of 1e-18. Raises ValueError when its magnitude is above 1e15 whole units."""
    if not -LIMIT <= value <= LIMIT:
        raise ValueError("a number is beyond 1e15")
    return Fixed(value)


def multiplied(value: int, by: int) -> Fixed:
    """The product of two numbers in units of 1e-18. Raises ValueError: finer than that, or above 1e15."""
    product, rest = divmod(value * by, SCALE)
    if rest:
        raise ValueError(f"times {format_fixed(by)} it has more than {DIGITS} decimals")
    return check_fixed(product)


def whole(value: int) -> Fixed:
    """A number of whole units. Raises ValueError when the magnitude is above 1e15."""
    return check_fixed(value * SCALE)


def from_units(units: int, scale: int = NANO) -> Fixed:
    """The number of ``units`` of 10^-``scale`` each, ``scale`` from 0 to 18."""
    return Fixed(units * 10 ** (DIGITS - scale))


def to_units(value: int, scale: int = NANO) -> int | None:
    """``value``, in units of 1e-18, in units of 10^-``scale``; None where it is finer."""
    units, rest = divmod(value, 10 ** (DIGITS - scale))
    return None if rest else units


def decimals_of(value: int) -> int:
    """How many decimals print ``value``, in units of 1e-18, exactly: 0 to 18."""
    return len(f"{abs(value) % SCALE:0{DIGITS}d}".rstrip("0"))


def format_fixed(value: int) -> str:
    """Shortest decimal text of ``value`` in units of 1e-18; ``parse_fixed`` reads it back exactly."""
    whole, fraction = divmod(abs(value), SCALE)
    sign = "-" if value < 0 else ""
    if not fraction:
        return f"{sign}{whole}"
    return f"{sign}{whole}.{fraction:0{DIGITS}d}".rstrip("0")


def _split(text: str) -> tuple[str, str, int]:
    """Sign, digits without zeros at either end, and how many zeros make them units of 1e-18."""
    if len(text) > _MAX_TEXT:
        raise ValueError(f"a number of {len(text)} characters is longer than {_MAX_TEXT}")
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"{_shown(text)} is not a decimal number")
    sign, whole, fraction, bare, exponent = found.groups(default="")
    fraction = fraction or bare
    digits = (whole + fraction).lstrip("0")
    shift = DIGITS - len(fraction) + (int(exponent) if exponent else 0)
    short = digits.rstrip("0")
    if not short:
        return "", "0", 0
    shift += len(digits) - len(short)
    if len(short) + shift > _LIMIT_DIGITS:
        raise ValueError(f"{_shown(text)} is beyond 1e15")
    return sign, short, shift


def _checked(value: int, text: str) -> Fixed:
    if not -LIMIT <= value <= LIMIT:
        raise ValueError(f"{_shown(text)} is beyond 1e15")
    return Fixed(value)


def _shown(text: str) -> str:
    """``text`` as an error shows it."""
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")
