"""The oracle of attention backends: a plain softmax over each part."""

from __future__ import annotations

import torch

from engine.attention.base import LayerCall, Merged
from engine.attention.reference import attend, attend_new


class ReferenceAttention:
    """One softmax per part, every score of it at once. Slow and plain."""

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """The output, [q_heads, rows, value_dim]."""
        output = Merged(call)
        for part in call.metadata.context(call.window):
            keys, values = call.keys[:, part.start : part.stop], call.values[:, part.start : part.stop]
            query = call.rotated(part.rows, part.shifts)
            output.add(part.rows, *attend(query, keys, values, call, part.visible))
        for new in call.metadata.new(call.window):
            output.add(new.rows, *attend_new(call, new))
        return output.result()
