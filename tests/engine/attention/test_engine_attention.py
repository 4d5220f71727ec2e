"""Attention over mixed batches follows the definition, whatever is packed, cut, masked or broken."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from engine.attention import short_extents
from engine.attention.base import Attention, LayerCall
from engine.attention.cpu import CpuAttention
from engine.attention.cpu_kernel.backend import CpuKernelAttention
from engine.attention.metadata import WINDOWED_PIECE_ROWS, AttentionMetadata, PackedRows, after, split
from engine.attention.reference import ReferenceAttention
from engine.attention.rotary import FrameRotation
from regions.extents import Extent, Placement, SlotRange
from tests.kit import tolerance

BACKENDS: list[type[Attention]] = [CpuAttention, CpuKernelAttention, ReferenceAttention]
KV_HEADS, GROUPS, DIM, ROTARY = 2, 3, 16, 12
WIDTH = 200  # terms of the longest sums: keys that a row sees
INV_FREQ = 0.7 ** torch.arange(ROTARY // 2)


class Layer:
    """A pool of one layer and the sequences of a pass over it, made up as they are added."""

    def __init__(self, seed: int, slots: int = 1200) -> None:
        self.rng = random.Random(seed)
        self.keys, self.values = torch.randn(2, KV_HEADS, slots, DIM, generator=self._generator(seed))
        self.next = 0
        self.sequences: list[PackedRows] = []

    @staticmethod
    def _generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def extent(self, length: int, coord: int, origin: int) -> Extent:
        """A run of ``length`` slots after all others."""
        self.next += length + 1
        return Extent(self.next - length, length, coord, origin)

    def context(self, *lengths: int, coord: int = 0) -> tuple[Extent, ...]:
        """Runs one after the other, each in a frame of its own."""
        extents = []
        for length in lengths:
            extents.append(self.extent(length, coord, coord - self.rng.randrange(50)))
            coord += length
        return tuple(extents)

    def add(self, context: tuple[Extent, ...], rows: int) -> PackedRows:
        """A sequence of ``rows`` new tokens after ``context``, in one or two runs of slots."""
        coord = context[-1].coord + context[-1].length if context else 0
        cut = self.rng.randrange(1, rows) if rows > 1 and self.rng.random() < 0.5 else rows
        slots: list[SlotRange] = [(self.extent(n, 0, 0).slot, n) for n in (cut, rows - cut) if n]
        start = self.sequences[-1].stop if self.sequences else 0
        origin = coord - self.rng.randrange(50)
        self.sequences.append(
            PackedRows(start, start + rows, Placement(context, tuple(slots), coord, origin))
        )
        return self.sequences[-1]

    def mixed(self) -> None:
        """Readers of a shared context, some with own tokens, of equal and other lengths; a prompt."""
        shared = self.context(*(self.rng.randrange(1, 60) for _ in range(self.rng.randrange(1, 4))))
        for _ in range(self.rng.randrange(1, 6)):
            context = shared
            if self.rng.random() < 0.4:
                context += self.context(self.rng.randrange(1, 20), coord=shared[-1].coord + shared[-1].length)
            self.add(context, self.rng.choice([1, 1, 7, 7, 12, 45]))
            if self.rng.random() < 0.3:
                self.add((), self.rng.randrange(1, 50))

    def call(
        self, window: int | None = None, softcap: float | None = None, *, sinks: bool = False
    ) -> LayerCall:
        """The pass, its new keys and values in the pool."""
        rows = self.sequences[-1].stop
        generator = self._generator(rows)
        new = [
            slot for s in self.sequences for first, n in s.placement.slots for slot in range(first, first + n)
        ]
        return LayerCall(
            torch.randn(KV_HEADS * GROUPS, rows, DIM, generator=generator) * 2,
            self.keys[:, new],
            self.values[:, new],
            self.keys,
            self.values,
            DIM**-0.5,
            softcap,
            window,
            AttentionMetadata(self.sequences),
            FrameRotation(INV_FREQ),
            torch.randn(KV_HEADS * GROUPS, generator=generator) if sinks else None,
        )


def defined(call: LayerCall) -> torch.Tensor:
    """Attention by the definition, row by row in float64: every key within the window, at its distance."""
    outputs = []
    for sequence in call.metadata.sequences:
        placement = sequence.placement
        for row in range(sequence.start, sequence.stop):
            coord = placement.coord + row - sequence.start
            written = [slot for first, n in placement.slots for slot in range(first, first + n)]
            seen = [
                (e.slot + i, e.coord + i, placement.origin - e.origin)
                for e in placement.context
                for i in range(e.length)
            ]
            seen += [
                (slot, placement.coord + i, 0)
                for i, slot in enumerate(written[: coord - placement.coord + 1])
            ]
            if call.window is not None:
                seen = [key for key in seen if coord - key[1] < call.window]
            slots, shifts = [key[0] for key in seen], [key[2] for key in seen]
            heads = call.query[:, row].double().view(KV_HEADS, GROUPS, 1, DIM).expand(-1, -1, len(seen), -1)
            rotated_query = rotated(heads, torch.tensor(shifts))
            scores = (rotated_query * call.keys[:, None, slots].double()).sum(-1) * call.scale
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            if call.sinks is not None:
                scores = torch.cat((scores, call.sinks.double().view(KV_HEADS, GROUPS, 1)), -1)
            weights = torch.softmax(scores, -1)[..., : len(seen)]
            outputs.append((weights[..., None] * call.values[:, None, slots].double()).sum(2).flatten(0, 1))
    return torch.stack(outputs, 1).float()


def rotated(x: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Each pair of dimensions as a complex number, rotated."""
    pairs = torch.complex(x[..., : ROTARY // 2], x[..., ROTARY // 2 : ROTARY])
    pairs = pairs * torch.exp(1j * shifts.double()[:, None] * INV_FREQ.double())
    return torch.cat((pairs.real, pairs.imag, x[..., ROTARY:]), -1)


def largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())


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


@pytest.mark.parametrize("backend", [CpuAttention, CpuKernelAttention])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_half_precision_follows_the_definition_within_its_rounding(
    backend: type[Attention], window: int | None, softcap: float | None
) -> None:
    for seed in range(6):
        layer = Layer(seed)
        layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()
        layer.mixed()
        call = layer.call(window, softcap)
        call = replace(call, query=call.query.bfloat16())
        actual = backend()(call)
        assert actual.dtype == torch.bfloat16
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


def test_short_extents_of_many_readers_are_met_in_one_product() -> None:
    """Extents of similar length in several frames, two of one reader; a long and a single one stay apart."""
    layer = Layer(4)
    prefix = layer.context(100)
    for length in (9, 16, 12, 16, 13, 300, 3):
        layer.add(prefix + layer.context(length, coord=100), 1)
    layer.add(prefix + layer.context(11, 10, coord=100), 1)
    call = layer.call()
    _, batched = short_extents.batch_short(call.metadata.context(None))
    assert [parts.count for parts in batched] == [6]
    tolerance.assert_sums(CpuAttention()(call), defined(call), width=WIDTH)


def test_short_extents_of_one_reader_in_one_frame_are_joined() -> None:
    """Its bars and its question's tokens, also where it is alone; and not those of another frame."""
    layer = Layer(7)
    prefix = layer.context(90)
    for lengths in ((70, 37), (64, 30), (200, 100), (37, 5, 40)):
        own, coord, origin = (), 90, layer.rng.randrange(90)
        for length in lengths:
            own += (layer.extent(length, coord, origin),)
            coord += length
        layer.add(prefix + own, 1)
    layer.add(prefix + layer.context(70, 37, coord=90), 1)
    call = layer.call()
    _, batched = short_extents.batch_short(call.metadata.context(None))
    assert [(parts.count, parts.slots.numel()) for parts in batched] == [(4, 4 * 107), (1, 300)]
    tolerance.assert_sums(CpuAttention()(call), defined(call), width=WIDTH)


def test_what_is_copied_at_a_time_is_bounded() -> None:
    """By reader and by product."""
    layer = Layer(8)
    prefix = layer.context(90)
    for _ in range(3):
        pieces = zip((30, 30, 20, 40), (90, 120, 150, 170), strict=True)
        layer.add(prefix + tuple(layer.extent(length, coord, 7) for length, coord in pieces), 1)
    metadata, call = AttentionMetadata(layer.sequences), layer.call()
    _, batched = short_extents.batch_short(metadata.context(None), 64, 2 * 64)
    assert sorted((parts.count, parts.slots.numel()) for parts in batched) == [(1, 60)] * 2 + [(2, 120)] * 2
    tolerance.assert_sums(CpuAttention()(call), defined(call), width=WIDTH)


def test_a_broken_short_extent_leaves_those_batched_with_it_bit_for_bit() -> None:
    """The slots after a shorter extent are the broken one's; a read past its end would not be masked."""
    layer = Layer(6)
    prefix = layer.context(40)
    own = [layer.context(length, coord=40) for length in (9, 16, 12)]
    for context in own:
        layer.add(prefix + context, 1)
    expected = CpuAttention()(layer.call())
    ((slot, length, _, _),) = own[1]
    layer.values[:, slot : slot + length] = float("nan")
    actual = CpuAttention()(layer.call())
    assert actual[:, 1].isnan().all()
    assert torch.equal(actual[:, [0, 2]], expected[:, [0, 2]])


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
    written = [(e.slot + i, e.coord + i) for e in rest.context[1:] for i in range(e.length)]
    left = [slot for first, n in rest.slots for slot in range(first, first + n)]
    everything = [slot for first, n in slots for slot in range(first, first + n)]
    assert [slot for slot, _ in written] + left == everything
    assert [coord for _, coord in written] == list(range(45, 45 + tokens))
    assert all(e.origin == 10 for e in rest.context[1:])
    assert (rest.coord, rest.origin) == (45 + tokens, 10)
