"""Lower bounds of a pass on this machine: its arithmetic, or reading the data it needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from bench.figures import Figure, Setting, rate
from bench.run import SuiteRun, timed
from engine.model.loading import LoadedModel

_LOOKS = 5
_FLOAT = 4


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
    unread_flops: int
    """Part of `linear_flops`: the last layer's but keys and values; only sampled tokens need it."""
    unread_attention_flops: int
    """Part of `attention_flops`: the last layer's."""

    @classmethod
    def of(cls, loaded: LoadedModel) -> PassCosts:
        """Count them from the model."""
        model, size = loaded.model, loaded.dtype.itemsize
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
        last = model.get_decoder().layers[-1]
        linear = _parameters(model, lambda name, module: module is not head)
        unread = _parameters(last, lambda name, _: not re.search(r"[kv]_proj", name))
        heads = model.config.num_attention_heads
        attention = [2 * heads * (layer.key_dim + layer.value_dim) for layer in loaded.layers]
        return cls(
            size * (sum(parameter.numel() for parameter in model.parameters()) - embedding.numel()),
            size * linear,
            2 * linear,
            size * sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in loaded.layers),
            sum(attention),
            2 * unread,
            attention[-1],
        )


def _parameters(model: nn.Module, counts: Callable[[str, nn.Module], bool]) -> int:
    modules = model.named_modules()
    return sum(m.weight.numel() for name, m in modules if isinstance(m, nn.Linear) and counts(name, m))


class Floor(NamedTuple):
    """Milliseconds of one pass."""

    arithmetic_ms: float
    reading_ms: float

    @property
    def ms(self) -> float:
        """The larger of the two."""
        return max(self.arithmetic_ms, self.reading_ms)


class Floors(NamedTuple):
    """Of one model, at ``gemm`` operations and ``copy`` bytes (read and written) a second."""

    costs: PassCosts
    gemm: float
    copy: float

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

    def unsampled_ms(self, rows: int, context: int) -> float:
        """Arithmetic for ``rows`` new tokens behind ``context`` tokens, none of them sampled."""
        costs = self.costs
        attention = costs.attention_flops - costs.unread_attention_flops
        a_row = costs.linear_flops - costs.unread_flops + attention * (context + causal(rows))
        return self._floor(rows * a_row, 0).arithmetic_ms

    def _floor(self, operations: float, read: float) -> Floor:
        return Floor(operations / self.gemm * 1e3, read / self.copy * 1e3)


def causal(rows: int) -> float:
    """Tokens of its own pass that a row sees on average, itself included."""
    return (rows + 1) / 2


class LimitsProbe:
    """The device's own rates: one large product, and one large copy.

    ``side``: of the square matrices, of ``dtype``; ``copied``: bytes of one copy.
    """

    def __init__(
        self, side: int = 2048, copied: int = 1 << 28, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        a, b, product = torch.randn(3, side, side, device=device, dtype=dtype)
        source, target = torch.ones(2, copied // _FLOAT, device=device)
        self._rates = {  # operations, and bytes read and written, in units of 1e9
            ("large matrix product", "GFLOP/s"): (2 * side**3 / 1e9, partial(torch.mm, a, b, out=product)),
            ("large copy, read and written", "GB/s"): (2 * copied / 1e9, partial(target.copy_, source)),
        }
        self._seconds: dict[tuple[str, str], list[float]] = {name: [] for name in self._rates}
        for _, work in self._rates.values():  # includes one-time set-up
            work()

    @classmethod
    def of(cls, run: SuiteRun) -> LimitsProbe:
        """Of the CPU, with the run's threads."""
        torch.set_num_threads(run.threads)
        return cls(256, 1 << 20) if run.quick else cls()

    @torch.inference_mode()
    def look(self) -> None:
        """Measure again: before and after the measurements, so that a change of speed shows."""
        for _ in range(_LOOKS):
            for name, (_, work) in self._rates.items():
                self._seconds[name].append(seconds(work))

    def figures(self, setting: Setting | None = None) -> list[Figure]:
        """Product and copy, over all looks."""
        table = "The machine's own rates in this part"
        return [
            rate(name, self._rates[name, unit][0], took, unit, table, setting=setting or {})
            for (name, unit), took in self._seconds.items()
        ]

    def floors(self, loaded: LoadedModel, of: Callable[[list[float]], float] = median) -> Floors:
        """The floors at the medians of all looks, or at another statistic ``of`` them."""
        gemm, copy = (1e9 * of(figure.samples) for figure in self.figures())
        return Floors(PassCosts.of(loaded), gemm, copy)


def seconds(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes; the device's queue is drained before and after."""

    def drained() -> None:
        work()
        _drain()

    _drain()
    return timed(drained)[1] / 1e9


def _drain() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
