"""The CPU backend: torch's CPU flash kernel reads extents in place; grouped query heads become rows.

The kernel returns the log-sum-exp, so an extent with many readers is read once for all of them. It has no
soft-cap.
"""

from collections.abc import Iterator

import torch

from engine.attention.base import LayerCall, Merged
from engine.attention.metadata import ContextPart, NewPart
from engine.attention.reference import ReferenceAttention, ranges

RANGE_KEYS = 4096
"""Keys per call when few rows read a long extent: they stay in the cache for all rows."""
RANGE_ROWS = 192
"""With fewer rows the kernel uses blocks of 32 rows and reads all given keys for each block."""
CAPPED_SCORES = 1 << 22
"""Scores in memory at once with a soft-cap, approximately (16 MiB)."""

Output = tuple[torch.Tensor, torch.Tensor]
"""Output and log-sum-exp, as for `Merged.add`."""


class CpuAttention:
    """Reads extents in place with torch's CPU flash kernel, or a few keys at a time with a soft-cap."""

    def __init__(self, *, range_keys: int = RANGE_KEYS, capped_scores: int = CAPPED_SCORES) -> None:
        self._range_keys, self._capped_scores = range_keys, capped_scores

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """The output, [q_heads, rows, value_dim]."""
        call = call.as_stored()
        if call.softcap is not None:
            return ReferenceAttention(self._capped_scores)(call)
        output = Merged(call)
        for part in call.metadata.context(call.window):
            for out in _context(call, part, self._range_keys):
                output.add(part.rows, *out)
        for new in call.metadata.new(call.window):
            output.add(new.rows, *_new(call, new))
        return output.result()


def _context(call: LayerCall, part: ContextPart, range_keys: int) -> Iterator[Output]:
    query = torch.unflatten(call.rotated(part.rows, part.shifts), 0, (call.keys.shape[0], -1))
    kv_heads, groups, rows, dim = query.shape
    if part.visible is not None:
        keys, values = call.read(slice(part.start, part.stop))
        hidden = torch.zeros(part.visible.shape).masked_fill_(~part.visible, float("-inf"))
        yield _flash(query, _grouped(keys, groups), _grouped(values, groups), call.scale, hidden)
        return
    folded = query.reshape(1, kv_heads, groups * rows, dim)
    most = range_keys if groups * rows < RANGE_ROWS else part.stop - part.start
    for keys, values in ranges(call, part, most):
        out, lse = _flash(folded, keys[None], values[None], call.scale)
        yield torch.unflatten(out[0], 1, (groups, rows)), torch.unflatten(lse[0], 1, (groups, rows))


def _new(call: LayerCall, new: NewPart) -> Output:
    """The kernel's batch dimension is sequences times KV heads; its heads are the query heads of each."""
    kv_heads, groups = call.keys.shape[0], call.query.shape[0] // call.keys.shape[0]
    query, key, value = (
        torch.unflatten(tensor[:, new.rows], 1, (new.count, -1))
        for tensor in (call.query, call.new_key, call.new_value)
    )
    query = torch.unflatten(query, 0, (kv_heads, groups))
    if key.shape[2] == 1:  # a row sees only itself
        own = (query.float() * key[:, None].float()).sum(-1) * call.scale
        return value[:, None, :, 0].repeat(1, groups, 1, 1), own.flatten(2)
    keys, values = (_grouped(tensor.flatten(0, 1), groups) for tensor in (key, value))
    parts = _flash(query.transpose(1, 2).flatten(0, 1), keys, values, call.scale, causal=True)
    apart = (kv_heads, new.count)
    out, lse = (torch.unflatten(part, 0, apart).transpose(1, 2).flatten(2, 3) for part in parts)
    return out, lse


def _grouped(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """[batch, keys, dim] as [batch, groups, keys, dim] without a copy."""
    return tensor[:, None].expand(-1, groups, -1, -1)


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None = None,
    *,
    causal: bool = False,
) -> Output:
    """Attention of [batch, heads, rows, dim] to as many heads of keys; ``hidden`` is added to the scores."""
    mask = None if hidden is None else hidden.to(query.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse
