"""The paged pool: one K and one V tensor per layer, and the allocator of their blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regions.allocator import BlockAllocator


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVPool:
    """KV of every layer, ``[kv_heads, slots, head_dim]``: slot = block * block_size + offset.

    Head-major, so that an extent (a run of slots) is one strided view that attention reads in place.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        n_blocks: int,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.blocks = BlockAllocator(n_blocks)
        self.block_size = block_size
        slots = n_blocks * block_size
        # zeros, not empty: a NaN left in unwritten memory must never reach a masked product
        self.keys = [
            torch.zeros(layer.kv_heads, slots, layer.key_dim, dtype=dtype, device=device) for layer in layers
        ]
        self.values = [
            torch.zeros(layer.kv_heads, slots, layer.value_dim, dtype=dtype, device=device)
            for layer in layers
        ]

    @property
    def free_blocks(self) -> int:
        """Blocks nobody refers to."""
        return self.blocks.free_blocks

    @property
    def total_blocks(self) -> int:
        """Blocks of the pool."""
        return self.blocks.total_blocks

    @property
    def bytes(self) -> int:
        """Memory of all layers, in bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))
