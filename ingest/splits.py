"""Bars of before a split in the units behind it: prices are divided by its factor, volumes multiplied."""

from collections.abc import Sequence
from fractions import Fraction

from ingest.volumes import MAX_INT64, Volume

_MOST_UNITS = 10**6
"""Largest number of old or new units that a ratio is recognised with: 0.666666667 is two for three."""


def ratio_of(factor: float) -> Fraction:
    """New units for one old unit, exactly, of a ``factor`` that was rounded to 1e-9."""
    if factor < 1:  # of many old units one new one: their number is the exact one
        return 1 / Fraction(1 / factor).limit_denominator(_MOST_UNITS)
    return Fraction(factor).limit_denominator(_MOST_UNITS)


def adjusted(prices: Sequence[int], volume: Volume, ratio: Fraction) -> tuple[list[int], Volume]:
    """Prices and volume behind a split of ``ratio``, each rounded half to even to its own unit.

    Raises OverflowError: a price does not fit 64 bits.
    """
    made = [round(price / ratio) for price in prices]
    if any(abs(price) > MAX_INT64 for price in made):
        raise OverflowError("a price behind the split does not fit 64 bits")
    return made, Volume.of(round(volume.exact * ratio))
