"""Attention over extents: parts merged by log-sum-exp, behind one small interface.

A backend gets this layer's queries, its new keys and values, and the pool that already holds them.
`ReferenceAttention` gathers every key a row sees and runs a plain softmax (any device; the oracle of the
others). `CpuAttention` reads extents in place with torch's CPU flash kernel, which returns the
log-sum-exp, and folds grouped query heads into rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import BatchPlan, PastPart
from engine.rotary import FrameTurner


@dataclass(frozen=True)
class LayerCall:
    """One layer's attention in one pass.

    ``query`` [q_heads, rows, key_dim]; ``new_key``, ``new_value`` [kv_heads, rows, dim]: the batch's own;
    ``keys``, ``values`` [kv_heads, slots, dim]: the layer's pool.
    """

    query: torch.Tensor
    new_key: torch.Tensor
    new_value: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    softcap: float | None
    window: int | None
    plan: BatchPlan
    turner: FrameTurner

    def turned(self, part: PastPart) -> torch.Tensor:
        """The part's query rows in the frame of its extent."""
        rows = self.query[:, part.rows]
        return rows if part.turns is None else self.turner.turn(rows, part.turns)


class Attention(Protocol):
    """An attention backend."""

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """The output, [q_heads, rows, value_dim]."""
        ...


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


class Merged:
    """Parts of one layer's output, merged by their log-sum-exp as they come."""

    def __init__(self, call: LayerCall) -> None:
        heads, rows, _ = call.query.shape
        self._dtype = call.query.dtype
        self._rows = slice(0, rows)
        self._shape = (heads, rows, call.values.shape[-1])
        self._device = call.query.device
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, rows: slice | torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a part over ``rows``: ``out`` [heads, rows, dim], ``lse`` [heads, rows]."""
        out, lse = out.float(), lse.float()
        if self._state is None:
            if isinstance(rows, slice) and rows == self._rows:  # the usual first part
                self._state = out, lse
                return
            self._state = self._nothing()
        whole, whole_lse = self._state
        before = whole_lse[:, rows]
        # One sigmoid in place of two exponentials: exp goes through a threaded library even for few numbers.
        # A row that sees no key of this part nor of those before has -inf - -inf: it keeps its zeros.
        weight = torch.sigmoid(lse - before).masked_fill_(lse == float("-inf"), 0.0)[..., None]
        whole[:, rows] = torch.lerp(whole[:, rows], out, weight)
        whole_lse[:, rows] = torch.logaddexp(before, lse)

    def result(self) -> torch.Tensor:
        """The merged output in the model's dtype."""
        whole, _ = self._state or self._nothing()
        return whole.to(self._dtype)

    def _nothing(self) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        return out, out.new_full(self._shape[:2], float("-inf"))
