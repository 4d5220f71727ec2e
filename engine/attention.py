"""What an attention backend is given and how parts over extents are merged by log-sum-exp.

A backend gets one layer's queries, its new keys and values, and the pool that already holds them.
`attention_reference` is a plain softmax on any device, the oracle of the others; `attention_cpu` reads
extents in place with torch's CPU flash kernel.
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
    ``keys``, ``values`` [kv_heads, slots, dim]: the layer's pool. ``sinks`` [q_heads]: a logit each head
    may attend to that has no value (GPT-OSS).
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
    sinks: torch.Tensor | None = None

    def turned(self, part: PastPart) -> torch.Tensor:
        """The part's query rows in the frame of its extent."""
        rows = self.query[:, part.rows]
        return rows if part.turns is None else self.turner.turn(rows, part.turns)


class Attention(Protocol):
    """An attention backend."""

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """The output, [q_heads, rows, value_dim]."""
        ...


class Merged:
    """Parts of one layer's output, merged by their log-sum-exp as they come."""

    def __init__(self, call: LayerCall) -> None:
        heads, rows, _ = call.query.shape
        self._dtype = call.query.dtype
        self._sinks = call.sinks
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
        whole, lse = self._state or self._nothing()
        if self._sinks is not None:  # a sink takes its share of the weight and gives nothing
            whole = whole * torch.sigmoid(lse - self._sinks.float()[:, None])[..., None]
        return whole.to(self._dtype)

    def _nothing(self) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        return out, out.new_full(self._shape[:2], float("-inf"))
