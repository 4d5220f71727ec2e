"""The Triton backend: the host's metadata and, in other processes, the kernels' results and machine code."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.device_metadata import TILES, DeviceMetadata, Layout, View, lay_out
from engine.attention.metadata import AttentionMetadata, PackedRows
from engine.attention.reads import reads_of
from engine.attention.triton import HOPPER_BYTES
from regions.extents import Extent, Placement
from tests.engine.attention.compiled_triton import ADA_BYTES, variants
from tests.engine.attention.layers import Layer, seen_by_row
from tests.kit.fixtures import Triton


def laid_out(metadata: AttentionMetadata, view: View, programs: int) -> Layout:
    return lay_out(reads_of(metadata), metadata.rows, view, dict.fromkeys(TILES, programs))


def visible(metadata: AttentionMetadata, window: int | None) -> Counter[tuple[int, int, int]]:
    """(row, slot, shift) of every key each row must see, from the definition."""
    rows = enumerate(seen_by_row(metadata, window))
    return Counter((row, *key) for row, keys in rows for key in keys)


def covered(layout: Layout) -> Counter[tuple[int, int, int]]:
    """(row, slot, shift) of every key that the items give each row."""
    met: Counter[tuple[int, int, int]] = Counter()
    for first, count, start, stop, *_ in layout.items:
        for row, shift, low, high in layout.entries[first : first + count]:
            slots = range(max(low, start), min(high, stop))
            met.update((int(row), slot, int(layout.shifts[shift])) for slot in slots)
    return met


@given(
    seed=st.integers(0, 1 << 30),
    window=st.one_of(st.none(), st.integers(1, 250)),
    programs=st.integers(1, 200),
    groups=st.sampled_from([1, 3, 4, 20]),
)
def test_every_row_meets_every_key_it_sees_once(
    seed: int, window: int | None, programs: int, groups: int
) -> None:
    """Items cover what the definition of causal and windowed attention says, in the right frame."""
    metadata = Layer(seed).mixed().metadata
    view = View(window, 2, groups, 128)
    layout = laid_out(metadata, view, programs)
    assert covered(layout) == visible(metadata, window)
    per_tile = layout.tile // groups
    for first, count, start, stop, common_start, common_stop, _, _ in layout.items:
        assert 0 < count <= per_tile
        readers = layout.entries[first : first + count]
        assert start < stop
        # the loop without masks runs over no key that a reader must not see
        assert common_start >= readers[:, 2].max()
        assert common_stop <= readers[:, 3].min()
        assert start >= readers[:, 2].min()
        assert stop <= readers[:, 3].max()
    lengths = layout.items[:, 3] - layout.items[:, 2]
    assert (np.diff(lengths) <= 0).all()
    # each entry of each item writes a part of its own, among those its row merges
    assert sorted(layout.targets) == list(range(layout.offsets[-1]))
    for first, count, *_, target, _ in layout.items:
        rows = layout.entries[first : first + count, 0]
        parts = layout.targets[target : target + count]
        assert (layout.offsets[rows] <= parts).all()
        assert (parts < layout.offsets[rows + 1]).all()


def questions_on_a_tape(count: int, rows: int, keys: int) -> AttentionMetadata:
    tape = Extent(0, keys, 0, 0)
    return AttentionMetadata(
        [
            PackedRows(i * rows, (i + 1) * rows, Placement((tape,), ((keys + 100 * (i + 1), rows),), keys, 0))
            for i in range(count)
        ]
    )


def key_reads(layout: Layout) -> int:
    return int((layout.items[:, 3] - layout.items[:, 2]).sum())


def test_a_shared_tape_is_read_once_for_a_tile_of_readers() -> None:
    """25 questions of one row with 4 grouped heads fill one tile: their tape is read once, not 25 times."""
    view = View(None, 8, 4, 128)
    layout = laid_out(questions_on_a_tape(25, 1, 8192), view, 792)
    assert layout.tile == 128
    assert key_reads(layout) == 8192 + 25
    assert laid_out(questions_on_a_tape(1, 1, 8192), view, 792).tile == 16


def test_one_row_over_a_long_context_fills_the_device() -> None:
    """One row of 128k keys is split over at least two programs for each of 132 multiprocessors."""
    view = View(None, 8, 4, 128)
    for rows, keys in ((1, 131072), (1, 16384), (1024, 15000)):
        layout = laid_out(questions_on_a_tape(1, rows, keys), view, 792)
        assert 2 * 132 <= len(layout.items) * view.kv_heads <= 2 * 792


def test_new_slots_behind_a_private_run_are_one_read_with_it() -> None:
    """A decode step over its own tokens is one run; behind a run that others read too it stays apart."""
    own = Extent(10, 30, 100, 90)
    alone = reads_of(AttentionMetadata([PackedRows(0, 1, Placement((own,), ((40, 1),), 130, 90))]))
    assert list(zip(alone.slot, alone.stop, strict=True)) == [(10, 41)]
    frame = reads_of(AttentionMetadata([PackedRows(0, 1, Placement((own,), ((40, 1),), 130, 130))]))
    assert list(zip(frame.slot, frame.stop, frame.shift, strict=True)) == [(10, 40, 40), (40, 41, 0)]
    shared = reads_of(
        AttentionMetadata(
            [
                PackedRows(0, 1, Placement((own,), ((40, 1),), 130, 90)),
                PackedRows(1, 2, Placement((own,), ((80, 1),), 130, 90)),
            ]
        )
    )
    assert sorted(zip(shared.slot, shared.stop, strict=True)) == [(10, 40), (10, 40), (40, 41), (80, 81)]


def test_a_plan_is_refilled_in_place() -> None:
    """Passes of one bucket use the same memory, and a shorter pass keeps nothing of a longer one."""
    view = View(None, 2, 4, 128)
    longer, shorter = (laid_out(questions_on_a_tape(2, 4, n), view, 30) for n in (1900, 300))
    assert longer.bucket == shorter.bucket
    device_plan = DeviceMetadata(view, longer.bucket, torch.device("cpu"))
    tensors = [getattr(device_plan, name) for name in ("items", "entries", "targets", "shifts", "offsets")]
    addresses = [tensor.data_ptr() for tensor in tensors]
    device_plan.fill(longer)
    device_plan.fill(shorter)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    items = device_plan.items.view(-1, 8).numpy()
    assert (items[: len(shorter.items)] == shorter.items).all()
    assert not items[len(shorter.items) :].any()
    assert len(longer.items) > len(shorter.items)
    offsets = device_plan.offsets.numpy()
    assert (offsets[: len(shorter.offsets)] == shorter.offsets).all()
    assert (offsets[len(shorter.offsets) :] == shorter.offsets[-1]).all()


def test_more_grouped_heads_than_fit_a_tile_are_refused() -> None:
    with pytest.raises(ValueError, match="71 query heads"):
        View(None, 1, 71, 64)


def test_kernels_equal_the_reference_and_the_oracle(triton: Triton) -> None:
    """Everything in `interpreted_triton`: on the GPU if there is one, else in Triton's interpreter."""
    assert "passed" in triton.interpreted.output()


def test_kernels_compile_for_hopper_as_meant(triton: Triton) -> None:
    """For sm_90 without a GPU: 16-byte asynchronous loads, matrix instructions, no spills."""
    built = json.loads(triton.compiled.output())
    assert len(built) == len(variants())
    for kernel in built:
        if kernel["kernel"] == "rotation_table":  # its cosines in fp64 need a stack
            continue
        assert kernel["stack"] == 0, kernel
        if kernel["kernel"] != "attend":
            continue
        if kernel.get("target"):
            assert kernel["shared"] <= ADA_BYTES, kernel
            continue
        assert kernel["shared"] <= HOPPER_BYTES, kernel
        assert kernel["async_copies"] > 0, kernel
        assert kernel["narrow_copies"] == 0, kernel
        if kernel["dtype"] != "fp32":
            assert kernel["mma" if kernel["tile"] == 16 else "wgmma"] > 0, kernel
        if kernel["tile"] == 16:  # three programs fit a multiprocessor
            assert 3 * kernel["shared"] <= 227 << 10, kernel
