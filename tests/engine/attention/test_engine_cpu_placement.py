"""The compiled CPU kernel's bits depend on which tokens are read, by whom and in which frames: on no slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import LayerCall
from engine.attention.cpu_kernel.backend import CpuKernelAttention
from engine.attention.metadata import AttentionMetadata, PackedRows
from engine.attention.rotary import FrameRotation
from regions.extents import Extent, Placement, SlotRange
from tests.engine.attention.layers import defined
from tests.kit import tolerance

KV_HEADS, DIM = 2, 16
FRAME = 150
"""Tokens of a stream after which its next frame begins."""


@dataclass(frozen=True)
class Range:
    """Tokens ``start`` to ``stop`` of a stream, which a reader sees from stream coordinate ``coord`` on."""

    stream: int
    start: int
    stop: int
    coord: int


@dataclass(frozen=True)
class Reader:
    """A reader of ``context`` that writes ``own`` tokens."""

    context: tuple[Range, ...]
    own: Range


class Streams:
    """Tokens by stream, and who reads which in one pass: all that a result may depend on."""

    def __init__(self, seed: int, max_rows: int) -> None:
        self.rng, self.lengths, self.readers = Random(seed), list[int](), list[Reader]()
        self.max_rows, self.branches = max_rows, set[int]()
        prefix, forked = self.stream(self.rng.randrange(1, 90)), self.rng.random() < 0.5
        for _ in range(self.rng.randrange(1, 4)):
            tape = self.stream(self.rng.choice([3, 40, 200, 700]))
            self.session(prefix, tape, forked=forked)
        self.rng.shuffle(self.readers)

    def stream(self, length: int) -> int:
        self.lengths.append(length)
        return len(self.lengths) - 1

    def session(self, prefix: int, tape: int, *, forked: bool) -> None:
        """Questions about a tape and a part of it, answers to a question, and what is appended to it."""
        rng, length = self.rng, self.lengths[tape]
        first, coord = rng.randrange(length), rng.randrange(5_000, 90_000)
        kept = rng.choice([self.lengths[prefix], rng.randrange(1, self.lengths[prefix] + 1)])
        frozen = Range(prefix, 0, kept, coord - kept)
        seen = Range(tape, first, length, coord)
        for _ in range(rng.randrange(1, 5)):
            self.add((frozen, seen), self.rows())
        if forked:
            branch = self.stream(rng.randrange(1, 60))
            self.branches.add(branch)
            behind = Range(branch, 0, self.lengths[branch], coord + length - first)
            for _ in range(2):
                self.add((frozen, seen, behind), self.rows())
            self.add((frozen, Range(tape, first, rng.randrange(first, length) + 1, coord)), self.rows())
        if rng.random() < 0.5:
            self.append(frozen, seen)

    def append(self, frozen: Range, seen: Range) -> None:
        """What a tape is appended, in one or more windows; the rows of each are context of the next."""
        for _ in range(self.rng.randrange(1, 4)):
            new = self.rows()
            own = Range(seen.stream, seen.stop, seen.stop + new, seen.coord + seen.stop - seen.start)
            self.readers.append(Reader((frozen, seen), own))
            left = self.rng.randrange(0, min(20, seen.stop - seen.start))
            seen = Range(seen.stream, seen.start + left, own.stop, seen.coord + left)
            self.lengths[seen.stream] = own.stop

    def rows(self) -> int:
        return self.rng.choice([1, 1, 2, self.rng.randrange(1, self.max_rows + 1)])

    def add(self, context: tuple[Range, ...], rows: int) -> None:
        last = context[-1]
        own = Range(self.stream(rows), 0, rows, last.coord + last.stop - last.start)
        self.readers.append(Reader(context, own))


class Laid:
    """The streams of ``streams`` in blocks of ``size``, in an order of ``seed``; 0: one after the other."""

    def __init__(self, streams: Streams, size: int, seed: int) -> None:
        rng = Random(seed)
        counts = [-(-length // size) for length in streams.lengths]
        # one more than there are, and some left free
        blocks = list(range(sum(counts) + 3))
        if seed:
            self._shuffle(blocks, rng)
        self.blocks = [blocks[stop - n : stop] for n, stop in zip(counts, accumulate(counts), strict=True)]
        self.size, self.slots, self.streams = size, size * len(blocks), streams
        self._cuts = rng if seed else None

    @staticmethod
    def _shuffle(blocks: list[int], rng: Random) -> None:
        """In runs of up to four blocks."""
        runs, at = list[list[int]](), 0
        while at < len(blocks):
            size = rng.randrange(1, 5)
            runs.append(blocks[at : at + size])
            at += size
        rng.shuffle(runs)
        blocks[:] = [block for run in runs for block in run]

    def slot(self, stream: int, token: int) -> int:
        return self.blocks[stream][token // self.size] * self.size + token % self.size

    def ranges(self, part: Range) -> list[SlotRange]:
        """Runs of slots, at times cut where they need not be, as edges of the prefix cache are."""
        found = list[SlotRange]()
        for token in range(part.start, part.stop):
            slot = self.slot(part.stream, token)
            joins = bool(found) and sum(found[-1]) == slot
            # as all readers cut it
            if joins and (self._cuts is None or Random(f"{part.stream} {token}").random() > 0.02):
                found[-1] = found[-1][0], found[-1][1] + 1
            else:
                found.append((slot, 1))
        return found

    def extents(self, part: Range) -> list[Extent]:
        """With the frames in which the stream's keys are stored."""
        found, start = list[Extent](), part.start
        while start < part.stop:
            stop = min(part.stop, (start // FRAME + 1) * FRAME)
            coord = part.coord + start - part.start
            origin = coord - start % FRAME
            for slot, count in self.ranges(Range(part.stream, start, stop, coord)):
                found.append(Extent(slot, count, coord, origin))
                coord += count
            start = stop
        return found

    def metadata(self) -> AttentionMetadata:
        sequences = list[PackedRows]()
        row = 0
        for reader in self.streams.readers:
            own = reader.own
            context = tuple(extent for part in reader.context for extent in self.extents(part))
            origin = own.coord - own.start % FRAME
            # what it wrote before, if anything, is the last part of its context
            last = reader.context[-1]
            begins = last.coord if last.stream in self.streams.branches else own.coord
            mark = None if own.stream == last.stream else begins
            placement = Placement(context, tuple(self.ranges(own)), own.coord, origin, own=mark)
            sequences.append(PackedRows(row, row + own.stop - own.start, placement))
            row = sequences[-1].stop
        return AttentionMetadata(sequences)

    def pool(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """``tokens`` [heads, length, dim] of each stream in their slots; NaN elsewhere."""
        pool = torch.full((KV_HEADS, self.slots, DIM), float("nan"), dtype=tokens[0].dtype)
        for stream, values in enumerate(tokens):
            pool[:, [self.slot(stream, token) for token in range(values.shape[1])]] = values
        return pool


def call_of(laid: Laid, groups: int, dtype: torch.dtype, window: int | None) -> LayerCall:
    """The same numbers for the same tokens, wherever they lie."""
    generator = torch.Generator().manual_seed(1)
    lengths, metadata = laid.streams.lengths, laid.metadata()
    keys, values = (
        [torch.randn(KV_HEADS, n, DIM, generator=generator).to(dtype) for n in lengths] for _ in "kv"
    )
    query = 2 * torch.randn(KV_HEADS * groups, metadata.rows, DIM, generator=generator)
    new = torch.empty(KV_HEADS, 0, DIM)  # the kernel reads them in the pool
    rotation = FrameRotation(0.7 ** torch.arange(DIM // 2))
    pools = laid.pool(keys), laid.pool(values)
    return LayerCall(query, new, new, *pools, DIM**-0.5, None, window, metadata, rotation)


@settings(max_examples=150)
@given(
    st.integers(0, 2**32),
    st.sampled_from([2, 9, 70]),
    st.tuples(*[st.sampled_from([4, 16, 64])] * 2),
    st.sampled_from([1, 3]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([None, 5, 100]),
)
def test_no_bit_depends_on_where_keys_lie(
    seed: int, rows: int, sizes: tuple[int, int], groups: int, dtype: torch.dtype, window: int | None
) -> None:
    """Several sessions, forks, windows within a pass, frames: in one run each, and in blocks anywhere."""
    streams = Streams(seed, rows)
    whole, first, second = (
        call_of(Laid(streams, size, order), groups, dtype, window)
        for size, order in ((1, 0), (sizes[0], seed + 1), (sizes[1], seed + 2))
    )
    found = CpuKernelAttention()(first)
    tolerance.assert_sums(found, defined(first), width=1000)
    assert torch.equal(found, CpuKernelAttention()(second))
    assert torch.equal(found, CpuKernelAttention()(whole))
