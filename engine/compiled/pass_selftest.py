"""Whether compiled layers pay on this CPU: whole passes with them against whole passes without, at load.

Either way is timed as it would run: over the same attention backend, transformers' layers with the fastest
products that `engine.linears` finds. A pass of a large model goes through its first layers only, once through
some and once through twice as many: the others take as long.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b

from torch import nn

from engine.attention.base import Attention
from engine.compiled.decoder import CompiledDecoder
from engine.compiled.verdict import Verdict
from engine.engine import Engine, default_attention
from engine.linears.install import lent
from engine.measurement_cache import Question
from engine.model.loaded import ATTENTION, LoadedModel
from engine.model.probe import single_token
from engine.step import Chunk
from engine.stopwatch import Measure, Stopwatch
from regions.ephemeral import Fork

log = logging.getLogger(__name__)

ROWS = (1, 32)
"""A token, and a few questions."""
CONTEXT = 64
"""Tokens that each pass reads."""
STOPWATCH = Stopwatch(rounds=3, max_rounds=40, budget_s=0.5)
"""For each of `ROWS`: a second at the first start with a model, more where the cores are crowded."""
LARGEST = 1 << 27
"""Of larger models, by the elements of their layers' matrices, the first layers are measured."""
_BLOCK, _BLOCKS = 16, -(-(CONTEXT + max(ROWS)) // 16) + 2


def question_of(plain: LoadedModel) -> Question:
    """Return what a verdict is about: the model's weights, by shape and type, and the passes."""
    digest = blake2b(digest_size=12)
    for name, weight in plain.model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
    kind = f"{plain.model.config.model_type} {digest.hexdigest()}"
    return {"about": "compiled layers", "model": kind, "passes": f"{ROWS} rows over {CONTEXT}"}


def compare(plain: LoadedModel, decoder: CompiledDecoder, measure: Measure = STOPWATCH) -> Verdict:
    """Time passes of ``plain``, which has transformers' layers as they are, with and without ``decoder``."""
    model, layers = plain.model, decoder.layers
    counts = measured_layers(len(layers), layers[0].size)
    attention, whole = default_attention(plain), model.model.layers
    with ExitStack() as stack:
        stack.callback(model.model.register_module, "layers", whole)
        model.model.register_module("layers", whole[: counts[-1]])
        stack.enter_context(lent(model, partial(single_token, model)))
        model.set_attn_implementation(ATTENTION)
        runs = [
            _Passes(_engine(_first(loaded, n), attention), whole[:n], stack)
            for loaded in (replace(plain, decoder=decoder), plain)
            for n in counts
        ]
        taken = [measure([partial(run, rows) for run in runs]) for rows in ROWS]
    total = partial(of_all_layers, counts=counts, layers=len(layers))
    half = len(counts)
    verdict = Verdict(
        rows=ROWS,
        compiled_s=tuple(total(seconds[:half]) for seconds in taken),
        plain_s=tuple(total(seconds[half:]) for seconds in taken),
        measured=datetime.now(UTC).date().isoformat(),
    )
    log.info("%s", verdict)
    return verdict


def _engine(loaded: LoadedModel, attention: Attention) -> Engine:
    return Engine(loaded, blocks=_BLOCKS, block_size=_BLOCK, attention=attention, eager=True)


def measured_layers(layers: int, size: int) -> tuple[int, ...]:
    """Return through how many of ``layers`` passes go, each with matrices of ``size`` elements."""
    some = max(1, LARGEST // (2 * size))
    return (layers,) if 2 * some >= layers else (some, 2 * some)


def of_all_layers(seconds: Sequence[float], counts: Sequence[int], layers: int) -> float:
    """Return the seconds of a pass through all ``layers`` from those of passes through ``counts`` of them."""
    if len(counts) == 1:
        return seconds[0]
    each = max(0.0, seconds[1] - seconds[0]) / (counts[1] - counts[0])
    return seconds[1] + (layers - counts[1]) * each


def _first(loaded: LoadedModel, count: int) -> LoadedModel:
    """The model with its first ``count`` layers."""
    if count == len(loaded.layers):
        return loaded
    decoder = loaded.decoder
    assert decoder is None or isinstance(decoder, CompiledDecoder), "on a CPU"
    return replace(
        loaded,
        layers=loaded.layers[:count],
        rotations=loaded.rotations[:count],
        trims=False,
        decoder=None if decoder is None else replace(decoder, layers=decoder.layers[:count]),
    )


class _Passes:
    """Passes of an engine whose model has ``layers``, behind a context of `CONTEXT` tokens."""

    def __init__(self, engine: Engine, layers: nn.ModuleList, stack: ExitStack) -> None:
        self._engine, self._layers = engine, layers
        self._reader = Fork(engine.pool, frame_limit=engine.frame_limit)
        stack.callback(self._reader.release)
        self(CONTEXT)

    def __call__(self, rows: int) -> None:
        """Run one pass over ``rows`` tokens, of which the last is read, and forget them."""
        model = self._engine.model.model
        model.model.register_module("layers", self._layers)
        self._reader.acquire(rows)
        tokens = [model.config.vocab_size // 2] * rows
        self._engine.logits([Chunk(self._reader, tokens)], [rows - 1])
        self._reader.keep(CONTEXT)
