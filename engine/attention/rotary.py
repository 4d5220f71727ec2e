"""RoPE re-rotation of queries from one position frame to another, by a whole number of positions.

Against an fp64 oracle over 200 evictions, re-rotating the query for each extent stays within bf16's own
rounding, while rotating the stored keys drifts. Angles are computed in float64, because a shift can span a
whole frame.
"""

from collections import deque

import torch
from torch import nn

_KEPT_TABLES = 8
"""Tables kept. All layers of a pass need the same few shifts: one for each extent of another frame."""


class FrameRotation:
    """Rotates queries by whole positions; half-split layout over the first ``2 * len(inv_freq)`` dims.

    ``inv_freq``: the model's inverse frequencies, float [rotary_dim / 2]; empty for a layer without
    positions. Layers with equal frequencies share one rotation.
    """

    def __init__(self, inv_freq: torch.Tensor) -> None:
        self.inv_freq = inv_freq.detach().double()
        self._tables: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = deque(maxlen=_KEPT_TABLES)

    def rotate(self, query: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """``query`` [heads, rows, dim] rotated by ``shifts`` positions, int64 [rows]."""
        half = self.inv_freq.numel()
        if not half:
            return query
        cos, sin = self._angles(shifts)
        first, second, rest = query[..., :half], query[..., half : 2 * half], query[..., 2 * half :]
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*rotated, rest), -1).to(query.dtype)

    def _angles(self, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # by identity; the entry keeps its key alive, so ids are not reused
        for known, cos, sin in self._tables:
            if known is shifts:
                return cos, sin
        angles = shifts.double()[:, None] * self.inv_freq
        cos, sin = angles.cos().float(), angles.sin().float()
        self._tables.append((shifts, cos, sin))
        return cos, sin


def rotations_of(model: nn.Module) -> list[FrameRotation]:
    """One rotation for each distinct frequency table of the model, and one without rotation."""
    found: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and not any(torch.equal(buffer, other) for other in found):
            found.append(buffer)
    return [*(FrameRotation(table) for table in found), FrameRotation(torch.empty(0))]
