"""The tape model in training: the mathematics of `LlamaForCausalLM` over packed batches, and its optimiser.

The forward differs from the dense one in two ways, both of the daemon: a token sees the last bars only, and
the prefix is at the positions right before what the token sees (`regions`: the query is rotated once more for
the prefix; keys are never rewritten).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tapes.rules import RULES
from training.batches import AUXILIARIES, BAR_TOKENS, Batch
from training.tokenizer import QUESTIONS, VOCABULARY

HEADS = ("margin", "measures", "asked", "listed")
"""Parameters that training alone uses."""
MEASURES = len(RULES) + AUXILIARIES
_BLOCK = 192
"""Rows of the tape whose attention is computed at a time, against the keys that they can see."""


@dataclass(frozen=True)
class Shape:
    """The model's size."""

    hidden: int = 160
    layers: int = 6
    heads: int = 5
    inner: int = 416
    theta: float = 10_000.0

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def measured(self) -> int:
        """Layers whose output training measures: the second half but the last."""
        return self.layers - self.layers // 2


class Layer(nn.Module):
    """One decoder layer; parameter names are transformers'."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        super().__init__()
        h, i = shape.hidden, shape.inner

        def weight(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=generator) * scale / columns**0.5)

        self.input_layernorm, self.post_attention_layernorm = (nn.Parameter(torch.ones(h)) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj = weight(h, h), weight(h, h), weight(h, h)
        self.o_proj = weight(h, h, 0.3)
        self.gate_proj, self.up_proj = weight(i, h), weight(i, h)
        self.down_proj = weight(h, i, 0.3)


class Outputs(NamedTuple):
    """What a forward pass returns; all but the logits serve training alone."""

    logits: Tensor
    """[tapes, queries, vocabulary]"""
    margin: Tensor
    """[tapes, queries]: compressed distances to the boundary"""
    measures: Tensor
    """[layers measured, tapes, bars, measures], read off each bar's last token"""
    asked: Tensor
    """[layers, tapes, queries, questions]: which question a row asks, behind layers from the second on"""
    listed: Tensor
    """[tapes, listed, numbers]: the number of each question in the prefix, behind the first layer"""
    pointing: Tensor
    """[tapes, queries]: log weight of the listed question in the second layer's first head; else empty"""


