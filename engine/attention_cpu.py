"""The CPU backend: extents read in place by torch's CPU flash kernel, grouped query heads folded into rows.

The kernel returns the log-sum-exp, so an extent shared by many readers is read once for all of them.
"""

from __future__ import annotations

import torch

from engine.attention import LayerCall, Merged
from engine.attention_reference import ReferenceAttention


class CpuAttention:
    """Extents in place by torch's CPU flash kernel; models with a soft-cap fall back to the plain softmax."""

    def __init__(self) -> None:
        self._plain = ReferenceAttention()

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """The output, [q_heads, rows, value_dim]."""
        if call.softcap is not None:  # the flash kernel has no soft-cap
            return self._plain(call)
        output = Merged(call)
        kv_heads = call.keys.shape[0]
        for part in call.plan.past(call.window):
            query = call.turned(part)
            heads, rows, dim = query.shape
            groups = heads // kv_heads
            folded, lse = _flash(
                query.reshape(1, kv_heads, groups * rows, dim),
                call.keys[None, :, part.start : part.stop],
                call.values[None, :, part.start : part.stop],
                call.scale,
                None if part.visible is None else part.visible.repeat(groups, 1),
            )
            out, lse = folded.reshape(heads, rows, -1), lse.reshape(heads, rows)
            if part.visible is not None:  # the kernel leaves NaN in rows that see no key of the part
                blind = ~part.visible.any(-1)
                out = out.masked_fill(blind[:, None], 0.0)
                lse = lse.masked_fill(blind, float("-inf"))
            output.add(part.rows, out, lse)
        for new in call.plan.new(call.window):
            rows_ = slice(new.start, new.stop)
            query = call.query[:, rows_]
            heads, rows, dim = query.shape
            groups = heads // kv_heads
            # kv heads as the batch, their query heads as heads: the keys are shared by stride, not copied
            out, lse = _flash(
                query.reshape(kv_heads, groups, rows, dim),
                call.new_key[:, None, rows_].expand(-1, groups, -1, -1),
                call.new_value[:, None, rows_].expand(-1, groups, -1, -1),
                call.scale,
                new.visible,
                causal=new.visible is None,
            )
            output.add(rows_, out.reshape(heads, rows, -1), lse.reshape(heads, rows))
        return output.result()


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None,
    *,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = None
    if visible is not None:
        mask = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, float("-inf"))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse
