"""Products of rows with packed weights, and of siblings with one input, equal those in float64."""

import gc
from weakref import ref

import pytest
import torch
from torch.nn.functional import linear

from engine.linears.products import ONEDNN, TORCH, MatmulLibrary, Part, Product, Way, build
from tests.kit import tolerance

LIBRARIES = [TORCH] if ONEDNN is None else [TORCH, ONEDNN]
DTYPES = (torch.float32, torch.bfloat16)
OUTS = (6, 1, 33)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


@pytest.fixture(params=LIBRARIES, ids=lambda each: each.name)
def library(request: pytest.FixtureRequest, dtype: torch.dtype) -> MatmulLibrary:
    each: MatmulLibrary = request.param
    try:
        each.apply(torch.ones(1, 1, 4, dtype=dtype), each.pack(torch.ones(4, 4, dtype=dtype)), None)
    except RuntimeError as error:
        pytest.skip(f"this CPU has no such product: {error}")
    return each


def random(*shape: int, seed: int = 0, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_product(actual: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: object) -> None:
    """``actual`` is the product of ``rows``, but for rounding."""
    expected = linear(rows.double(), weight.double(), bias.double() if torch.is_tensor(bias) else None)
    assert actual.dtype == rows.dtype
    tolerance.assert_sums(actual, expected, width=weight.shape[1])


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (77, 129), (352, 128), (1472, 64)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_every_row_count_and_shape(
    library: MatmulLibrary, dtype: torch.dtype, shape: tuple[int, int], biased: bool
) -> None:
    weight = random(*shape, dtype=dtype)
    bias = random(shape[0], seed=1, dtype=dtype) if biased else None
    (part,) = build(Way(library), [weight], [bias])
    for count in (1, 2, 3, 8, 33, 100, 257):
        rows = random(1, count, shape[1], seed=count, dtype=dtype)
        output = part.forward(rows)
        assert_product(output, rows, weight, bias)
        assert torch.equal(output, part.forward(rows.clone()))
        assert_product(part.plain(rows), rows, weight, bias)
    assert part.forward(random(1, 0, shape[1], dtype=dtype)).shape == (1, 0, shape[0])
    apart = random(1, 9, 2 * shape[1], seed=2, dtype=dtype)[..., ::2]
    assert_product(part.forward(apart), apart, weight, bias)


def siblings(
    library: MatmulLibrary, dtype: torch.dtype
) -> tuple[list[Part], list[torch.Tensor], list[torch.Tensor | None]]:
    """Three layers in one product, of which the second has no bias."""
    weights = [random(outs, 20, seed=outs, dtype=dtype) for outs in OUTS]
    biases = [random(6, seed=4, dtype=dtype), None, random(33, seed=5, dtype=dtype)]
    return build(Way(library, joint=True), weights, biases), weights, biases


def test_siblings_of_one_input_are_handed_their_columns(library: MatmulLibrary, dtype: torch.dtype) -> None:
    """In any order, again and again, and by turns for two inputs."""
    parts, weights, biases = siblings(library, dtype)
    one, two = (random(1, count, 20, seed=count, dtype=dtype) for count in (7, 3))
    for rows, number in [(one, 0), (one, 1), (two, 2), (one, 2), (one, 2), (two, 0), (two, 1), (one, 0)]:
        assert_product(parts[number].forward(rows), rows, weights[number], biases[number])
        assert_product(parts[number].plain(rows), rows, weights[number], biases[number])


def test_siblings_are_one_product_and_only_for_the_very_same_input() -> None:
    seen: list[torch.Tensor] = []

    def counting(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(rows)
        return linear(rows, weight, bias)

    parts, _, _ = siblings(MatmulLibrary("counting", counting), torch.float32)
    rows = random(1, 4, 20, dtype=torch.float32)
    for part in parts:
        part.forward(rows)
    assert len(seen) == 1
    parts[0].forward(rows)
    parts[1].forward(rows.clone())
    assert len(seen) == 3


def test_after_an_interruption_nothing_is_kept_and_nothing_is_stale() -> None:
    """What a sibling never asked for lives no longer than the input, and serves no other."""
    parts, weights, _ = siblings(TORCH, torch.float32)
    rows = random(1, 4, 20, dtype=torch.float32)
    first = parts[0].forward(rows)
    kept = ref(next(iter(vars(rows).values()))[2])
    assert kept() is not None
    gone = ref(rows)
    del rows
    gc.collect()
    assert gone() is None
    assert kept() is None
    assert first.shape == (1, 4, 6)
    fresh = random(1, 2, 20, seed=9, dtype=torch.float32)
    assert_product(parts[1].forward(fresh), fresh, weights[1], None)


def test_two_products_of_one_input_do_not_meet() -> None:
    """As where attention and feed-forward get the same normed input."""
    one, weights, biases = siblings(TORCH, torch.float32)
    others = [2 * weight for weight in weights]
    two = build(Way(TORCH, joint=True), others, [None] * 3)
    rows = random(1, 4, 20, dtype=torch.float32)
    for number in range(3):
        assert_product(one[number].forward(rows), rows, weights[number], biases[number])
        assert_product(two[number].forward(rows), rows, others[number], None)


def test_a_packed_layer_shows_the_shape_of_its_weight_and_no_values(library: MatmulLibrary) -> None:
    weights = [random(outs, 20, seed=outs, dtype=torch.float32) for outs in OUTS]
    for weight, part in zip(weights, Product(library, weights, [None] * 3).parts, strict=True):
        shown = part.shown()
        assert (shown.shape, shown.dtype, shown.device) == (weight.shape, weight.dtype, weight.device)
        assert shown.isnan().all() if library.packs else torch.equal(shown, weight)
