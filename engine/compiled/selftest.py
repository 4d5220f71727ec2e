"""Whether compiled layers pay on this CPU, measured at load.

They were tuned on AVX-512. Where vectors are shorter or a library's products better they may lose, although
they save transformers' small operators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch

from engine.compiled.decoder import Decoder, Layer, Work, linears_of, padded
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
    rivals = [_products(model.model.layers[0], way) for way in ways]
    losses = []
    for rows in ROWS:
        ours = _layer(decoder.layers[0], decoder.embedding.shape[1], rows)
        seconds = measure([ours, *(partial(rival, rows) for rival in rivals)])
        losses.append(seconds[0] / min(seconds[1:]))
    loss = geometric_mean(losses)
    if loss > _SLOWER:
        log.info("compiled layers take %.1f times as long as products of libraries here: not used", loss)
    return loss <= _SLOWER


def _layer(layer: Layer, width: int, rows: int) -> Callable[[], object]:
    """One layer around its attention, on ``rows`` rows."""
    half = layer.dim // 2
    angles = torch.ones(rows, half)
    keys, values = torch.zeros(2, layer.kv_heads, rows, layer.dim)
    output = torch.zeros(layer.heads, rows, layer.dim)
    states = torch.zeros(rows, padded(width))
    work = Work(states, cos=angles, sin=angles, half=half, slots=torch.arange(rows))

    def run() -> None:
        work.before_attention(layer, keys, values)
        work.after_attention(layer, output)

    return run


def _products(layer: Any, way: Way) -> Callable[[int], object]:
    """The linear products of one of transformers' layers, of a number of rows."""
    weights = [each.weight for each in linears_of(layer)]
    parts = [part.forward for part in build(way, weights, [None] * len(weights))]

    @torch.inference_mode()
    def run(rows: int) -> None:
        for part, weight in zip(parts, weights, strict=True):
            part(weight.new_zeros(rows, weight.shape[1]))

    return run
