"""The two best logits of each row, compiled: torch takes a dozen operators for a few numbers.

Floats are compared as integers (`_key`), since numba makes vector code only of such maxima.
"""

from typing import Any

import numpy as np

from support.numba_kernel import kernel

FIELDS = 4
"""Of a row, before the logits of its choices: token, highest and second logit, spread."""
_BLOCK = 512
_INFINITE = np.int32(0x7F800000)
_MOST, _LEAST = np.int32(0x7FFFFFFF), np.int32(-0x80000000)


@kernel
def _key(bits: Any) -> Any:
    """An integer that orders a float as the float; zeros of either sign have one."""
    key = np.int32(bits ^ (np.int32(bits >> 31) & _MOST))
    return np.int32(key + np.int32(key == -1))


@kernel
def _values(keys: Any) -> Any:
    """The floats of `_key`s."""
    for i in range(len(keys)):
        if keys[i] < 0:
            keys[i] ^= _MOST
    return keys.view(np.float32)


@kernel
def _of_block(bits: Any, first: int, stop: int) -> Any:
    """Highest and lowest key, and how many floats are not finite."""
    high, low, infinite = _LEAST, _MOST, np.int32(0)
    for i in range(first, stop):
        key = _key(bits[i])
        high, low = max(high, key), min(low, key)
        infinite += np.int32((bits[i] & _INFINITE) == _INFINITE)
    return high, low, infinite


@kernel
def _two_best(bits: Any) -> Any:
    """The first index of the highest value, the highest, the second, and the spread."""
    width, best, infinite = len(bits), 0, 0
    high, second, low = _LEAST, _LEAST, _MOST
    for first in range(0, width, _BLOCK):
        highest, lowest, count = _of_block(bits, first, min(first + _BLOCK, width))
        infinite += count
        low = min(low, lowest)
        if highest > high:
            best, high, highest = first, highest, high
        second = max(second, highest)
    at = best
    while _key(bits[at]) != high:
        at += 1
    for i in range(best, min(best + _BLOCK, width)):
        if i != at:
            second = max(second, _key(bits[i]))
    highest, next_best, lowest = _values(np.array([high, second, low]))
    spread = highest - lowest
    return (
        at,
        highest,
        np.float32(-np.inf) if width == 1 else next_best,
        spread if infinite == 0 else np.float32(np.nan),
    )


@kernel
def two_best(values: Any, bits: Any, allowed: Any, out: Any) -> None:
    """Write `FIELDS` of each row of ``values``, then the logits of its ``allowed`` ids.

    ``values``: float32 [rows, width]; ``bits``: the same as int32; ``out``: float64. Ids that are -1 are
    padding; a row without others may choose any. Of equal logits the first counts; of a single choice the
    second is the highest. The spread is that of the whole row, NaN unless all is finite.
    """
    for r in range(values.shape[0]):
        row = values[r]
        at, high, second, spread = _two_best(bits[r])
        if allowed.shape[1] and allowed[r, 0] >= 0:
            at = allowed[r, 0]
            high, second = row[at], np.float32(-np.inf)
            for j in range(1, allowed.shape[1]):
                if allowed[r, j] < 0:
                    break
                x = row[allowed[r, j]]
                if x > high:
                    at, second, high = allowed[r, j], high, x
                elif x > second:
                    second = x
            if second == -np.inf:
                second = high
        out[r, 0], out[r, 1], out[r, 2], out[r, 3] = at, high, second, spread
        for j in range(allowed.shape[1]):
            out[r, FIELDS + j] = row[max(allowed[r, j], 0)]
