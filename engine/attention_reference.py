"""The reference backend: plain softmax over every part, on any device. Slow and simple."""

from __future__ import annotations

import torch

from engine.attention import LayerCall, Merged


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: LayerCall,
    visible: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain softmax attention of ``query`` [q_heads, rows, dim]: output, log-sum-exp [q_heads, rows]."""
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


class ReferenceAttention:
    """One softmax per sequence over every key it sees, scores side by side. Slow and plain."""

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """The output, [q_heads, rows, value_dim]."""
        output = Merged(call)
        for part in call.plan.past(call.window):
            keys, values = call.keys[:, part.start : part.stop], call.values[:, part.start : part.stop]
            output.add(part.rows, *attend(call.turned(part), keys, values, call, part.visible))
        for new in call.plan.new(call.window):
            rows = slice(new.start, new.stop)
            visible = new.visible
            if visible is None:
                visible = torch.ones(
                    new.stop - new.start, new.stop - new.start, dtype=torch.bool, device=call.query.device
                ).tril()
            keys, values = call.new_key[:, rows], call.new_value[:, rows]
            output.add(rows, *attend(call.query[:, rows], keys, values, call, visible))
        return output.result()
