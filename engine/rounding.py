"""How far apart two computations of the same logits may lie, from dtype, width and depth.

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
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.model.loaded import LoadedModel

MARGIN = 4
ROUNDOFF = {
    "float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 2.0**-8,
}  # fmt: skip
"""Unit roundoff: half the distance between 1 and the next number of the type; of codes, half a step of them
by the largest number of a row."""


def rounding(size: float, *, width: int, depth: int = 1, dtype: object = "float32") -> float:
    """The bound for values as large as ``size`` after ``depth`` steps of sums over ``width`` terms."""
    u = ROUNDOFF[_name(dtype)]
    accumulated = min(u, ROUNDOFF["float32"])
    return MARGIN * size * sqrt(depth) * (accumulated * sqrt(width) + u)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def of_model(model: LoadedModel, size: float = 1.0) -> float:
    """The bound for ``model``'s logits as large as ``size``; as it is, relative to their size."""
    dtype = max((_name(each) for each in (model.dtype, model.kv_dtype)), key=ROUNDOFF.__getitem__)
    return rounding(size, width=model.sizes.width, depth=model.sizes.layers, dtype=dtype)


def of_gap(model: LoadedModel, size: float) -> float:
    """The bound for the difference of two logits as large as ``size``."""
    return 2 * of_model(model, size)
