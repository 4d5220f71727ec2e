"""How far apart two computations of the same numbers may lie: one bound, from dtype, width and depth.

The bound itself and its reasons are in `engine/rounding.py`.

`tests/engine/test_engine_tolerance.py` shows that real mistakes (a rotation off by one position, a token or
an extent left out) are far beyond the bound.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any

import pytest

from engine.rounding import MARGIN, ROUNDOFF, of_gap, of_model, rounding

__all__ = ["MARGIN", "ROUNDOFF", "of_gap", "of_model", "rounding"]

if TYPE_CHECKING:
    import torch

    from engine.model.loaded import LoadedModel


def largest(values: torch.Tensor) -> float:
    """The largest absolute value."""
    return float(values.detach().abs().max())


def apart(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; NaN when either has one."""
    assert actual.shape == expected.shape
    return largest(actual.float().cpu() - expected.float().cpu())


def assert_logits(model: LoadedModel, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Both are logits of ``model`` for the same tokens."""
    difference, bound = apart(actual, expected), of_model(model, largest(expected))
    assert difference <= bound, f"logits are {difference:.3g} apart, {bound:.3g} is rounding"


def assert_sums(actual: torch.Tensor, expected: torch.Tensor, *, width: int, dtype: object = None) -> None:
    """Both are the same sums over ``width`` terms, such as one layer's attention.

    ``dtype``: in which they were made, by default that of ``actual``.
    """
    difference = apart(actual, expected)
    bound = rounding(largest(expected), width=width, dtype=dtype or actual.dtype)
    assert difference <= bound, f"values are {difference:.3g} apart, {bound:.3g} is rounding"


def near(expected: float, bound: float) -> Any:
    """``expected`` within ``bound``, to be compared with ``==``."""
    return pytest.approx(expected, rel=0, abs=bound)


def of_divergence(model: LoadedModel, size: float, nats: float = 0.0) -> float:
    """The bound for a divergence of ``nats`` between two distributions of logits as large as ``size``.

    Logits off by e move log-probabilities by at most d = 2 e, and KL, whose slope is 0 where both agree, by
    d * sqrt(2 KL) + d**2 (Pinsker, and the expansion to second order).
    """
    off = 2 * of_model(model, size)
    return off * sqrt(2 * nats) + off**2


def of_embedded_gap() -> float:
    """The same for answers of the embedded model: 4 layers, sums over up to 320 terms, logits below 8."""
    return 2 * rounding(8.0, width=320, depth=4)


def of_float64(size: float, terms: int = 1000) -> float:
    """The bound after ``terms`` operations in float64 on numbers as large as ``size``, at worst."""
    return MARGIN * size * terms * ROUNDOFF["float64"]
