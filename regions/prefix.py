"""The beginning of a prompt as something others may read: a past of one frame, with a hold of its own.

Only what begins at coordinate 0 in the frame of origin 0 qualifies: its keys are where every other prompt
with the same tokens would have them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from regions.context import Held, Past
from regions.ephemeral import Fork
from regions.extents import Extent, blocks_of, extend
from regions.pool import KVPool
from regions.tokens import TokenArray, token_array


def alias(pool: KVPool, extents: Iterable[Extent], tokens: int) -> Past:
    """The first ``tokens`` tokens of a prompt's ``extents`` as a past that holds exactly their blocks."""
    kept: list[Extent] = []
    for extent in between(extents, 0, tokens):
        extend(kept, [(extent.slot, extent.length)], extent.coord, extent.origin)
    return Past(tuple(kept), (Held(pool, blocks_of(kept, pool.block_size)),), coord=tokens)


def between(extents: Iterable[Extent], start: int, stop: int) -> list[Extent]:
    """The part of ``extents`` at coordinates ``start`` to ``stop`` (exclusive)."""
    kept: list[Extent] = []
    for extent in extents:
        low, high = max(start, extent.coord), min(stop, extent.coord + extent.length)
        if low < high:
            kept.append(Extent(extent.slot + low - extent.coord, high - low, low, extent.origin))
    return kept


def prompt_extents(source: Fork | Past, tokens: TokenArray) -> tuple[Extent, ...]:
    """What ``source`` sees, of which ``tokens`` are the oldest.

    Raises ValueError when it reads a tape or does not hold these tokens.
    """
    extents = source.extents
    end = 0
    for extent in extents:
        if source.version or extent.origin or extent.coord != end:
            raise ValueError("only a prompt that begins at coordinate 0, not a fork of a tape, can be cached")
        end += extent.length
    if end < len(tokens):
        raise ValueError(f"{len(tokens)} tokens cannot be cached: {end} are in KV")
    if isinstance(source, Fork):
        own = token_array(source.tokens)
        if not np.array_equal(
            tokens[source.cached_tokens :], own[: max(0, len(tokens) - source.cached_tokens)]
        ):
            raise ValueError("the tokens to be cached are not those in KV")
    return extents
