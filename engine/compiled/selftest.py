"""Whether compiled layers pay on this CPU, measured at load.

They were tuned on AVX-512. Where vectors are shorter or a library's products better they may lose, although
they save transformers' small operators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch

from engine.compiled.decoder import Decoder, Pass
from engine.compiled.packing import linears_of
from engine.device import out_of_memory
from engine.linears.products import ONEDNN, TORCH, Way, build
from engine.linears.selftest import Measure, stopwatch

log = logging.getLogger(__name__)

ROWS = (1, 16, 64)
"""A token, a question or six."""
_SLOWER = 1.25
"""What they may lose: less is noise, and the products alone are not a whole layer."""


def pays(decoder: Decoder, model: Any, measure: Measure = stopwatch) -> bool:
    """Whether a compiled layer is not clearly slower than a layer's products alone by any library."""
    ways = [Way(library) for library in (TORCH, ONEDNN) if library is not None]
    built = [_products(model.model.layers[0], way) for way in ways]
    rivals = [rival for rival in built if rival is not None]
    losses = []
    for rows in ROWS:
        ours = _layer(decoder, rows)
        seconds = measure([ours, *(partial(rival, rows) for rival in rivals)])
        losses.append(seconds[0] / min(seconds[1:]))
    loss = geometric_mean(losses)
    if loss > _SLOWER:
        log.info("compiled layers take %.1f times as long as products of libraries here: not used", loss)
    return loss <= _SLOWER


def _layer(decoder: Decoder, rows: int) -> Callable[[], object]:
    """One layer around its attention, on ``rows`` rows."""
    one = replace(decoder, layers=decoder.layers[:1])
    keys, values = torch.zeros(2, one.layers[0].kv_heads, rows, one.layers[0].dim)
    each = torch.arange(rows)
    tokens = torch.zeros_like(each)
    return Pass(one, tokens, each, each, [(keys, values)], each, trims=False).around_attention


def _products(layer: Any, way: Way) -> Callable[[int], object] | None:
    """The linear products of one of transformers' layers, of a number of rows; None if this CPU has none."""
    weights = [each.weight for each in linears_of(layer)]

    @torch.inference_mode()
    def run(rows: int) -> None:
        for part, weight in zip(parts, weights, strict=True):
            part(weight.new_zeros(rows, weight.shape[1]))

    try:  # oneDNN multiplies bf16 with AVX-512 and more
        parts = [part.forward for part in build(way, weights, [None] * len(weights))]
        run(1)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        return None
    return run
