"""The interface of an attention backend, and the merge of attention states by log-sum-exp.

A backend gets one layer's queries, its new keys and values, and the pool, which already has them. `cpu` reads
extents in place with torch's CPU flash kernel; `triton` uses its own kernels on a GPU.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine.attention.metadata import AttentionMetadata
from engine.attention.rotary import FrameRotation
from regions.kv_codes import numbers, stored


@dataclass(frozen=True)
class LayerCall:
    """One layer's attention in one pass.

    ``query`` [q_heads, rows, key_dim]; ``new_key``, ``new_value`` [kv_heads, rows, dim]: of the batch's own
    rows; ``keys``, ``values`` [kv_heads, slots, numbers of a row]: the layer's pool, perhaps of another type.
    ``sinks`` [q_heads]: one logit per head that takes part in the softmax without a value (GPT-OSS).
    """

    query: torch.Tensor
    new_key: torch.Tensor
    new_value: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    softcap: float | None
    window: int | None
    metadata: AttentionMetadata
    rotation: FrameRotation
    sinks: torch.Tensor | None = None

    def rotated(self, rows: slice | torch.Tensor, shifts: torch.Tensor | None) -> torch.Tensor:
        """The queries of ``rows``, rotated to the frames of their keys; no rotation if ``shifts`` is None."""
        queries = self.query[:, rows]
        return queries if shifts is None else self.rotation.rotate(queries, shifts)

    def as_stored(self) -> "LayerCall":
        """The same with the batch's own keys and values as later passes find them in the pool.

        Queries get the pool's type, or float32 where that has codes.
        """
        if self.query.dtype == self.keys.dtype:
            return self
        key, value = (numbers(stored(x, self.keys.dtype)) for x in (self.new_key, self.new_value))
        return replace(self, query=self.query.to(key.dtype), new_key=key, new_value=value)

    def read(self, slots: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of ``slots``, as floats."""
        return numbers(self.keys[:, slots]), numbers(self.values[:, slots])


class Attention(Protocol):
    """An attention backend."""

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """The output, [q_heads, rows, value_dim]."""
        ...


class Merged:
    """Merges the attention states of one layer by log-sum-exp, one after the other.

    Everything is per row, so a row with NaN does not affect others.
    """

    def __init__(self, call: LayerCall) -> None:
        self._call = call
        self._whole = slice(0, call.query.shape[1])
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, rows: slice | torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a part over ``rows``, each of which saw at least one of its keys. Takes over both tensors.

        ``out`` [..., rows, dim], ``lse`` [..., rows]. The leading dimensions must be the same for all parts:
        the query heads, flat or grouped by KV head.
        """
        out, lse = out.float(), lse.float()
        if self._state is None:
            if isinstance(rows, slice) and rows == self._whole:  # the usual first part
                self._state = out, lse
                return
            self._state = self._nothing(out)
        whole, whole_lse = self._state
        before = whole_lse[..., rows]
        # One sigmoid instead of two exponentials: exp starts library threads even for few numbers.
        weight = torch.sigmoid(lse - before)[..., None]
        if isinstance(rows, slice):
            whole[..., rows, :].lerp_(out, weight)
        else:
            whole[..., rows, :] = whole[..., rows, :].lerp_(out, weight)
        whole_lse[..., rows] = torch.logaddexp(before, lse)

    def result(self) -> torch.Tensor:
        """The merged output in the model's dtype, [q_heads, rows, dim], with rows contiguous in memory."""
        assert self._state is not None, "every row sees at least itself"
        whole, lse = self._state
        if self._call.sinks is not None:  # a sink takes weight and adds no value
            sinks = self._call.sinks.float().view(*lse.shape[:-1], 1)
            whole = whole * torch.sigmoid(lse - sinks)[..., None]
        return whole.movedim(-2, 0).flatten(1, -2).transpose(0, 1).to(self._call.query.dtype)

    def _nothing(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*out.shape[:-2], self._whole.stop, out.shape[-1])
        return out.new_zeros(shape), out.new_full(shape[:-1], float("-inf"))
