"""Which slots each row of a batch reads: one interval of a run of slots, for causal and sliding masks alike.

A pass writes its new keys before attention, so a row's own sequence is one more run. No mask is ever made.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.attention.metadata import AttentionMetadata

Ints = npt.NDArray[np.int64]


class Reads(NamedTuple):
    """One entry for each sequence and run of slots it reads, int64 [reads] each.

    ``row``, ``rows``: in the batch; ``coord``: stream coordinate of the first row; ``slot`` to ``stop``: the
    run; ``key_coord``: stream coordinate of its first key; ``shift``: positions from the run's frame to the
    sequence's; ``own``: 1 if its tokens are a fork's own, 0 otherwise.
    """

    row: Ints
    rows: Ints
    coord: Ints
    slot: Ints
    stop: Ints
    key_coord: Ints
    shift: Ints
    own: Ints


def reads_of(metadata: AttentionMetadata) -> Reads:
    """The reads of every sequence of ``metadata``, including the new slots of its own rows.

    New slots that continue a run which only this sequence reads are joined to it. A run with other readers
    stays as it is, equal for all of them. Only readers of exactly the same run share a product, so a NaN that
    one of them has just written never reaches another.
    """
    readers = Counter((e.slot, e.length) for s in metadata.sequences for e in s.placement.context)
    reads: list[tuple[int, ...]] = []
    for sequence in metadata.sequences:
        placement = sequence.placement
        begin = placement.own
        runs = [
            (
                e.slot,
                e.slot + e.length,
                e.coord,
                placement.origin - e.origin,
                int(begin is not None and e.coord >= begin),
                readers[e.slot, e.length] == 1,
            )
            for e in placement.context
        ]
        coord, own = placement.coord, int(begin is not None)
        for slot, count in placement.slots:
            if runs and runs[-1][1] == slot and runs[-1][3:] == (0, own, True):
                runs[-1] = (runs[-1][0], slot + count, *runs[-1][2:])
            else:
                runs.append((slot, slot + count, coord, 0, own, True))
            coord += count
        reads += [(sequence.start, sequence.rows, placement.coord, *run[:5]) for run in runs]
    return Reads(*np.array(reads, np.int64).T.copy())
