"""The machine's own rates: one product and one read by every library at hand. Floors take the best.

A rate belongs to a library, not to the machine: one library may reach half of what another does. So the same
work is done by all of them, and what no library here can do faster is the closest bound that can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from bench.figures import Figure, rate
from bench.run import SuiteRun, timed

_LOOKS = 5
_FLOAT = 4
_READ = "memory read"


class Rate(NamedTuple):
    """What ``by`` does a second: operations, or bytes."""

    by: str
    a_second: float


class Way(NamedTuple):
    """One way to do ``what`` (a product in some dtype, or a read): ``amount`` of ``unit`` a call."""

    what: str
    by: str
    amount: float
    unit: str
    work: Callable[[], object]


class MachineRates:
    """Measures every way again at each look.

    ``side``: of the square matrices; ``read``: bytes of one read, far more than the caches; ``dtypes``: of
    the products; ``threads``: of every library, on a CPU.
    """

    def __init__(
        self,
        side: int = 2048,
        read: int = 1 << 29,
        *,
        dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        self._threads = threads
        self._ways = [way for dtype in dtypes for way in _products(side, dtype, device)]
        self._ways += _reads(read, device, threads)
        self._seconds: list[list[float]] = [[] for _ in self._ways]
        with torch.inference_mode():
            for way in self._ways:  # includes one-time set-up
                way.work()

    @classmethod
    def of(cls, run: SuiteRun) -> MachineRates:
        """Of the CPU, with the run's threads."""
        torch.set_num_threads(run.threads)
        return cls(256, 1 << 20, threads=run.threads) if run.quick else cls(threads=run.threads)

    @torch.inference_mode()
    def look(self) -> None:
        """Measure again: before and after the measurements, so that a change of speed shows."""
        with threadpool_limits(self._threads, user_api="blas"):  # numpy's; torch has its own
            for _ in range(_LOOKS):
                for way, taken in zip(self._ways, self._seconds, strict=True):
                    taken.append(seconds(way.work))

    def figures(self) -> list[Figure]:
        """Every way, over all looks."""
        table = "The machine's own rates in this part"
        return [
            rate(f"{way.what}, {way.by}", way.amount, taken, way.unit, table)
            for way, taken in zip(self._ways, self._seconds, strict=True)
        ]

    def product(self, dtype: torch.dtype) -> Rate:
        """Operations a second of the fastest product. Raises ValueError for a dtype not measured."""
        return self._best(_product_of(dtype))

    def read(self) -> Rate:
        """Bytes a second of the fastest read."""
        return self._best(_READ)

    def _best(self, what: str) -> Rate:
        """By its fastest look: a floor is what the machine can do, not what it does when disturbed."""
        rates = [
            Rate(way.by, 1e9 * way.amount / min(taken))
            for way, taken in zip(self._ways, self._seconds, strict=True)
            if way.what == what
        ]
        if not rates:
            raise ValueError(f"the rate of a {what} is not measured in this part")
        return max(rates, key=lambda rate: rate.a_second)


def _product_of(dtype: torch.dtype) -> str:
    return f"product in {str(dtype).removeprefix('torch.')}"


def _products(side: int, dtype: torch.dtype, device: str) -> Iterator[Way]:
    a, b, product = torch.randn(3, side, side, device=device).to(dtype)
    way = partial(Way, _product_of(dtype))
    amount = 2 * side**3 / 1e9, "GFLOP/s"
    yield way("torch", *amount, partial(torch.mm, a, b, out=product))
    if device != "cpu":
        return
    if torch.backends.mkldnn.is_available() and (  # type: ignore[no-untyped-call]  # untyped
        dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        packed = torch.ops.mkldnn._reorder_linear_weight(b, side)
        multiply = partial(torch.ops.mkldnn._linear_pointwise, a, packed, None, "none", [], "")
        yield way("oneDNN with packed weights", *amount, multiply)
    if dtype == torch.float32:
        yield way("numpy", *amount, partial(np.matmul, a.numpy(), b.numpy(), out=product.numpy()))


def _reads(size: int, device: str, threads: int) -> Iterator[Way]:
    """Reads in float32: with less arithmetic a byte than any other use of memory in a pass."""
    source, target = torch.ones(2, size // _FLOAT, device=device)
    way, amount = partial(Way, _READ), (size / 1e9, "GB/s")
    yield way("torch's sum", *amount, source.sum)
    yield way("a copy, read and written", 2 * size / 1e9, "GB/s", partial(target.copy_, source))
    if device == "cpu":
        parts = np.array_split(source.numpy().view(np.int64), threads)
        pool = ThreadPoolExecutor(threads)
        yield way("a compiled loop on each thread", *amount, lambda: list(pool.map(_total, parts)))


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]  # numba is untyped
def _total(values: NDArray[np.int64]) -> int:
    """Integers: their sum may be reordered, so it is computed by vectors."""
    total = 0
    for i in range(values.size):
        total += values[i]
    return total


def seconds(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes; the device's queue is drained before and after."""

    def drained() -> None:
        work()
        _drain()

    _drain()
    return timed(drained)[1] / 1e9


def _drain() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