class TapeModel(nn.Module):
    """A Llama with tied embeddings, and heads that training alone uses."""

    inverse: Tensor
    """Angular frequencies of RoPE."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        self.embed_tokens = nn.Parameter(
            torch.randn(VOCABULARY, shape.hidden, generator=generator) / shape.hidden**0.5
        )
        self.layers = nn.ModuleList(Layer(shape, generator) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.margin = nn.Parameter(torch.zeros(len(QUESTIONS), shape.hidden))
        self.measures = nn.Parameter(torch.zeros(shape.measured, MEASURES, shape.hidden))
        self.asked = nn.Parameter(torch.zeros(max(shape.layers - 2, 1), len(QUESTIONS), shape.hidden))
        self.listed = nn.Parameter(torch.zeros(len(QUESTIONS), shape.hidden))
        inverse = 1.0 / shape.theta ** (torch.arange(0, shape.head, 2).float() / shape.head)
        self.register_buffer("inverse", inverse, persistent=False)
        self.dtype = torch.bfloat16

    def forward(self, batch: Batch) -> Outputs:
        """Logits, and what training's own heads read."""
        rows = torch.from_numpy(batch.queries.rows)
        x = functional.embedding(torch.from_numpy(batch.ids), self.embed_tokens)
        stream, local = (self._angles(positions) for positions in (batch.stream, batch.local))
        tape = _masks(batch, self.dtype)
        measured: list[Tensor] = []
        asked: list[Tensor] = []
        pointing = x.new_empty(0)
        for number, layer in enumerate(self.layers[:-1]):
            if number == 1 and len(batch.listed):
                pointing = self._pointing(layer, x, stream, local, rows, batch)
            x = self._layer(layer, x, stream, local, tape, batch)
            if number == 0:
                listed = norm(x[:, torch.from_numpy(batch.listed)], 1.0)
            asked.append(x[:, rows])
            measured.append(x[:, batch.prefix + BAR_TOKENS - 1 : batch.prefix + batch.tape : BAR_TOKENS])
        ends = norm(torch.stack(measured[-self.shape.measured :]), 1.0)
        questions = norm(torch.stack(asked[-len(self.asked) :]), 1.0)
        x = self._last(self.layers[-1], x, stream, local, rows, batch)
        x = norm(x, self.norm)
        logits = functional.linear(x.to(self.dtype), self.embed_tokens.to(self.dtype)).float()
        return Outputs(
            logits,
            (x * self.margin[torch.from_numpy(np.minimum(batch.queries.kind, len(QUESTIONS) - 1))]).sum(-1),
            ends @ self.measures[:, None].transpose(-1, -2),
            questions @ self.asked[:, None].transpose(-1, -2),
            listed @ self.listed.T,
            pointing,
        )

    @torch.no_grad()
    def memory(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Keys, rotated by their stream positions, and values of each layer, [tapes, heads, tokens, head].

        Of the prefix and the tape; they depend on no question.
        """
        x = functional.embedding(torch.from_numpy(batch.ids), self.embed_tokens)
        stream, local = (self._angles(positions) for positions in (batch.stream, batch.local))
        blocks, tokens, found = _masks(batch, self.dtype), batch.prefix + batch.tape, []
        layers: list[Any] = list(self.layers)
        for number, layer in enumerate(layers):
            h = norm(x, layer.input_layernorm).to(self.dtype)
            k, v = self._heads(functional.linear(h, self._cast(layer.k_proj, layer.v_proj))).chunk(2, 1)
            found.append((rotate(k, stream)[:, :, :tokens], v[:, :, :tokens]))
            if number < len(self.layers) - 1:
                x = self._layer(layer, x, stream, local, blocks, batch)
        return found

    def _angles(self, positions: Any) -> tuple[Tensor, Tensor]:
        angles = torch.from_numpy(positions).float()[:, None] * self.inverse
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.shape.head).transpose(1, 2)

    def _cast(self, *weights: Tensor) -> Tensor:
        return torch.cat(weights).to(self.dtype)

    def _layer(
        self, layer: Any, x: Tensor, stream: Any, local: Any, blocks: list[_Block], batch: Batch
    ) -> Tensor:
        h = norm(x, layer.input_layernorm).to(self.dtype)
        qkv = self._heads(functional.linear(h, self._cast(layer.q_proj, layer.k_proj, layer.v_proj)))
        q, k, v = qkv.chunk(3, 1)
        keys = _two_ways(rotate(k, stream), batch.prefix)
        queries = torch.cat((rotate(q, stream), rotate(q, local)), -1)
        attended = [_attend(queries[:, :, block.first : block.last], keys, v, block) for block in blocks]
        return self._mix(layer, x, torch.cat(attended, 2))

    def _last(self, layer: Any, x: Tensor, stream: Any, local: Any, rows: Tensor, batch: Batch) -> Tensor:
        h = norm(x, layer.input_layernorm).to(self.dtype)
        kv = self._heads(functional.linear(h, self._cast(layer.k_proj, layer.v_proj)))
        k, v = kv.chunk(2, 1)
        q = self._heads(functional.linear(h[:, rows], self._cast(layer.q_proj)))
        queries = torch.cat([rotate(q, (cosine[rows], sine[rows])) for cosine, sine in (stream, local)], -1)
        keys = _two_ways(rotate(k, stream), batch.prefix)
        everything = np.arange(len(batch.stream))
        block = _Block(
            0, len(rows), 0, 0, len(everything), _visible(batch, batch.queries.rows, everything, self.dtype)
        )
        return self._mix(layer, x[:, rows], _attend(queries, keys, v, block))

    def _pointing(self, layer: Any, x: Tensor, stream: Any, local: Any, rows: Tensor, batch: Batch) -> Tensor:
        """See `Outputs.pointing`."""
        h, head = norm(x, layer.input_layernorm).to(self.dtype), self.shape.head
        k = self._heads(functional.linear(h, self._cast(layer.k_proj[:head])))
        q = self._heads(functional.linear(h[:, rows], self._cast(layer.q_proj[:head])))
        queries = torch.cat([rotate(q, (cosine[rows], sine[rows])) for cosine, sine in (stream, local)], -1)
        keys = _two_ways(rotate(k, stream), batch.prefix)
        bias = _visible(batch, batch.queries.rows, np.arange(len(batch.stream)), self.dtype)
        weights = (queries @ keys.transpose(-1, -2) * head**-0.5 + bias).float().log_softmax(-1)
        number = np.arange(len(rows)) % len(batch.listed)
        found: Tensor = weights[:, 0, torch.arange(len(rows)), torch.from_numpy(batch.listed[number])]
        return found

    def _mix(self, layer: Any, x: Tensor, attended: Tensor) -> Tensor:
        attended = attended.transpose(1, 2).reshape(x.shape)
        x = x + functional.linear(attended, layer.o_proj.to(self.dtype))
        h = norm(x, layer.post_attention_layernorm).to(self.dtype)
        gate, up = functional.linear(h, self._cast(layer.gate_proj, layer.up_proj)).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, layer.down_proj.to(self.dtype))


@dataclass(frozen=True)
class _Block:
    """Rows [first, last) and the keys that they may see: the prefix and [begin, end) of the tape."""

    first: int
    last: int
    prefix: int
    begin: int
    end: int
    bias: Tensor
    """[rows, prefix + keys]: 0 where visible, else minus infinity."""


def _visible(batch: Batch, rows: Any, keys: Any, dtype: torch.dtype) -> Tensor:
    """The bias of ``rows`` [rows] over ``keys`` [keys]."""
    bar, branch = batch.bar, batch.branch
    causal = rows[:, None] >= keys[None, :]
    in_prefix = bar[keys][None, :] < 0
    in_window = (bar[rows][:, None] - bar[keys][None, :] < batch.window) & (bar[keys] >= 0)[None, :]
    on_tape = (branch[keys] < 0)[None, :]
    shown = bar[keys][None, :] <= bar[rows][:, None]
    same = (branch[rows][:, None] == branch[keys][None, :]) & ~on_tape
    allowed = causal & (in_prefix | (in_window & on_tape & shown) | same)
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~torch.from_numpy(allowed), float("-inf"))


def _masks(batch: Batch, dtype: torch.dtype) -> list[_Block]:
    """The prefix and the tape in blocks, then the query rows."""
    total, prefix, tape_end = len(batch.stream), batch.prefix, batch.prefix + batch.tape
    spans = [(0, prefix, prefix, prefix)]
    for first in range(prefix, tape_end, _BLOCK):
        last = min(first + _BLOCK, tape_end)
        oldest = (first - prefix) // BAR_TOKENS - batch.window + 1
        spans.append((first, last, prefix + max(oldest, 0) * BAR_TOKENS, last))
    oldest = int(batch.bar[tape_end:].min()) - batch.window + 1
    spans.append((tape_end, total, prefix + max(oldest, 0) * BAR_TOKENS, total))
    return [
        _Block(a, b, prefix, k, e, _visible(batch, np.arange(a, b), np.r_[0:prefix, k:e], dtype))
        for a, b, k, e in spans
    ]


def _two_ways(k: Tensor, prefix: int) -> Tensor:
    """Keys of twice the width: the tape's meet queries at stream positions, the prefix's at local ones."""
    zero = torch.zeros_like(k)
    frozen = torch.cat((zero[:, :, :prefix], k[:, :, :prefix]), -1)
    return torch.cat((frozen, torch.cat((k[:, :, prefix:], zero[:, :, prefix:]), -1)), 2)


def _attend(queries: Tensor, keys: Tensor, v: Tensor, block: _Block) -> Tensor:
    """Attention of a block's rows; one product for prefix and tape, the bias added by the same call."""
    prefix, begin, end = block.prefix, block.begin, block.end
    if begin > prefix:
        keys, v = (torch.cat((t[:, :, :prefix], t[:, :, begin:end]), 2) for t in (keys, v))
    else:
        keys, v = keys[:, :, :end], v[:, :, :end]
    shape = queries.shape
    q, k = queries.flatten(0, 1), keys.flatten(0, 1)
    scores = torch.baddbmm(block.bias, q, k.transpose(1, 2), alpha=(shape[-1] // 2) ** -0.5)
    return (torch.softmax(scores, -1) @ v.flatten(0, 1)).view(*shape[:-1], -1)


def norm(x: Tensor, weight: Tensor | float) -> Tensor:
    """RMS norm."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE: ``x`` rotated by these cosines and sines, halves paired."""
    cosine, sine = angles
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def initialise_numbers(model: TapeModel, numbers: Any, seed: int) -> None:
    """Start number tokens as points on a line and on circles of several periods.

    Without this a model of this size learns nothing of the levels' order in hours (a trial of 132 s of one
    core at 16 bars stayed at chance, 52 % against 62 %).
    """
    generator = torch.Generator().manual_seed(seed + 7)
    n = torch.arange(1000).float()
    x = (n - 500) / 500
    features = [x * 3, x * x * 2]
    for period in (4, 10, 20, 50, 100, 200, 500, 1000, 2000):
        features += [torch.sin(2 * math.pi * n / period), torch.cos(2 * math.pi * n / period)]
    stacked = torch.stack(features, 1)
    width = model.embed_tokens.shape[1]
    basis = torch.linalg.qr(torch.randn(width, stacked.shape[1], generator=generator))[0]
    points = stacked @ basis.T
    points = points / points.pow(2).sum(1).mean().sqrt()
    with torch.no_grad():
        rows = torch.from_numpy(numbers)
        model.embed_tokens[rows] = 0.95 * points + 0.2 * model.embed_tokens[rows]


class Optimiser:
    """Muon (Jordan et al., 2024) for the layers' matrices, AdamW for the rest."""

    def __init__(
        self, model: TapeModel, *, rate: float = 3e-3, muon_rate: float = 0.02, decay: float = 0.01
    ) -> None:
        named = dict(model.named_parameters())
        self._matrices = [p for name, p in named.items() if p.ndim == 2 and name.startswith("layers")]
        rest = [p for name, p in named.items() if not (p.ndim == 2 and name.startswith("layers"))]
        self._rate, self._muon_rate, self._decay = rate, muon_rate, decay
        self._momentum = [torch.zeros_like(p) for p in self._matrices]
        self._adam = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=decay, fused=True)

    def step(self, scale: float) -> None:
        """Apply the gradients with ``scale`` times the rates, and clear them."""
        for group in self._adam.param_groups:
            group["lr"] = self._rate * scale
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        rate = self._muon_rate * scale
        with torch.no_grad():
            for p, momentum in zip(self._matrices, self._momentum, strict=True):
                assert p.grad is not None  # every matrix takes part in every batch
                momentum.mul_(0.95).add_(p.grad)
                update = _orthogonal(p.grad + 0.95 * momentum)
                p.mul_(1 - rate * self._decay)
                p.add_(update, alpha=-rate * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
                p.grad = None

    def state(self) -> dict[str, Any]:
        """What resuming needs."""
        return {"momentum": self._momentum, "adam": self._adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for own, saved in zip(self._momentum, state["momentum"], strict=True):
            own.copy_(saved)
        self._adam.load_state_dict(state["adam"])


def _orthogonal(gradient: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix."""
    x = gradient / (gradient.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x).bfloat16()
    for _ in range(5):
        m = x @ x.T
        x = 3.4445 * x + (-4.775 * m + 2.0315 * (m @ m)) @ x
    near: Tensor = (x.T if tall else x).float()
    return near


def transformers_model(model: TapeModel, **extra: Any) -> Any:
    """The same weights as transformers' `LlamaForCausalLM`; ``extra`` goes to its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = model.shape
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
        max_position_embeddings=32768, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_theta=shape.theta,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **extra,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).eval()
    plain.load_state_dict(dict(_renamed(model)))
    return plain


def _renamed(model: TapeModel) -> Iterator[tuple[str, Tensor]]:
    yield "model.embed_tokens.weight", model.embed_tokens.detach()
    yield "lm_head.weight", model.embed_tokens.detach()
    yield "model.norm.weight", model.norm.detach()
    for i, layer in enumerate(model.layers):
        for name, parameter in layer.named_parameters():
            if name.endswith("layernorm"):
                room = ""
            else:
                room = "mlp." if name.split("_")[0] in ("gate", "up", "down") else "self_attn."
            yield f"model.layers.{i}.{room}{name}.weight", parameter.detach()
