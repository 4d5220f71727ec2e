"""Pools whose KV are plain numbers, so that every reader can be checked for exactly its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from regions.allocator import Run
from regions.ephemeral import Fork
from regions.extents import Extent
from regions.kv_tensors import KVPool, LayerShape
from regions.offload.host_tier import HostTier
from regions.tape import Retention, Tape

FROZEN = 5


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


def write(memory: KVPool, target: Fork | Tape, numbers: list[int]) -> None:
    """As a forward pass: every slot of a token gets the token's number, in every layer."""
    step = target.next_slots(len(numbers))
    slots = [slot for first, count in step.slots for slot in range(first, first + count)]
    for tensor in (*memory.keys, *memory.values):
        tensor[:, slots] = torch.tensor(numbers, dtype=tensor.dtype)[None, :, None]
    target.wrote(step, numbers)


def read(memory: KVPool, extents: Sequence[Extent]) -> list[int]:
    """The numbers at ``extents``, which must be the same in every layer, head and dimension."""
    slots = [slot for e in extents for slot in range(e.slot, e.slot + e.length)]
    seen = {tuple(row.tolist()) for t in (*memory.keys, *memory.values) for h in t[:, slots] for row in h.T}
    (numbers,) = seen
    return [int(number) for number in numbers]


def prompt_of(memory: KVPool, numbers: list[int]) -> Fork:
    fork = Fork(memory, frame_limit=1000)
    assert fork.acquire(len(numbers))
    write(memory, fork, numbers)
    return fork


def tape_of(memory: KVPool, retention: Retention, frame_limit: int = 64) -> Tape:
    prompt = prompt_of(memory, [0] * FROZEN)
    frozen = prompt.as_context()
    prompt.release()
    return Tape("t", memory, frozen, retention, frame_limit=frame_limit)


def append(memory: KVPool, tape: Tape, numbers: list[int]) -> bool:
    tape.make_room([len(numbers)])
    if not tape.acquire(len(numbers)):
        return False
    write(memory, tape, numbers)
    tape.commit([len(numbers)])
    return True


def scribble(memory: KVPool) -> None:
    """Take every free block and overwrite it, as other readers' passes would."""
    fork = Fork(memory, frame_limit=10_000)
    n = memory.free_blocks * memory.block_size
    assert fork.acquire(n)
    write(memory, fork, [-1] * n)
    fork.release()
