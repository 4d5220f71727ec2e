"""Recognisable KV: every slot encodes all tokens up to it, so that tests can check what a reader reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from regions.ephemeral import Fork
from regions.extents import Extent
from regions.frozen import Context
from regions.kv_tensors import KVPool, LayerShape
from regions.radix import RadixCache

SYSTEM = list(range(100, 110))


def small_pool(blocks: int, block_size: int = 4) -> KVPool:
    return KVPool([LayerShape(1, 1, 1)], blocks, block_size=block_size)


def marks(tokens: Sequence[int]) -> list[float]:
    """One number per token, which depends on all tokens up to it."""
    mark, result = 1, []
    for token in tokens:
        mark = (mark * 31 + token + 7) % 8388593
        result.append(float(mark))
    return result


def write(pool: KVPool, fork: Fork, before: Sequence[int], tokens: Sequence[int]) -> bool:
    """Write ``tokens`` after ``before``, the tokens that ``fork`` sees; False when the pool is full."""
    if not fork.acquire(len(tokens)):
        return False
    step = fork.next_slots(len(tokens))
    slots = [slot for first, count in step.slots for slot in range(first, first + count)]
    pool.keys[0][0, slots, 0] = torch.tensor(marks([*before, *tokens])[len(before) :])
    fork.wrote(step, tokens)
    return True


def reads(pool: KVPool, extents: Iterable[Extent], tokens: Sequence[int]) -> bool:
    """Whether ``extents`` have exactly ``tokens``, at the coordinates of a prompt."""
    extents = list(extents)
    slots = [slot for e in extents for slot in range(e.slot, e.slot + e.length)]
    coords = [coord for e in extents for coord in range(e.coord, e.coord + e.length)]
    assert coords == list(range(len(tokens)))
    assert all(e.origin == 0 for e in extents)
    return pool.keys[0][0, slots, 0].tolist() == marks(tokens)


def prompt(
    pool: KVPool, tokens: list[int], context: Context | None = None, before: list[int] | None = None
) -> Fork:
    fork = Fork(pool, frame_limit=1 << 20, context=context)
    assert write(pool, fork, before or [], tokens)
    return fork


def cached(pool: KVPool, cache: RadixCache, tokens: list[int], salt: str = "") -> int:
    """Compute ``tokens`` after aliasing the cached ones, save them and end the prompt."""
    context = cache.match(tokens, salt)
    at = context.tokens if context else 0
    fork = prompt(pool, tokens[at:], context, tokens[:at])
    if context:
        context.release()
    added = cache.save(tokens, fork, salt)
    fork.release()
    return added
