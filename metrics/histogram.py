"""Log-linear latency histogram: 16 buckets per octave, so a quantile is within 1/32 of the truth (HDR style).

A histogram is `WORDS` consecutive uint64 words: the sum in nanoseconds, then the bucket counts. Below 512 ns
buckets are linear (32 ns wide); values of 2^40 ns (about 1100 s) and more are in the last bucket.
"""

import math

import numpy as np
import numpy.typing as npt

from support.numba_kernel import kernel

Words = npt.NDArray[np.uint64]

SUBBUCKETS = 16
BUCKETS = 512
WORDS = BUCKETS + 1
LINEAR_LIMIT_NS = 512
LIMIT_NS = 1 << 40


@kernel
def bucket_of(ns: int) -> int:
    """Bucket of a latency in ns; negative values (a clock stepped back) count as 0."""
    if ns < LINEAR_LIMIT_NS:
        return max(ns, 0) >> 5
    if ns >= LIMIT_NS:
        return BUCKETS - 1
    exponent = math.frexp(float(ns))[1] - 1  # floor(log2(ns)); exact, ns is below 2^53
    return SUBBUCKETS * (exponent - 8) + ((ns >> (exponent - 4)) & (SUBBUCKETS - 1))


@kernel
def record(words: Words, base: int, ns: int) -> None:
    """Count one latency in the histogram that starts at `words[base]`. One writer per histogram."""
    words[base] += np.uint64(min(max(ns, 0), LIMIT_NS))
    words[base + 1 + bucket_of(ns)] += np.uint64(1)


def first_bucket(octave: int) -> int:
    """The bucket that begins at 2^octave ns, for octaves 9 to 39."""
    return SUBBUCKETS * (octave - 8)


def lower_edge(bucket: int) -> int:
    """Smallest latency (ns) of a bucket; `lower_edge(b + 1)` is one more than its largest."""
    if bucket < SUBBUCKETS:
        return bucket * (LINEAR_LIMIT_NS // SUBBUCKETS)
    octave, sub = divmod(bucket, SUBBUCKETS)
    return (SUBBUCKETS + sub) << (octave + 4)


def quantile(counts: Words, q: float) -> float:
    """The q-quantile in ns (middle of the bucket holding the ceil(q n)-th smallest value); NaN when empty."""
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"a quantile must be between 0 and 1, not {q}")
    cumulative = np.cumsum(counts)
    total = int(cumulative[-1])
    if total == 0:
        return math.nan
    rank = max(1, math.ceil(q * total))
    bucket = int(np.searchsorted(cumulative, rank))
    return (lower_edge(bucket) + lower_edge(bucket + 1)) / 2
