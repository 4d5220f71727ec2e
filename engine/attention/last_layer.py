"""A pass does not compute what nobody reads: most rows of the last layer.

Of a row that chooses no token, the last layer is wanted for its keys and values alone. So that layer runs
until attention has written them, is broken off there by an exception, and runs once more over the few rows
that are read, for which the rows before them are context. A pass that reads none ends at that point.

Nothing is known of the layer but that its first argument and whatever else has one entry a row have them
along dimension 1. The canary compares logits computed this way with the dense model's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from engine.attention.metadata import AttentionMetadata


class Written(Exception):
    """The last layer's keys and values are in the pool."""


class NothingRead(Exception):
    """The pass is done."""


@dataclass
class LastLayer:
    """What one pass wants of its last layer: the output of ``rows`` (ascending) of ``metadata``.

    ``reading``: keys and values are written, and attention sees these rows alone.
    """

    rows: Sequence[int]
    metadata: AttentionMetadata
    reading: bool = field(default=False, init=False)


_wanted = threading.local()


@contextmanager
def wanting(last: LastLayer | None) -> Iterator[None]:
    """The passes of this thread want this of their last layer; None: all of it."""
    _wanted.last = last
    try:
        yield
    finally:
        _wanted.last = None


def install(model: nn.Module, layers: int) -> bool:
    """Make ``model``'s last of ``layers`` decoder layers answer to `wanting`; False if it is not found."""
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != layers:
            continue
        layer = module[-1]
        attends = any(getattr(part, "layer_idx", None) == layers - 1 for part in layer.modules())
        if attends and "forward" not in layer.__dict__:
            layer.forward = MethodType(_forward, layer)
            return True
    return False


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(layer).forward
    last: LastLayer | None = getattr(_wanted, "last", None)
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
