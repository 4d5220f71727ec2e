"""Attention over mixed batches follows the definition, whatever is packed, cut, masked or broken."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from engine.attention.base import Attention
from engine.attention.cpu import CpuAttention
from engine.attention.cpu_kernel.backend import CpuKernelAttention
from engine.attention.metadata import WINDOWED_PIECE_ROWS, AttentionMetadata, after, split
from engine.attention.reference import ReferenceAttention
from regions.extents import Extent, Placement
from tests.engine.attention.layers import GROUPS, KV_HEADS, Layer, defined, written
from tests.kit import tolerance

BACKENDS: list[type[Attention]] = [CpuAttention, CpuKernelAttention, ReferenceAttention]
WIDTH = 200  # terms of the longest sums: keys that a row sees


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 6, 40])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_mixed_batches_follow_the_definition(
    backend: type[Attention], window: int | None, softcap: float | None
) -> None:
    """Shared and private extents in several frames, windows, soft-caps and sinks, in any mixture."""
    for seed in range(12):
        layer = Layer(seed)
        layer.mixed()
        call = layer.call(window, softcap, sinks=seed % 2 == 1)
        tolerance.assert_sums(backend()(call), defined(call), width=WIDTH)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (CpuAttention, torch.bfloat16),
        (CpuAttention, torch.float16),  # of which our kernel has none
        (CpuKernelAttention, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_half_precision_follows_the_definition_within_its_rounding(
    backend: type[Attention], dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    for seed in range(6):
        layer = Layer(seed, dtype=dtype).mixed()
        call = layer.call(window, softcap)
        call = replace(call, query=call.query.to(dtype))
        actual = backend()(call)
        assert actual.dtype == dtype
        tolerance.assert_sums(actual, defined(call), width=WIDTH)


@pytest.mark.parametrize("backend", [CpuAttention(range_keys=10, capped_scores=1), ReferenceAttention()])
@pytest.mark.parametrize("window", [None, 9, 40])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_pieces_of_long_sequences_and_extents_add_up(
    backend: Attention, window: int | None, softcap: float | None
) -> None:
    layer = Layer(5)
    shared = layer.context(33, 150)
    for rows in (50, 3, 50, 33):
        layer.add(shared, rows)
    call = layer.call(window, softcap)
    pieces = AttentionMetadata(layer.sequences, piece_rows=16, windowed_piece_rows=5)
    assert len(pieces.context(window)) > len(call.metadata.context(window))
    tolerance.assert_sums(backend(replace(call, metadata=pieces)), defined(call), width=WIDTH)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_broken_sequence_leaves_its_neighbours_bit_for_bit(
    backend: type[Attention], window: int | None, softcap: float | None, poison: float
) -> None:
    """Its queries, new keys and values and private context are not finite; some lengths are equal."""
    for rows in (1, 7, 45):
        layer = Layer(rows)
        shared = layer.context(20, 50)
        private = layer.context(30, coord=70)
        for n in (rows, 12, rows, rows):
            layer.add(shared + private if len(layer.sequences) == 2 else shared, n)
        broken = layer.sequences[2]
        expected = backend()(layer.call(window, softcap))
        for first, n in (*broken.placement.slots, private[0][:2]):
            layer.keys[:, first : first + n] = poison
            layer.values[:, first : first + n] = poison
        call = layer.call(window, softcap)
        call.query[:, broken.start : broken.stop] = poison
        actual = backend()(call)
        assert not actual[:, broken.start : broken.stop].isfinite().any()
        others = [row for row in range(actual.shape[1]) if not broken.start <= row < broken.stop]
        assert torch.equal(actual[:, others], expected[:, others])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 6, 40])
def test_a_pass_over_some_rows_gives_what_they_get_among_all(
    backend: type[Attention], window: int | None
) -> None:
    """The rows before them have become context, in the slots they were written to."""
    for seed in range(12):
        layer = Layer(seed)
        layer.mixed()
        call = layer.call(window)
        rows = sorted(
            layer.rng.sample(range(call.metadata.rows), layer.rng.randrange(1, call.metadata.rows + 1))
        )
        some = replace(
            call,
            query=call.query[:, rows],
            new_key=call.new_key[:, rows],
            new_value=call.new_value[:, rows],
            metadata=call.metadata.only(rows),
        )
        assert some.metadata.rows == len(rows)
        assert torch.equal(some.metadata.positions(), call.metadata.positions()[rows])
        tolerance.assert_sums(backend()(some), backend()(call)[:, rows], width=WIDTH)


class Products(TorchFunctionMode):
    """How many numbers each matrix product gives."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.matmul:
            self.sizes.append(result.numel())
        return result


