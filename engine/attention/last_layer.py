"""Skips the last layer for the rows whose output is not needed, which are most.

A row that chooses no token needs only its keys and values there. So the layer runs until attention has
written them, is stopped by an exception, and runs once more over the few rows that are read, for which the
rows before them are context. A pass that reads none ends at that point.

Of the layer's arguments, the first and all others with one entry a row must have them along dimension 1. The
canary compares logits computed this way with the dense model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.attention.metadata import AttentionMetadata


class Written(Exception):
    """The last layer's keys and values are in the pool."""


class NothingRead(Exception):
    """The pass is done: no row is read."""


@dataclass
class LastLayer:
    """What one pass needs of its last layer: the output of ``rows`` (ascending) of ``metadata``.

    ``reading``: keys and values are written, and attention sees these rows alone.
    """

    rows: Sequence[int]
    metadata: AttentionMetadata
    reading: bool = field(default=False, init=False)


Wanted = Callable[[], LastLayer | None]
"""What the pass under way needs of its last layer; None: all of it."""


def install(model: nn.Module, layers: int, wanted: Wanted) -> bool:
    """Make ``model``'s last of ``layers`` decoder layers compute what is ``wanted``; False if not found."""
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != layers:
            continue
        layer = module[-1]
        attends = any(getattr(part, "layer_idx", None) == layers - 1 for part in layer.modules())
        if attends and "forward" not in layer.__dict__:
            layer.forward = partial(_forward, layer, wanted)
            return True
    return False


def _forward(layer: nn.Module, wanted: Wanted, *args: Any, **kwargs: Any) -> Any:
    forward = type(layer).forward
    last = wanted()
    if last is None:
        return forward(layer, *args, **kwargs)
    try:
        forward(layer, *args, **kwargs)
    except Written:
        pass
    else:
        raise RuntimeError("the last layer did not reach attention")
    if not last.rows:
        raise NothingRead
    last.metadata = last.metadata.only(last.rows)
    last.reading = True
    hidden = args[0]
    rows, kept = hidden.shape[1], torch.tensor(last.rows, device=hidden.device)
    return forward(layer, *_pick(args, rows, kept), **_pick(kwargs, rows, kept))


def _pick(value: Any, rows: int, kept: torch.Tensor) -> Any:
    """``value`` with only rows ``kept`` of every tensor that has ``rows`` of them along dimension 1."""
    if isinstance(value, torch.Tensor):
        return value[:, kept] if value.dim() > 1 and value.shape[1] == rows else value
    if isinstance(value, tuple):
        return tuple(_pick(each, rows, kept) for each in value)
    if isinstance(value, dict):
        return {name: _pick(each, rows, kept) for name, each in value.items()}
    return value
