"""Exact conversion between decimal text and integers of 1e-9 units (nano units).

Prices and sizes never pass through binary floating point: text is split at its decimal point and parsed as an
integer.
"""

from functools import lru_cache

SCALE = 10**9
DIGITS = 9
LIMIT = 9_200_000_000 * SCALE
"""Largest magnitude in nano units: 9.2e9 whole units, just inside a signed 64-bit integer."""

_MAX_TEXT = 64


class Fixed9(int):
    """A number of nano units (1e-9). An ``int`` that the codec writes as decimal text."""

    __slots__ = ()

    def __str__(self) -> str:
        return format_fixed9(self)

    def __repr__(self) -> str:
        return f"Fixed9('{format_fixed9(self)}')"


@lru_cache(maxsize=16384)  # cached: feeds repeat prices and sizes
def parse_fixed9(text: str) -> Fixed9:
    """Read plain decimal text exactly: an optional sign, digits, an optional point and digits.

    Raises:
        ValueError: exponents, NaN, infinities, blanks, separators, more than nine fractional digits that are
        not
            zero, or a magnitude above 9.2e9.
    """
    if len(text) > _MAX_TEXT:
        raise ValueError(f"a number of {len(text)} characters is longer than {_MAX_TEXT}")
    body = text[1:] if text[:1] in ("-", "+") else text
    whole, _, fraction = body.partition(".")
    if not (whole.isdecimal() and whole.isascii()):
        raise ValueError(f"{text!r} is not a plain decimal number")
    if fraction and not (fraction.isdecimal() and fraction.isascii()):
        raise ValueError(f"{text!r} is not a plain decimal number")
    if fraction[DIGITS:].strip("0"):
        raise ValueError(f"{text!r} has more than {DIGITS} fractional digits")
    value = int(whole + fraction[:DIGITS].ljust(DIGITS, "0"))
    return check_fixed9(-value if text[0] == "-" else value)


def round_fixed9(text: str) -> Fixed9:
    """Read decimal text of any length, rounding half to even at the ninth fractional digit, without floats.

    Raises:
        ValueError: as ``parse_fixed9``, except for the number of digits.
    """
    head, point, fraction = text.partition(".")
    kept, rest = parse_fixed9(f"{head}{point}{fraction[:DIGITS]}"), fraction[DIGITS:]
    if not rest:
        return kept
    if not (rest.isdecimal() and rest.isascii()) or len(text) > _MAX_TEXT:
        raise ValueError(f"{text[:_MAX_TEXT]!r} is not a plain decimal number")
    half = "5".ljust(len(rest), "0")  # equal lengths: text compares like numbers
    up = rest > half or (rest == half and kept % 2 == 1)
    if not up:
        return kept
    return check_fixed9(kept - 1 if text.startswith("-") else kept + 1)


def check_fixed9(value: int) -> Fixed9:
    """Check ``value`` as nano units. Raises ValueError when its magnitude is above 9.2e9 whole units."""
    if not -LIMIT <= value <= LIMIT:
        raise ValueError(f"{value} nano units is beyond 9.2e9 whole units")
    return Fixed9(value)


def format_fixed9(value: int) -> str:
    """Shortest decimal text of ``value`` nano units; ``parse_fixed9`` reads it back exactly."""
    whole, fraction = divmod(abs(value), SCALE)
    sign = "-" if value < 0 else ""
    if not fraction:
        return f"{sign}{whole}"
    return f"{sign}{whole}.{fraction:09d}".rstrip("0")
