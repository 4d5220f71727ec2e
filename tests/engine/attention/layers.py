"""One layer's attention over made-up sequences, and its definition."""

from __future__ import annotations

import random

import torch

from engine.attention.base import LayerCall
from engine.attention.metadata import AttentionMetadata, PackedRows
from engine.attention.rotary import FrameRotation
from regions.extents import Extent, Placement, SlotRange
from regions.kv_codes import numbers, stored

KV_HEADS, GROUPS, DIM, ROTARY = 2, 3, 16, 12


class Layer:
    """A pool of one layer and the sequences of a pass over it, made up as they are added.

    ``page_major``: heads lie side by side in memory, instead of slots.
    """

    def __init__(
        self,
        seed: int,
        slots: int = 1200,
        *,
        kv_heads: int = KV_HEADS,
        groups: int = GROUPS,
        dims: tuple[int, int] = (DIM, DIM),
        rotary: int = ROTARY,
        dtype: torch.dtype = torch.float32,
        page_major: bool = False,
        device: str = "cpu",
    ) -> None:
        self.rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        shape = (slots, kv_heads) if page_major else (kv_heads, slots)
        pools = [stored(torch.randn(*shape, dim, generator=generator).to(device), dtype) for dim in dims]
        self.dim = dims[0]
        self.keys, self.values = (pool.transpose(0, 1) if page_major else pool for pool in pools)
        self.heads = kv_heads * groups
        self.rotation = FrameRotation(0.7 ** torch.arange(rotary // 2, device=device))
        self.next = 0
        self.sequences: list[PackedRows] = []

    def extent(self, length: int, coord: int, origin: int) -> Extent:
        """A run of ``length`` slots after all others."""
        self.next += length + 1
        return Extent(self.next - length, length, coord, origin)

    def context(self, *lengths: int, coord: int = 0, frames: int = 50) -> tuple[Extent, ...]:
        """Runs one after the other, each in a frame of its own, begun at most ``frames`` positions before."""
        extents = []
        for length in lengths:
            extents.append(self.extent(length, coord, coord - self.rng.randrange(frames)))
            coord += length
        return tuple(extents)

    def add(self, context: tuple[Extent, ...], rows: int) -> PackedRows:
        """A sequence of ``rows`` new tokens after ``context``, in one or two runs of slots."""
        coord = context[-1].coord + context[-1].length if context else 0
        cut = self.rng.randrange(1, rows) if rows > 1 and self.rng.random() < 0.5 else rows
        slots: list[SlotRange] = [(self.extent(n, 0, 0).slot, n) for n in (cut, rows - cut) if n]
        return self.place(Placement(context, tuple(slots), coord, coord - self.rng.randrange(50)))

    def place(self, placement: Placement) -> PackedRows:
        """A sequence of new tokens."""
        start = self.sequences[-1].stop if self.sequences else 0
        self.sequences.append(PackedRows(start, start + len(written(placement)), placement))
        return self.sequences[-1]

    def mixed(self) -> Layer:
        """Readers of a shared context, some with own tokens, of equal and other lengths; prompts.

        Perhaps what is appended to the context, right behind its last slot, as allocators place it.
        """
        lengths = (self.rng.randrange(1, 60) for _ in range(self.rng.randrange(1, 4)))
        shared = self.context(*lengths, coord=self.rng.randrange(90_000), frames=3_000)
        tail = shared[-1]
        end = tail.coord + tail.length
        self.next += 9
        for _ in range(self.rng.randrange(1, 6)):
            context = shared
            if self.rng.random() < 0.4:
                context += self.context(self.rng.randrange(1, 20), coord=end)
            self.add(context, self.rng.choice([1, 1, 7, 7, 12, 45]))
            if self.rng.random() < 0.3:
                self.add((), self.rng.randrange(1, 50))
        if self.rng.random() < 0.5:
            self.place(Placement(shared, ((tail.slot + tail.length, 9),), end, tail.origin))
        return self

    @property
    def metadata(self) -> AttentionMetadata:
        return AttentionMetadata(self.sequences, self.keys.device)

    def call(
        self, window: int | None = None, softcap: float | None = None, *, sinks: bool = False
    ) -> LayerCall:
        """The pass, its new keys and values in the pool; queries as transformers hands them over."""
        rows, dim, device = self.sequences[-1].stop, self.dim, self.keys.device
        generator = torch.Generator().manual_seed(rows)
        new = [slot for s in self.sequences for slot in written(s.placement)]
        query = torch.randn(rows, self.heads, dim, generator=generator) * 2
        return LayerCall(
            query.transpose(0, 1).to(device),
            numbers(self.keys[:, new]),
            numbers(self.values[:, new]),
            self.keys,
            self.values,
            dim**-0.5,
            softcap,
            window,
            self.metadata,
            self.rotation,
            torch.randn(self.heads, generator=generator).to(device) if sinks else None,
        )


def written(placement: Placement) -> list[int]:
    """The slots of its new tokens."""
    return [slot for first, n in placement.slots for slot in range(first, first + n)]


def keys_of(sequence: PackedRows) -> list[tuple[int, int, int]]:
    """Slot, coordinate and shift of every key that its rows may see, their own included."""
    placement = sequence.placement
    keys = [
        (e.slot + i, e.coord + i, placement.origin - e.origin)
        for e in placement.context
        for i in range(e.length)
    ]
    return keys + [(slot, placement.coord + i, 0) for i, slot in enumerate(written(placement))]


def seen_by_row(metadata: AttentionMetadata, window: int | None) -> list[list[tuple[int, int]]]:
    """Slot and shift of the keys that each row of the batch sees."""
    reach = window or 1 << 60
    return [
        [(slot, shift) for slot, at, shift in keys if 0 <= coord - at < reach]
        for sequence, keys in ((each, keys_of(each)) for each in metadata.sequences)
        for coord in range(sequence.placement.coord, sequence.placement.coord + sequence.rows)
    ]


def unread(call: LayerCall) -> list[int]:
    """The slots that no row reads."""
    read = {slot for sequence in call.metadata.sequences for slot, _, _ in keys_of(sequence)}
    return sorted(set(range(call.keys.shape[1])) - read)


def defined(call: LayerCall) -> torch.Tensor:
    """Attention by the definition, row by row in float64: every key within the window, at its distance."""
    keys_held, values_held = numbers(call.keys), numbers(call.values)
    kv_heads, dim = call.keys.shape[0], keys_held.shape[2]
    grouped = (kv_heads, call.query.shape[0] // kv_heads)
    outputs = []
    for row, keys in enumerate(seen_by_row(call.metadata, call.window)):
        slots, shifts = ([key[part] for key in keys] for part in (0, 1))
        heads = call.query[:, row].double().reshape(*grouped, 1, dim).expand(-1, -1, len(slots), -1)
        rotated_query = rotated(heads, torch.tensor(shifts), call.rotation.inv_freq)
        scores = (rotated_query * keys_held[:, None, slots].double()).sum(-1) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.sinks is not None:
            scores = torch.cat((scores, call.sinks.double().view(*grouped, 1)), -1)
        weights = torch.softmax(scores, -1)[..., : len(slots)]
        outputs.append((weights[..., None] * values_held[:, None, slots].double()).sum(2).flatten(0, 1))
    return torch.stack(outputs, 1).float()


def rotated(x: torch.Tensor, shifts: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Each pair of dimensions as a complex number, rotated."""
    half = len(inv_freq)
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    pairs = pairs * torch.exp(1j * shifts.double()[:, None] * inv_freq)
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)
