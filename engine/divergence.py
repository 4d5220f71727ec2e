"""The difference between a tape's carried state and a fresh prefill of its window, measured by its questions.

A surviving record keeps what it absorbed from records evicted since, so a sliding tape answers as if it had
read more than its window. Whether that matters depends on the model and the question, so it is measured on
both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.engine import Engine
from engine.step import Chunk
from regions.ephemeral import Fork
from regions.extents import anchor, drop_oldest
from regions.frozen import Context
from regions.tape import Tape

Probe = tuple[Sequence[int], tuple[int, ...] | None]
"""A question's tokens, and the token ids its answer is restricted to, if any."""


@dataclass(frozen=True)
class Divergence:
    """One question answered from both states."""

    agrees: bool
    """Both states give the same first token, out of the choices if there are any."""
    kl_nats: float
    """KL(fresh || carried) of the next-token distribution over the whole vocabulary."""


def divergences(
    fresh: torch.Tensor, carried: torch.Tensor, choices: Sequence[tuple[int, ...] | None]
) -> list[Divergence]:
    """Compare next-token logits by row, both [rows, vocabulary]. ``choices[row]``: as in `Probe`."""
    log_fresh, log_carried = (logits.double().log_softmax(-1) for logits in (fresh, carried))
    kl = (log_fresh.exp() * (log_fresh - log_carried)).sum(-1).clamp(min=0.0).tolist()
    return [
        Divergence(_best(new, allowed) == _best(old, allowed), nats)
        for new, old, allowed, nats in zip(fresh, carried, choices, kl, strict=True)
    ]


def probe(engine: Engine, tape: Tape, fresh: Fork, probes: Sequence[Probe]) -> list[Divergence]:
    """Ask all questions of the tape's current version and of ``fresh``, each state in the same passes.

    ``fresh`` is a `Tape.fresh_window` with the window prefilled into it; records evicted since then are left
    out. Nothing is changed. Empty when the two do not have the same records (an append is under way) or the
    pool has no room for the questions. Raises NotResident and OutOfMemory.
    """
    context = window_of(tape, fresh)
    readers = [tape.fork() for _ in probes]
    try:
        if context is None or any(reader.cached_tokens != context.tokens for reader in readers):
            return []
        readers += [Fork(engine.pool, frame_limit=engine.frame_limit, context=context) for _ in probes]
        prompts = [tokens for tokens, _ in probes] * 2
        if not all(reader.acquire(len(tokens)) for reader, tokens in zip(readers, prompts, strict=True)):
            return []
        asked = list(zip(readers, prompts, strict=True))
        begun = [Chunk(reader, tokens[:-1], sample=False) for reader, tokens in asked if len(tokens) > 1]
        if begun:
            engine.execute(begun)
        # the last tokens run in a separate pass, whose rows all return logits of the whole vocabulary
        logits = engine.logits([Chunk(reader, tokens[-1:]) for reader, tokens in asked])
        carried, recomputed = logits[: len(probes)], logits[len(probes) :]
        return divergences(recomputed, carried, [choices for _, choices in probes])
    finally:
        for reader in readers:
            reader.release()


def window_of(tape: Tape, fresh: Fork) -> Context | None:
    """The context that readers of ``tape`` would have in ``fresh``; without references of its own.

    Valid until ``fresh`` changes. The frozen prefix is anchored where the window begins now. None when
    ``fresh`` has another window.
    """
    passed = tape.evicted_tokens - fresh.begins_at
    if not tape.live_tokens or fresh.length - passed != tape.live_tokens:
        return None
    window = list(fresh.private_extents)
    frozen = fresh.extents[: -len(window)]
    drop_oldest(window, passed)
    placement = fresh.next_slots(0)
    base = tape.evicted_tokens - fresh.cached_tokens
    return Context(
        (*anchor(frozen, passed), *window), (), placement.coord, placement.origin, base, tape.version
    )


def _best(logits: torch.Tensor, choices: tuple[int, ...] | None) -> int:
    allowed = logits if choices is None else logits[list(choices)]
    return int(allowed.argmax())
