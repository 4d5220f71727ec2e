"""Recognisable KV: every slot encodes all tokens up to it, so that tests can check what a reader reads."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from regions.cache_priority import ORDINARY, PrefixRetention
from regions.ephemeral import Fork
from regions.extents import Extent
from regions.frozen import Context
from regions.kv_tensors import KVPool, LayerShape
from regions.radix import RadixCache
from tests.regions.numbered import new_slots, slots_of

SYSTEM = list(range(100, 110))


def small_pool(blocks: int, block_size: int = 4) -> KVPool:
    return KVPool([LayerShape(1, 1, 1)], blocks, block_size=block_size)


def pool_with_cache(
    blocks: int, budget: int | None = None, block_size: int = 4, **options: Any
) -> tuple[KVPool, RadixCache]:
    """``budget``: of the cache, tokens; by default the pool's."""
    pool = small_pool(blocks, block_size)
    return pool, RadixCache(pool, blocks * block_size if budget is None else budget, **options)


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
    pool.keys[0][0, new_slots(step), 0] = torch.tensor(marks([*before, *tokens])[len(before) :])
    fork.wrote(step, tokens)
    return True


def reads(pool: KVPool, extents: Iterable[Extent], tokens: Sequence[int]) -> bool:
    """Whether ``extents`` have exactly ``tokens``, at the coordinates of a prompt."""
    extents = list(extents)
    coords = [coord for e in extents for coord in range(e.coord, e.coord + e.length)]
    assert coords == list(range(len(tokens)))
    assert all(e.origin == 0 for e in extents)
    return pool.keys[0][0, slots_of(extents), 0].tolist() == marks(tokens)


def prompt(
    pool: KVPool, tokens: list[int], context: Context | None = None, before: list[int] | None = None
) -> Fork:
    fork = Fork(pool, frame_limit=1 << 20, context=context)
    assert write(pool, fork, before or [], tokens)
    return fork


def cached(
    pool: KVPool,
    cache: RadixCache,
    tokens: list[int],
    salt: str = "",
    retention: PrefixRetention = ORDINARY,
) -> int:
    """Compute ``tokens`` after aliasing the cached ones, save them and end the prompt."""
    context = cache.match(tokens, salt)
    at = context.tokens if context else 0
    fork = prompt(pool, tokens[at:], context, tokens[:at])
    if context:
        context.release()
    added = cache.save(tokens, fork, salt, retention)
    fork.release()
    return added
