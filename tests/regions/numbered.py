"""Pools whose KV are plain numbers, so that every reader can be checked for exactly its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch

from regions.allocator import Run
from regions.ephemeral import Fork
from regions.extents import Extent, Placement
from regions.kv_tensors import KVPool, LayerShape
from regions.offload.host_tier import HostTier
from regions.tape import Retention, Tape

FROZEN = 5
COPY_NS = 7
"""What each copy of `Late` takes."""


class Late:
    """Copies that run only when the test says so, in order.

    Copies to the device run at once, after all earlier ones, because later passes must see them.
    """

    def __init__(self, device: KVPool) -> None:
        self.device = device
        self.pending: list[tuple[LateTransfer, Callable[[], None]]] = []
        self.waits = 0

    def __call__(
        self, target: KVPool, to: Sequence[Run], source: KVPool, blocks: Sequence[Run]
    ) -> LateTransfer:
        transfer = LateTransfer(self)
        runs, places = list(blocks), list(to)
        self.pending.append((transfer, lambda: target.copy_from(source, runs, places)))
        if target is self.device:
            self.finish()
        return transfer

    def finish(self) -> None:
        for transfer, copy in self.pending:
            copy()
            transfer.done = True
        self.pending.clear()


class LateTransfer:
    took_ns = COPY_NS

    def __init__(self, copies: Late) -> None:
        self.done = False
        self._copies = copies

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self._copies.waits += 1
        self._copies.finish()


def pool(blocks: int = 40, block_size: int = 4) -> KVPool:
    return KVPool([LayerShape(2, 3, 5), LayerShape(1, 2, 2)], blocks, block_size=block_size)


def late_tier(memory: KVPool, blocks: int) -> tuple[HostTier, Late]:
    late = Late(memory)
    return HostTier(memory, blocks, late), late


def slots_of(extents: Iterable[Extent]) -> list[int]:
    return [slot for e in extents for slot in range(e.slot, e.slot + e.length)]


def new_slots(step: Placement) -> list[int]:
    return [slot for first, count in step.slots for slot in range(first, first + count)]


def write(memory: KVPool, target: Fork | Tape, numbers: Sequence[int]) -> list[int]:
    """As a forward pass: every slot of a token gets the token's number, in every layer; returns the slots."""
    step = target.next_slots(len(numbers))
    slots = new_slots(step)
    for tensor in (*memory.keys, *memory.values):
        tensor[:, slots] = torch.tensor(numbers, dtype=tensor.dtype)[None, :, None]
    target.wrote(step, numbers)
    return slots


def read(memory: KVPool, extents: Sequence[Extent]) -> list[int]:
    """The numbers at ``extents``, which must be the same in every layer, head and dimension."""
    slots = slots_of(extents)
    seen = {tuple(row.tolist()) for t in (*memory.keys, *memory.values) for h in t[:, slots] for row in h.T}
    (numbers,) = seen
    return [int(number) for number in numbers]


def grow(memory: KVPool, target: Fork | Tape, numbers: Sequence[int]) -> None:
    assert target.acquire(len(numbers))
    write(memory, target, numbers)


def prompt_of(memory: KVPool, numbers: Sequence[int]) -> Fork:
    fork = Fork(memory, frame_limit=1000)
    grow(memory, fork, numbers)
    return fork


def fresh_window(memory: KVPool, tape: Tape, window: Sequence[int] | None = None) -> Fork:
    """The window prefilled again; ``window``: by default the live one."""
    fresh = tape.fresh_window()
    grow(memory, fresh, tape.window if window is None else window)
    return fresh


def tape_of(memory: KVPool, retention: Retention, frame_limit: int = 64) -> Tape:
    prompt = prompt_of(memory, [0] * FROZEN)
    frozen = prompt.as_context()
    prompt.release()
    return Tape("t", memory, frozen, retention, frame_limit=frame_limit)


def append(memory: KVPool, tape: Tape, *records: Sequence[int], times: Sequence[int] = ()) -> bool:
    numbers, lengths = list(chain.from_iterable(records)), list(map(len, records))
    tape.make_room(lengths, times)
    if not tape.acquire(len(numbers)):
        return False
    write(memory, tape, numbers)
    tape.commit(lengths, times)
    return True


def scribble(memory: KVPool) -> None:
    """Take every free block and overwrite it, as other readers' passes would."""
    fork = Fork(memory, frame_limit=10_000)
    n = memory.free_blocks * memory.block_size
    assert fork.acquire(n)
    write(memory, fork, [-1] * n)
    fork.release()
