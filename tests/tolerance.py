"""How far apart two computations of the same numbers may lie: one bound, from dtype, width and depth.

Two code paths (batched or alone, by extents or densely, on this CPU or that) add the same terms in another
order. With unit roundoff ``u`` of the type, the rounding errors of a sum of n terms behave like a random
walk: the sum is off by about ``u * sqrt(n)`` of its size (Higham, *Accuracy and Stability of Numerical
Algorithms*, section 2.8). Matrix products of half precision are accumulated in float32, and what is stored is
rounded once more. A model makes such a step in every layer; errors of layers are independent and add to the
same residual stream, so they grow like ``sqrt(layers)``:

    bound = MARGIN * size * sqrt(depth) * (u_float32 * sqrt(width) + u_dtype)

``size`` is the largest of the expected values: norms and products carry the rounding of the large ones to the
small ones. MARGIN covers what the estimate leaves out: the largest of 1e4 to 1e5 values lies four standard
deviations out, and a layer is several products and a softmax, not one sum. The largest differences measured
on an x86 CPU are 0.4 of the bound for a layer's attention and 0.2 for logits.

`tests/engine/test_engine_tolerance.py` shows that real mistakes (a rotation off by one position, a token or
an extent left out) are far beyond the bound.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from engine.model.loading import LoadedModel

MARGIN = 4
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff: half the distance between 1 and the next number of the type."""


def rounding(size: float, *, width: int, depth: int = 1, dtype: object = "float32") -> float:
    """The bound for values as large as ``size`` after ``depth`` steps of sums over ``width`` terms."""
    u = ROUNDOFF[str(dtype).removeprefix("torch.")]
    accumulated = min(u, ROUNDOFF["float32"])
    return MARGIN * size * sqrt(depth) * (accumulated * sqrt(width) + u)


def of_model(model: LoadedModel, size: float = 1.0) -> float:
    """The bound for ``model``'s logits as large as ``size``; as it is, relative to their size."""
    config: Any = model.model.config.get_text_config()
    width = max(config.hidden_size, config.intermediate_size)
    return rounding(size, width=width, depth=config.num_hidden_layers, dtype=model.dtype)


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


def of_gap(model: LoadedModel, size: float) -> float:
    """The bound for the difference of two logits as large as ``size``."""
    return 2 * of_model(model, size)


def of_embedded_gap() -> float:
    """The same for answers of the embedded model: 4 layers, sums over up to 320 terms, logits below 8."""
    return 2 * rounding(8.0, width=320, depth=4)


def of_float64(size: float, terms: int = 1000) -> float:
    """The bound after ``terms`` operations in float64 on numbers as large as ``size``, at worst."""
    return MARGIN * size * terms * ROUNDOFF["float64"]
