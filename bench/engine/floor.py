"""Lower bounds of a pass on this machine: its arithmetic, or reading the data it needs.

Arithmetic, of linear layers and of attention, counts at the rate of the fastest large product that any
library here reaches in the model's dtype, bytes at that of the fastest read of memory (`bench.engine.rates`).
Few rows reach less than a large product does; the floor makes no allowance for that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from bench.engine.rates import MachineRates, Rate
from engine.model.loaded import LoadedModel


class PassCosts(NamedTuple):
    """The least a pass over a dense decoder must read and compute."""

    weight_bytes: int
    """All weights but the input embedding, of which a pass reads one row per token."""
    linear_bytes: int
    """Weights that multiply every row: all but the output layer's."""
    linear_flops: int
    """Of one token, by these weights."""
    kv_bytes: int
    """Of one token, all layers."""
    attention_flops: int
    """Of one query token meeting one key, all layers."""

    @classmethod
    def of(cls, loaded: LoadedModel) -> PassCosts:
        """Count them from the model's configuration; how the loaded one keeps its weights does not matter."""
        size = loaded.dtype.itemsize
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(loaded.model.config)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
        heads = model.config.num_attention_heads
        return cls(
            size * (sum(parameter.numel() for parameter in model.parameters()) - embedding.numel()),
            size * linear,
            2 * linear,
            size * sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in loaded.layers),
            sum(2 * heads * (layer.key_dim + layer.value_dim) for layer in loaded.layers),
        )


class Floor(NamedTuple):
    """Milliseconds of one pass."""

    arithmetic_ms: float
    reading_ms: float

    @property
    def ms(self) -> float:
        """The larger of the two."""
        return max(self.arithmetic_ms, self.reading_ms)


class Floors(NamedTuple):
    """Of one model, at the rates of the fastest ``product`` and the fastest ``read``."""

    costs: PassCosts
    product: Rate
    read: Rate

    @classmethod
    def of(cls, loaded: LoadedModel, rates: MachineRates) -> Floors:
        """At the best rates of all looks so far."""
        return cls(PassCosts.of(loaded), rates.product(loaded.dtype), rates.read())

    @property
    def made_of(self) -> str:
        """The two rates and whose they are, for the line above a table."""
        product, read = (round(rate.a_second / 1e9, 1) for rate in (self.product, self.read))
        return f"{product:g} GFLOP/s ({self.product.by}), {read:g} GB/s ({self.read.by})"

    def attention(self, rows: int, shared: float, own: float = 0.0, readers: int = 1) -> Floor:
        """``rows`` rows of ``readers`` over ``shared`` tokens, read once, and each reader's ``own``."""
        operations = self.costs.attention_flops * rows * (shared + own)
        return self._floor(operations, self.costs.kv_bytes * (shared + readers * own))

    def linear(self, rows: int) -> Floor:
        """All but attention and the head: each row times every weight; the weights are read once."""
        return self._floor(self.costs.linear_flops * rows, self.costs.linear_bytes)

    def of_pass(self, rows: int, shared: float, own: float = 0.0, readers: int = 1) -> float:
        """Attention and linear layers together, ms."""
        return self.attention(rows, shared, own, readers).ms + self.linear(rows).ms

    def memory_ms(self, context: int) -> float:
        """Time to read all weights and the KV of ``context`` tokens once."""
        return self._floor(0, self.costs.weight_bytes + context * self.costs.kv_bytes).reading_ms

    def _floor(self, operations: float, read: float) -> Floor:
        return Floor(operations / self.product.a_second * 1e3, read / self.read.a_second * 1e3)


def causal(rows: int) -> float:
    """Tokens of its own pass that a row sees on average, itself included."""
    return (rows + 1) / 2
