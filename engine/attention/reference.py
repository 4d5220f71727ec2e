"""Plain softmax attention on any device: for soft-caps, and as the oracle of every backend."""

from __future__ import annotations

import torch

from engine.attention.base import LayerCall, Merged
from engine.attention.metadata import NewPart


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


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: LayerCall,
    visible: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain softmax attention of ``query`` [q_heads, rows, dim]: output, log-sum-exp [q_heads, rows].

    ``keys``, ``values`` [kv_heads, keys, dim]; ``visible``: bool [rows, keys], None when all are visible.
    """
    heads, rows, _ = query.shape
    groups = heads // keys.shape[0]
    folded = query.reshape(keys.shape[0], groups * rows, -1)
    scores = torch.matmul(folded, keys.transpose(1, 2)).float().view(heads, rows, -1) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(torch.float32).min)[..., None]).to(values.dtype)
    folded_weights = weights.view(keys.shape[0], groups * rows, -1)
    return torch.matmul(folded_weights, values).float().view(heads, rows, -1), lse


def attend_new(call: LayerCall, new: NewPart) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` within each sequence of ``new``."""
    tensors = (call.query, call.new_key, call.new_value)
    queries, keys, values = (tensor[:, new.rows].chunk(new.count, 1) for tensor in tensors)
    rows = queries[0].shape[1]
    causal = torch.ones(rows, rows, dtype=torch.bool, device=call.query.device).tril()
    parts = [attend(*sequence, call, causal) for sequence in zip(queries, keys, values, strict=True)]
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)
