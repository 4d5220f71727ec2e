"""Passes before an engine serves on a GPU: no question waits for a compilation or a capture of its size."""

import logging
import time
from collections.abc import Callable

from engine.device import finish
from engine.engine import Engine
from engine.graphs.runner import MAX_ROWS
from engine.step import Chunk
from regions.ephemeral import Fork
from regions.frozen import Context

log = logging.getLogger(__name__)

_TOKEN = 1
MAX_ANSWERS = 64
"""In one of these passes: each has logits of the whole vocabulary."""


Tell = Callable[[str], None]
"""Says what a start is doing."""


def warm_up(engine: Engine, max_rows: int, window: int, tell: Tell = lambda text: None) -> None:
    """Run one pass of each kind behind ``window`` tokens, and capture what is captured of them.

    Of one, two, four ... tokens each: an append or a question, which samples at its end, and tokens of as
    many answers. The window's own passes are of ``max_rows`` tokens, the most that one may have. Nothing
    else uses the engine yet; what the pool has no room for is left out. Raises OutOfMemory.
    """
    began, sizes = time.monotonic(), [1 << n for n in range(min(max_rows, MAX_ROWS).bit_length())]
    passes = [kind for n in sizes for kind in ((1, n), (n, 1)) if kind[0] <= MAX_ANSWERS]
    tell("compiling kernels")
    half = engine.pool.free_blocks // 2 * engine.pool.block_size
    behind = _prefilled(engine, max_rows, min(max(window, max_rows), half))
    try:
        for number, (readers, tokens) in enumerate(passes, 1):
            tell(f"running passes, {number} of {len(passes)}")
            run_pass(engine, behind, readers, tokens)
    finally:
        behind.release()
    graphs = engine.graphs
    waiting = 0 if graphs is None else graphs.waiting
    while graphs is not None and graphs.waiting:
        tell(f"capturing passes, {waiting - graphs.waiting + 1} of {waiting}")
        graphs.capture_next()
    finish(engine.model.device)
    captured = 0 if graphs is None else graphs.captures
    log.info("warmed up in %.1f s: %d sizes of passes are captured", time.monotonic() - began, captured)


def _prefilled(engine: Engine, max_rows: int, tokens: int) -> Context:
    """A context of that many tokens."""
    prompt = Fork(engine.pool, frame_limit=engine.frame_limit, context=Context())
    try:
        while tokens and prompt.acquire(n := min(tokens, max_rows)):
            engine.execute([Chunk(prompt, [_TOKEN] * n, sample=False)])
            tokens -= n
        return prompt.as_context()
    finally:
        prompt.release()


def run_pass(engine: Engine, behind: Context, readers: int, tokens: int) -> None:
    """Run a pass of ``tokens`` for each of ``readers``, if the pool has room for it."""
    forks = [Fork(engine.pool, frame_limit=engine.frame_limit, context=behind) for _ in range(readers)]
    try:
        if all(fork.acquire(tokens) for fork in forks):
            engine.execute([Chunk(fork, [_TOKEN] * tokens) for fork in forks])
    finally:
        for fork in forks:
            fork.release()
