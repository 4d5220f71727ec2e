"""Volumes without a limit: three integers that are added with carry, in compiled code and in Python.

A volume is ``v`` units of 1e-9, as long as that fits a signed 64-bit integer. Beyond it, ``v_high`` counts
`HIGH` such units and ``v`` is the rest; it is 0 for all volumes up to 9.2e9. ``v_low`` counts units of 1e-18,
of which `LOW` are one of 1e-9; it is 0 where no size was finer than 1e-9. So every volume has one form.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from support.numba_kernel import kernel

HIGH = 10**18
LOW = 10**9
SCALE = 18
"""Decimals of the unit of an exact volume."""
MAX_INT64 = int(np.iinfo(np.int64).max)
_TENS = 10 ** np.arange(19, dtype=np.int64)


class Volume(NamedTuple):
    """The three integers, most significant first."""

    high: int
    nano: int
    low: int

    @classmethod
    def of(cls, exact: int) -> Volume:
        """The volume of a number of units of 1e-18; not negative."""
        nano, low = divmod(exact, LOW)
        return cls(0, nano, low) if nano <= MAX_INT64 else cls(*divmod(nano, HIGH), low)

    @property
    def exact(self) -> int:
        """In units of 1e-18."""
        return (self.high * HIGH + self.nano) * LOW + self.low


def volume_of(bar: Any) -> Volume:
    """The volume of one element of a BAR array."""
    return Volume(int(bar["v_high"]), int(bar["v"]), int(bar["v_low"]))


def put_volume(bar: Any, volume: Volume) -> None:
    """Give one element of a BAR array another volume."""
    bar["v_high"], bar["v"], bar["v_low"] = volume


@kernel
def no_volume(bar: Any) -> None:
    """Set the volume of a bar to 0."""
    bar["v_high"] = 0
    bar["v"] = 0
    bar["v_low"] = 0


@kernel
def add_volume(bar: Any, units: int, finer: int) -> None:
    """Add ``units`` of 10^-(9 + ``finer``) each, 0 or more of them, to the volume of a bar."""
    if finer == 0 and bar["v_high"] == 0 and units <= MAX_INT64 - bar["v"]:
        bar["v"] += units
    else:
        bar["v_high"], bar["v"], bar["v_low"] = _sum(bar["v_high"], bar["v"], bar["v_low"], units, finer)


@kernel
def is_volume(bar: Any, units: int, finer: int) -> bool:
    """Whether the volume of a bar is as many ``units`` of 10^-(9 + ``finer``)."""
    high, nano, low = _sum(0, 0, 0, units, finer)
    same: bool = high == bar["v_high"] and nano == bar["v"] and low == bar["v_low"]
    return same


@kernel
def _sum(high: Any, nano: Any, low: Any, units: Any, finer: int) -> tuple[Any, Any, Any]:
    """The three integers of a volume and ``units`` units more."""
    shift: Any = np.int64(finer)
    more: Any = np.int64(units)
    if shift > 0:
        low += (more % _TENS[shift]) * _TENS[9 - shift]
        more //= _TENS[shift]
    elif shift < 0:
        most = _TENS[18 + shift]  # units in one of `high`
        high += more // most
        more = (more % most) * _TENS[-shift]
    high += more // HIGH + nano // HIGH
    nano = more % HIGH + nano % HIGH + low // LOW
    high += nano // HIGH
    nano %= HIGH
    if high < 9 or (high == 9 and nano <= MAX_INT64 - 9 * HIGH):
        nano += high * HIGH
        high = 0
    return np.int64(high), np.int64(nano), np.int64(low % LOW)
