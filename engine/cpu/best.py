"""The two best logits of each row, compiled: torch takes a dozen operators for a few numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from metrics.kernel import kernel

FIELDS = 4
"""Of a row, before the logits of its choices: token, highest and second logit, spread."""


@kernel
def two_best(values: Any, allowed: Any, out: Any) -> None:
    """out[r] = `FIELDS` of ``values[r]``, then the logits of ``allowed[r]``; float32 [rows, width], float64 out.

    Ids that are -1 are padding; a row without others may choose any. Of equal logits the first counts; of a
    single choice the second is the highest. The spread is that of the whole row, NaN unless all is finite.
    """
    for r in range(values.shape[0]):
        at, finite = 0, True
        low = high = values[r, 0]
        second = np.float32(-np.inf)
        for i in range(values.shape[1]):
            x = values[r, i]
            finite &= np.isfinite(x)
            low = min(low, x)
            if x > high:
                at, second, high = i, high, x
            elif i > 0 and x > second:
                second = x
        spread = high - low
        if not finite:
            spread = np.float32(np.nan)
        if allowed.shape[1] and allowed[r, 0] >= 0:
            at = allowed[r, 0]
            high, second = values[r, at], np.float32(-np.inf)
            for j in range(1, allowed.shape[1]):
                if allowed[r, j] < 0:
                    break
                x = values[r, allowed[r, j]]
                if x > high:
                    at, second, high = allowed[r, j], high, x
                elif x > second:
                    second = x
            if second == -np.inf:
                second = high
        out[r, 0], out[r, 1], out[r, 2], out[r, 3] = at, high, second, spread
        for j in range(allowed.shape[1]):
            out[r, FIELDS + j] = values[r, max(allowed[r, j], 0)]
