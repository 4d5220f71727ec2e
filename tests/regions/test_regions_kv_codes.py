"""KV in 8 bits: what codes stand for, and what a pool of them takes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regions.allocator import Run
from regions.kv_codes import SCALE, numbers, row_numbers, stored
from regions.kv_tensors import KVPool, LayerShape

LAYERS = [LayerShape(2, 64, 64), LayerShape(2, 64, 32)]
FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


def coded(*row: float) -> torch.Tensor:
    return stored(torch.tensor([row]), torch.int8)


@given(st.lists(FINITE, min_size=1, max_size=70))
def test_no_number_of_a_row_is_off_by_more_than_half_a_step(row: list[float]) -> None:
    """A step is the largest number over 127; the scale is rounded to 8 bits, and codes stop at 127."""
    exact = torch.tensor([row], dtype=torch.float64)
    held = coded(*row)
    assert held.dtype == torch.int8
    assert held.shape == (1, row_numbers(len(row), torch.int8)) == (1, len(row) + SCALE)
    step = float(exact.abs().max()) / 127
    off = (numbers(held).double() - exact).abs().max()
    assert float(off) <= 0.76 * step + 1e-38


@given(st.lists(FINITE, min_size=1, max_size=70))
def test_codes_of_what_codes_stand_for_are_the_same(row: list[float]) -> None:
    held = coded(*row)
    assert torch.equal(stored(numbers(held), torch.int8), held)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_and_no_other_row_is(bad: float) -> None:
    rows = torch.ones(3, 4)
    rows[1, 2] = bad
    found = numbers(stored(rows, torch.int8))
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_floats_are_held_as_they_are() -> None:
    rows = torch.randn(3, 5)
    assert torch.equal(stored(rows, torch.float32), rows)
    assert torch.equal(numbers(rows.bfloat16()), stored(rows, torch.bfloat16))
    assert row_numbers(5, torch.bfloat16) == 5


def test_a_pool_of_codes_takes_what_its_block_takes_and_zeros_are_zeros() -> None:
    pool = KVPool(LAYERS, 5, block_size=4, dtype=torch.int8)
    each = KVPool.block_bytes(LAYERS, 4, torch.int8)
    assert pool.bytes == 5 * each
    assert each == 4 * (KVPool.block_bytes(LAYERS, 1, torch.float32) // 4 + 8 * SCALE)
    assert all(not numbers(tensor).any() for tensor in pool.tensors)


def test_blocks_move_with_their_scales() -> None:
    pool, other = (KVPool(LAYERS, 6, block_size=4, dtype=torch.int8) for _ in range(2))
    key, value = torch.randn(2, 8, 64), torch.randn(2, 8, 32)
    pool.put(1, torch.arange(8, 16), key, value)
    other.copy_from(pool, [Run(2, 4)], [Run(0, 1), Run(4, 5)])
    pool.move([Run(2, 4)], [Run(4, 6)])
    slots = [0, 1, 2, 3, 16, 17, 18, 19]
    for found, expected in ((other.keys[1], key), (other.values[1], value)):
        assert torch.equal(found[:, slots], stored(expected, torch.int8))
    assert torch.equal(pool.keys[1][:, 16:24], stored(key, torch.int8))
