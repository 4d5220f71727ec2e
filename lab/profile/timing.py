"""Times an engine's passes, prefills and swaps by size: the points of a cost profile.

Every size runs once uncounted, and then in alternating order, so that a machine that slows down during a run
does not look like one that is slower at large sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from engine.engine import Engine
from engine.step import Chunk
from regions.ephemeral import Fork
from regions.offload.copies import Copies
from regions.offload.host_tier import HostTier

Span = tuple[int, int]
"""(tokens in KV, tokens to compute) of one row of a pass."""
Sample = tuple[int, float]
"""(size, seconds)."""
PAUSED = 9
"""Passes after each pause: on a machine that does nothing else their times spread most."""


@dataclass(frozen=True)
class Ladder:
    """The sizes to measure.

    ``passes``: tokens of single passes without context, including 1, none above ``chunk``. ``prefills``:
    tokens of prompts that are computed in passes of ``chunk`` tokens, and swapped out and in; at least one.
    ``batches``: passes of several rows. Everything runs ``repeats`` times. Sizes above the first prefill that
    takes ``patience_s`` seconds are skipped. ``pauses``: seconds without a pass before one of the least
    prefill's size.
    """

    chunk: int
    passes: tuple[int, ...]
    prefills: tuple[int, ...]
    batches: tuple[tuple[Span, ...], ...] = ()
    pauses: tuple[float, ...] = ()
    repeats: int = 3
    patience_s: float = 10.0

    @property
    def tokens(self) -> int:
        """Most tokens in KV at once."""
        together = (sum(c + n for c, n in batch) for batch in self.batches)
        return max(*self.passes, *self.prefills, *together)

    def blocks(self, size: int) -> int:
        """Blocks of ``size`` tokens that the measurement needs in the pool."""
        rows = max((len(batch) for batch in self.batches), default=1)
        return -(-self.tokens // size) + 2 * rows

    def up_to(self, tokens: int) -> Ladder:
        """The ladder without larger prompts, and without batches that have a larger row."""
        return replace(
            self,
            prefills=tuple(n for n in self.prefills if n <= tokens),
            batches=tuple(batch for batch in self.batches if all(c + n <= tokens for c, n in batch)),
        )


@dataclass
class Samples:
    """The measurements. Sizes: tokens for ``passes`` and ``prefills``, blocks for the swaps.

    ``paused``: seconds of a pause, 0 among them, and of the pass after it.
    """

    passes: list[Sample] = field(default_factory=list)
    prefills: list[Sample] = field(default_factory=list)
    swap_out: list[Sample] = field(default_factory=list)
    swap_in: list[Sample] = field(default_factory=list)
    batches: list[tuple[tuple[Span, ...], float]] = field(default_factory=list)
    paused: list[tuple[float, float]] = field(default_factory=list)


def measure(engine: Engine, ladder: Ladder, copies: Copies | None = None) -> Samples:
    """Time everything on the ladder; nothing else may use the engine. RuntimeError when memory is short.

    ``copies``: as of `HostTier`.
    """
    longest = -(-max(ladder.prefills) // engine.pool.block_size)
    rounds = _Rounds(engine, ladder, HostTier(engine.pool, longest + 1, copies))
    rounds.warm_up()
    samples = Samples()
    for repeat in range(ladder.repeats):
        rounds.run(samples, down=repeat % 2 == 0)
    rounds.pause(samples)
    return samples


class _Rounds:
    def __init__(self, engine: Engine, ladder: Ladder, host: HostTier) -> None:
        self.engine, self.ladder, self.host = engine, ladder, host
        self.random = torch.Generator().manual_seed(3)

    def warm_up(self) -> None:
        """Run every size once, uncounted, up to ``patience_s``."""
        uncounted = Samples()
        for n in self.ladder.prefills:
            self.prompt(n, uncounted)
            if uncounted.prefills[-1][1] > self.ladder.patience_s:
                self.ladder = self.ladder.up_to(n)
                break
        self.run(uncounted, down=False, prompts=False)

    def run(self, found: Samples, *, down: bool, prompts: bool = True) -> None:
        """Run every size once, from the largest on if ``down``."""
        step = -1 if down else 1
        for n in self.ladder.passes[::step]:
            found.passes.append((n, self.batch(((0, n),))))
        for n in self.ladder.prefills[::step] if prompts else ():
            self.prompt(n, found)
        for spans in self.ladder.batches[::step]:
            found.batches.append((spans, self.batch(spans)))

    def pause(self, found: Samples) -> None:
        """Run a pass after each pause, and after none."""
        spans = ((0, min(self.ladder.prefills)),)
        for _ in range(PAUSED if self.ladder.pauses else 0):
            for seconds in (0.0, *self.ladder.pauses):
                self.batch(spans)
                time.sleep(seconds)
                found.paused.append((seconds, self.batch(spans)))

    def tokens(self, n: int) -> list[int]:
        high = self.engine.model.sizes.vocabulary
        return torch.randint(3, high, (n,), generator=self.random).tolist()

    def prefill(self, n: int) -> tuple[Fork, float]:
        """Prefill a prompt of ``n`` tokens; returns it and the seconds until its first token."""
        prompt, tokens = self.engine.open_prompt(), self.tokens(n)
        if not prompt.acquire(n):
            prompt.release()
            raise RuntimeError(f"the pool has no room for {n} tokens")
        return prompt, self.timed(lambda: self.compute(prompt, tokens))

    def compute(self, prompt: Fork, tokens: list[int]) -> None:
        chunk = self.ladder.chunk
        last = (len(tokens) - 1) // chunk * chunk
        for start in range(0, last, chunk):
            self.engine.execute([Chunk(prompt, tokens[start : start + chunk], sample=False)])
        self.engine.execute([Chunk(prompt, tokens[last:])])

    def prompt(self, n: int, found: Samples) -> None:
        """Prefill, swap out and swap in."""
        prompt, seconds = self.prefill(n)
        found.prefills.append((n, seconds))
        blocks = -(-n // self.engine.pool.block_size)
        found.swap_out.append((blocks, self.timed(lambda: _must(prompt.swap_out(self.host)))))
        self.host.poll()
        found.swap_in.append((blocks, self.timed(lambda: _must(prompt.swap_in()))))
        self.host.poll()
        prompt.release()

    def batch(self, spans: Sequence[Span]) -> float:
        """Seconds of one pass over ``spans``, whose contexts are prefilled before."""
        prompts = [self.prefill(c)[0] if c else self.engine.open_prompt() for c, _ in spans]
        works = [Chunk(p, self.tokens(n)) for p, (_, n) in zip(prompts, spans, strict=True)]
        for prompt, work in zip(prompts, works, strict=True):
            _must(prompt.acquire(len(work.tokens)))
        seconds = self.timed(lambda: self.engine.execute(works))
        for prompt in prompts:
            prompt.release()
        return seconds

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of ``work``; the device's queue is drained before and after."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        if self.engine.model.device.type == "cuda":
            torch.cuda.synchronize()


def _must(done: bool) -> None:
    if not done:
        raise RuntimeError("the pool has no room for the measurement")
