"""Measures what recomputing and transfers take, as an engine starts (*Stream2LLM* section 4.3).

Both curves together take at most about `BUDGET_NS`: sizes grow by four as long as there is time, and what is
beyond the last one follows its slope. What was measured is remembered, so an engine that takes over for
another one does not measure. `foretick profile` measures more sizes, and more of each.
"""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch

from engine.device import device_name, out_of_memory
from engine.engine import Engine
from engine.measurement_cache import Memory
from engine.step import Chunk, OutOfMemory
from regions.offload.copies import Copies
from regions.offload.host_tier import HostTier
from regions.offload.kv_store import Way
from scheduler.costs import CostModel, guess
from scheduler.curves import CostCurve

log = logging.getLogger(__name__)

BUDGET_NS = 500_000_000
GROWTH = 4
"""From one size to the next."""
LARGEST_TRANSFER = 64
"""Of a transfer, blocks."""

Clock = Callable[[], int]
Samples = Sequence[tuple[int, int]]
"""(size, least ns), by rising size."""


def measured_costs(
    engine: Engine,
    pass_tokens: int,
    host_blocks: int,
    clock: Clock = time.perf_counter_ns,
    memory: Memory | None = None,
    copies: Copies | None = None,
) -> CostModel:
    """The costs of an engine that nothing uses yet, on its device, in passes of ``pass_tokens``.

    ``host_blocks``: of its host tier, which there is, ``copies`` as the tier's. ``clock``: ns. Where
    they cannot be measured, for want of memory, a guess takes their place.
    """
    memory, model = memory or Memory(), engine.model
    question = {
        "of": "recomputing and transfers",
        "model": f"{model.name}@{model.revision}",
        "layers": model.layers_run,
        "dtype": str(engine.pool.dtype),
        "device": device_name(engine.pool.device),
        "block_size": str(engine.pool.block_size),
        "pass_tokens": str(pass_tokens),
    }
    if (known := memory.recall(question, CostModel)) is not None:
        return known
    try:
        found = _measure(engine, pass_tokens, host_blocks, clock, copies)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, OutOfMemory) and not out_of_memory(error):
            raise
        log.warning("the costs of swapping and recomputing are guessed: no memory to measure them: %s", error)
        return guess(engine.pool.block_size)
    if len(found.recompute.x) > 2:  # on a machine that was busy elsewhere, the next start measures again
        memory.remember(question, found)
    longest = round(found.recompute.x[-1])
    log.info(
        "measured: %d tokens take %.2f ms to recompute and %.2f ms to move to the host and back",
        longest,
        found.recompute_ns(longest) / 1e6,
        found.swap_ns(-(-longest // found.block_size)) / 1e6,
    )
    return found


def _measure(
    engine: Engine, pass_tokens: int, host_blocks: int, clock: Clock, copies: Copies | None
) -> CostModel:
    size, prefills = engine.pool.block_size, _Passes(engine)
    prefills.run(1)  # it may load kernels, which the first pass of any start does
    began = clock()
    room = engine.pool.free_blocks
    longest = min(pass_tokens, engine.frame_limit, room * size)
    # half of the time for each, and what transfers leave for passes
    transfers = _Transfers(engine, min(LARGEST_TRANSFER, host_blocks, room), copies)
    climb(_ladder(transfers.blocks), transfers.move, began + BUDGET_NS // 2, clock)
    passes = climb(_ladder(longest), prefills.run, began + BUDGET_NS, clock)
    return model_of(
        passes,
        transfers.samples("out"),
        transfers.samples("in"),
        device=device_name(engine.pool.device),
        model=engine.model.name,
        block_size=size,
        pass_tokens=pass_tokens,
    )


def _ladder(most: int) -> list[int]:
    sizes = [GROWTH**i for i in range(most.bit_length()) if GROWTH**i <= most]
    return sizes or [1]


Work = Callable[[int], int | None]
"""Does something of a size; returns what it took, ns, where a clock knows less."""


def climb(sizes: Sequence[int], work: Work, until: int, clock: Clock) -> list[tuple[int, int]]:
    """Run ``work`` of rising ``sizes`` twice each; returns the lesser time of each, ns.

    It ends before the first size that, as slow as the one before, would not be done ``until`` then. The first
    size runs once in any case.
    """
    found: list[tuple[int, int]] = []
    for size in sizes:
        if found and clock() + 2 * found[-1][1] * size // found[-1][0] > until:
            break
        best = _timed(work, size, clock)
        if clock() + best <= until:
            best = min(best, _timed(work, size, clock))
        found.append((size, best))
    return found


def _timed(work: Work, size: int, clock: Clock) -> int:
    began = clock()
    took = work(size)
    return clock() - began if took is None else took


class _Passes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens = engine.model.sizes.vocabulary

    def run(self, n: int) -> int | None:
        """Prefill ``n`` tokens in one pass, up to the first one sampled; returns `Engine.took_ns`."""
        prompt = self._engine.open_prompt()
        try:
            if not prompt.acquire(n):
                raise MemoryError(f"the pool has no room for {n} tokens")
            self._engine.execute([Chunk(prompt, [i % self._tokens for i in range(n)])])
        finally:
            prompt.release()
        return self._engine.took_ns


class _Transfers:
    """Transfers of blocks between the engine's pool and a host tier of its own."""

    def __init__(self, engine: Engine, blocks: int, copies: Copies | None) -> None:
        self.blocks = blocks
        self._pool = engine.pool
        self._tier = HostTier(engine.pool, blocks, copies, self._copied)
        self._least: dict[Way, dict[int, int]] = {"out": {}, "in": {}}

    def move(self, blocks: int) -> None:
        """Copy ``blocks`` to the host and back."""
        runs = self._pool.take(blocks)
        if runs is None:
            raise MemoryError(f"the pool has no room for {blocks} blocks")
        try:
            stored = self._tier.put(runs)
            assert stored is not None, "the tier has room for the most blocks"
            self._settle()
            stored.load(runs)
            self._settle()
            stored.release()
        finally:
            self._pool.blocks.release(runs)

    def samples(self, way: Way) -> Samples:
        """The least time of each size."""
        return sorted(self._least[way].items())

    def _copied(self, way: Way, blocks: int, ns: int) -> None:
        least = self._least[way]
        least[blocks] = min(ns, least.get(blocks, ns))

    def _settle(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)
        self._tier.poll()


def model_of(
    passes: Samples,
    out: Samples,
    back: Samples,
    *,
    device: str,
    model: str,
    block_size: int,
    pass_tokens: int,
) -> CostModel:
    """The costs that these times are of: passes by tokens, transfers by blocks; at least one of each.

    The cost of a pass without its tokens is where the line through the two largest meets 0 tokens. One pass
    alone tells nothing of its tokens, so theirs is guessed.
    """
    floor_s = passes[0][1] / 1e9
    pass_s = _intercept(passes[-2:]) if len(passes) > 1 else floor_s
    pass_s = min(pass_s, floor_s)
    rows = [(n, max(0.0, ns / 1e9 - pass_s)) for n, ns in passes]
    return CostModel(
        device=device,
        model=model,
        block_size=block_size,
        source="measured: as an engine started",
        pass_tokens=pass_tokens,
        pass_s=pass_s,
        floor_s=floor_s,
        recompute=_curve(0.0, rows) if len(rows) > 1 else guess(block_size).recompute,
        swap_out=_curve(_intercept(out[:2]), [(n, ns / 1e9) for n, ns in out]),
        swap_in=_curve(_intercept(back[:2]), [(n, ns / 1e9) for n, ns in back]),
    )


def _intercept(samples: Samples) -> float:
    """Seconds at size 0 of the line through two samples, from 0 to the lesser time; 0 for one sample."""
    if len(samples) < 2:
        return 0.0
    (x, y), (x1, y1) = samples
    return min(max(0.0, y - x * (y1 - y) / (x1 - x)), min(y, y1)) / 1e9


def _curve(at_zero: float, points: Sequence[tuple[int, float]]) -> CostCurve:
    """The curve through ``points``, where none is below the one before it."""
    heights = tuple(accumulate((seconds for _, seconds in points), max, initial=at_zero))
    return CostCurve(tuple(chain((0.0,), (float(size) for size, _ in points))), heights)