def test_only_a_part_of_the_soft_capped_scores_is_in_memory_at_a_time() -> None:
    """An append behind a long context: products with keys and with values, none of them larger."""
    layer = Layer(1, 6000)
    layer.add(layer.context(4900), 100)
    with Products() as products:
        CpuAttention(capped_scores=64 * 1024)(layer.call(softcap=5.0))
    assert sum(products.sizes) > KV_HEADS * GROUPS * 100 * 4900
    assert max(products.sizes) <= 64 * 1024


def test_shared_extents_are_met_by_all_their_readers_at_once() -> None:
    layer = Layer(2)
    prefix, tape = layer.context(100, 60)
    for _ in range(16):
        layer.add((prefix, *layer.context(5, coord=100)), 1)
    for _ in range(25):
        layer.add((prefix, tape), 7)
    parts = AttentionMetadata(layer.sequences).context(None)
    rows = {(part.start, part.stop): part.rows for part in parts}
    assert rows[prefix.slot, prefix.slot + 100] == slice(0, 16 + 25 * 7)
    assert rows[tape.slot, tape.slot + 60] == slice(16, 16 + 25 * 7)
    assert len(parts) == 2 + 16
    assert [new.count for new in AttentionMetadata(layer.sequences).new(None)] == [16, 25]


@pytest.mark.parametrize("window", [300, 700, 5000])
def test_masks_are_no_larger_than_a_piece_and_leave_no_row_blind(window: int) -> None:
    layer = Layer(3)
    layer.add(layer.context(1000, 3000), 1500)
    masks = [
        part.visible
        for part in AttentionMetadata(layer.sequences).context(window)
        if part.visible is not None
    ]
    assert masks
    assert all(max(mask.shape) <= WINDOWED_PIECE_ROWS for mask in masks)
    assert all(mask.any(-1).all() for mask in masks)


@given(st.integers(1, 30), st.integers(0, 40), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 40)))
def test_an_extent_splits_into_what_some_rows_and_what_all_rows_see(
    length: int, gap: int, rows: int, window: int | None
) -> None:
    extent, coord = Extent(7, length, 100, 90), 100 + length + gap
    some, every = split(extent, coord, rows, window)
    reach = math.inf if window is None else window
    seen = [sum(row - key < reach for row in range(coord, coord + rows)) for key in range(100, 100 + length)]
    keys = [key for key, readers in zip(range(100, 100 + length), seen, strict=True) if readers]
    assert [
        *range(some.coord, some.coord + some.length),
        *range(every.coord, every.coord + every.length),
    ] == keys
    assert every.length == sum(readers == rows for readers in seen)
    assert some.slot - 7 == some.coord - 100
    assert every.slot - 7 == every.coord - 100


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_the_rest_of_a_placement_sees_what_came_before_it(counts: list[int], data: st.DataObject) -> None:
    slots = tuple((100 * i, count) for i, count in enumerate(counts))
    tokens = data.draw(st.integers(0, sum(counts) - 1))
    rest = after(Placement((Extent(900, 5, 40, 3),), slots, 45, 10), tokens)
    before = [(e.slot + i, e.coord + i) for e in rest.context[1:] for i in range(e.length)]
    everything = [slot for first, n in slots for slot in range(first, first + n)]
    assert [slot for slot, _ in before] + written(rest) == everything
    assert [coord for _, coord in before] == list(range(45, 45 + tokens))
    assert all(e.origin == 10 for e in rest.context[1:])
    assert (rest.coord, rest.origin) == (45 + tokens, 10)
