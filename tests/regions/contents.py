"""Recognisable KV: every slot tells all tokens up to it, so that what a reader reads can be checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from regions.ephemeral import Fork
from regions.extents import Extent
from regions.pool import KVPool, LayerShape


def small_pool(blocks: int, block_size: int = 4) -> KVPool:
    return KVPool([LayerShape(1, 1, 1)], blocks, block_size=block_size)


def marks(tokens: Sequence[int]) -> list[float]:
    """One number a token that depends on all tokens up to it."""
    mark, result = 1, []
    for token in tokens:
        mark = (mark * 31 + token + 7) % 8388593
        result.append(float(mark))
    return result


def write(pool: KVPool, fork: Fork, before: Sequence[int], tokens: Sequence[int]) -> bool:
    """Write ``tokens`` behind what ``fork`` sees, which are ``before``; False when the pool is full."""
    if not fork.acquire(len(tokens)):
        return False
    step = fork.place(len(tokens))
    slots = [slot for first, count in step.slots for slot in range(first, first + count)]
    pool.keys[0][0, slots, 0] = torch.tensor(marks([*before, *tokens])[len(before) :])
    fork.wrote(step, tokens)
    return True


def reads(pool: KVPool, extents: Iterable[Extent], tokens: Sequence[int]) -> bool:
    """Whether ``extents`` hold exactly ``tokens``, at the coordinates of a prompt."""
    extents = list(extents)
    slots = [slot for e in extents for slot in range(e.slot, e.slot + e.length)]
    coords = [coord for e in extents for coord in range(e.coord, e.coord + e.length)]
    assert coords == list(range(len(tokens)))
    assert all(e.origin == 0 for e in extents)
    return pool.keys[0][0, slots, 0].tolist() == marks(tokens)
