"""Turning queries from one position frame to another: rotary embedding by a whole number of positions.

Measured against an fp64 oracle over 200 evictions, turning the query per extent stays within bf16's own
noise, while rotating the stored keys forward drifts. Angles are computed in float64 because a turn can
span a whole frame.
"""

from __future__ import annotations

import torch
from torch import nn


class FrameTurner:
    """Rotates queries by whole positions; half-split layout over the first ``2 * len(inv_freq)`` dims.

    ``inv_freq``: the model's own inverse frequencies, float [rotary_dim / 2].
    """

    def __init__(self, inv_freq: torch.Tensor) -> None:
        self._inv_freq = inv_freq.double()
        self._tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def turn(self, query: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """``query`` [heads, rows, dim] rotated by ``turns`` positions, int64 [rows]."""
        cos, sin = self._angles(turns)
        half = self._inv_freq.numel()
        first, second, rest = query[..., :half], query[..., half : 2 * half], query[..., 2 * half :]
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*turned, rest), -1).to(query.dtype)

    def _angles(self, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # every layer of a pass asks for the same turns: keep the last tables by identity
        if self._tables is None or self._tables[0] is not turns:
            angles = turns.double()[:, None] * self._inv_freq
            self._tables = (turns, angles.cos().float(), angles.sin().float())
        return self._tables[1], self._tables[2]


def find_turner(model: nn.Module) -> FrameTurner | None:
    """The turner of a model with one rotary base for all layers, None when it has none or several."""
    tables = [
        buffer
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]
    if len(tables) != 1:
        return None
    return FrameTurner(tables[0].detach())
