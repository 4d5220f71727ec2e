"""Computes the last layer only for the rows whose output is read, which are few.

A row that samples no token needs only its keys and values there. So the layer runs until attention has
written them, is interrupted by an exception, and runs again for the few rows that are read, with the rows
before them as context. A pass that reads no row ends at that point.

The layer's first argument, and all others with one entry per row, must have the rows in dimension 1. The
canary compares logits computed this way with the dense model's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from engine.attention.base import LayerCall
from engine.attention.metadata import AttentionMetadata
from engine.device import to_device


class Written(Exception):
    """Raised when the last layer's keys and values are in the pool."""


class NothingRead(Exception):
    """Raised when the pass is done because no row is read."""


@dataclass
class LastLayer:
    """The rows that one pass reads from its last layer: the output of ``rows`` (ascending) of ``metadata``.

    ``reading``: keys and values are written, and attention now gets only these rows.
    """

    rows: Sequence[int]
    metadata: AttentionMetadata
    reading: bool = field(default=False, init=False)

    def keep_rows(self) -> None:
        """Keys and values are written: from now on attention gets only ``rows``."""
        self.metadata, self.reading = self.metadata.only(self.rows), True

    def reduced(self, call: LayerCall, kept: torch.Tensor) -> LayerCall:
        """``call`` for ``rows`` only, which are also in ``kept``; their keys and values are in the pool."""
        query, key, value = (each[:, kept] for each in (call.query, call.new_key, call.new_value))
        return replace(
            call, query=query, new_key=key, new_value=value, metadata=self.metadata.only(self.rows)
        )


Wanted = Callable[[], LastLayer | None]
"""The `LastLayer` of the current pass; None: all rows."""


def install(model: nn.Module, layers: int, wanted: Wanted) -> bool:
    """Make the last of ``model``'s ``layers`` decoder layers compute only ``wanted``; False if not found."""
    found = decoder_layers(model, layers)
    if found is None or isinstance(vars(found[-1]).get("forward"), Trimmed):
        return False
    last = found[-1]
    vars(last)["forward"] = Trimmed(last.forward, wanted)
    return True


def decoder_layers(model: nn.Module, layers: int) -> nn.ModuleList | None:
    """``model``'s list of ``layers`` decoder layers, None if it has none."""
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != layers:
            continue
        if any(getattr(part, "layer_idx", None) == layers - 1 for part in module[-1].modules()):
            return module
    return None


@dataclass(frozen=True)
class Trimmed:
    """The ``forward`` of a last layer, for the rows that are ``wanted``."""

    forward: Callable[..., Any]
    wanted: Wanted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``forward`` returns, of the rows read; raises NothingRead if there are none."""
        last = self.wanted()
        if last is None:
            return self.forward(*args, **kwargs)
        try:
            self.forward(*args, **kwargs)
        except Written:
            pass
        else:
            raise RuntimeError("the last decoder layer did not call our attention")
        if not last.rows:
            raise NothingRead
        last.keep_rows()
        hidden = args[0]
        rows, (kept,) = hidden.shape[1], to_device(hidden.device, last.rows)
        return self.forward(*_pick(args, rows, kept), **_pick(kwargs, rows, kept))


def _pick(value: Any, rows: int, kept: torch.Tensor) -> Any:
    """``value`` reduced to the rows ``kept`` in every tensor with ``rows`` rows in dimension 1."""
    if isinstance(value, torch.Tensor):
        return value[:, kept] if value.dim() > 1 and value.shape[1] == rows else value
    if isinstance(value, tuple):
        return tuple(_pick(each, rows, kept) for each in value)
    if isinstance(value, dict):
        return {name: _pick(each, rows, kept) for name, each in value.items()}
    return value
