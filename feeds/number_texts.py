"""How a file writes numbers: its decimal point, its thousands, and its words for no value."""

import re
from collections.abc import Callable

Plain = Callable[[str], str]
"""A number as a file writes it to decimal text; raises ValueError."""

POINTS = (".", ",")
SEPARATORS = (",", ".", "'", "\u2019", "_", " ", "\u00a0", "\u202f")
"""What may stand between thousands."""
_EXPONENT = re.compile(r"[eE][+-]?\d{1,4}$", re.ASCII)


class JsonNumber(str):
    """The text of a number of JSON, which has a point and no thousands whatever a format declares."""

    __slots__ = ()


def shown(text: str, length: int = 100) -> str:
    """Text of a file as a message shows it: its beginning."""
    return repr(text) if len(text) <= length else f"{text[:length]!r}..."


def plain_numbers(decimal: str, thousands: str) -> Plain | None:
    """What turns this notation into decimal text with a point; None where it is that already.

    Thousands are taken out only where they stand in groups: of three digits last, of two or three before.
    So ``1,23`` is no number where a comma separates thousands.
    """
    if decimal == "." and not thousands:
        return None
    separator = re.escape(thousands)
    groups = rf"|\d{{1,3}}(?:{separator}\d{{2,3}})*{separator}\d{{3}}" if thousands else ""
    number = re.compile(rf"([+-]?)(\d*{groups})(?:{re.escape(decimal)}(\d*))?([eE][+-]?\d{{1,4}})?", re.ASCII)

    def plain(text: str) -> str:
        if isinstance(text, JsonNumber):
            return text
        found = number.fullmatch(text)
        if found is None:
            what = f" and {thousands!r} between thousands" if thousands else ""
            raise ValueError(f"{shown(text)} is not a number with {decimal!r} before decimals{what}")
        sign, whole, fraction, exponent = found.groups()
        whole = whole.replace(thousands, "") if thousands else whole
        return f"{sign}{whole}{'' if fraction is None else f'.{fraction}'}{exponent or ''}"

    return plain


def shifted(text: str, places: int) -> str:
    """Decimal text with its point moved ``places`` to the left, by its exponent."""
    found = _EXPONENT.search(text)
    exponent = int(found[0][1:]) if found else 0
    return f"{text[: found.start()] if found else text}e{exponent - places}"
