"""Runs a plain decoder on a GPU: four matrix products a layer, and few kernels between them.

As nano-vllm and vLLM do, products that read the same input are joined (queries, keys and values; gate and
up), and what lies between two products is one Triton kernel. transformers' modules keep their weights as
views of the joined ones, so that the unmodified model still runs as the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from engine.attention.base import LayerCall
from engine.attention.triton import early
from engine.fused.kernels import add_norm, rotate_and_write, swiglu
from engine.graphs.static import round_up

_MIXED = 1024
"""Columns of one program of `swiglu`."""


class Product(NamedTuple):
    """A matrix [outputs, inputs], perhaps of several joined ones, and its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def joined(cls, linears: Sequence[Any]) -> Product:
        """Of linear layers of one input, whose weights become views of it; all have a bias or none has."""
        weight = torch.cat([each.weight.data for each in linears])
        sizes = [each.weight.shape[0] for each in linears]
        for each, part in zip(linears, torch.split(weight, sizes), strict=True):
            each.weight = nn.Parameter(part, requires_grad=False)
        biases = [each.bias.data for each in linears if each.bias is not None]
        return cls(weight, torch.cat(biases) if biases else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, outputs] of ``x`` [rows, inputs]."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Layer:
    """One layer's weights; ``query_norm``, ``key_norm``: of each head, None where there are none."""

    norm: torch.Tensor
    joint: Product
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: Product
    second_norm: torch.Tensor
    gates: Product
    down: Product

    @classmethod
    def of(cls, layer: Any) -> Layer:
        """Of one of transformers' layers."""
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        return cls(
            layer.input_layernorm.weight,
            Product.joined((attention.q_proj, attention.k_proj, attention.v_proj)),
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            Product(attention.o_proj.weight, attention.o_proj.bias),
            layer.post_attention_layernorm.weight,
            Product.joined((mlp.gate_proj, mlp.up_proj)),
            Product(mlp.down_proj.weight, mlp.down_proj.bias),
        )


@dataclass(frozen=True)
class FusedDecoder:
    """A whole model; ``norms``: the first of each layer, and the last one. Shapes as of one layer."""

    embedding: torch.Tensor
    rotary: Any
    layers: tuple[Layer, ...]
    norms: tuple[torch.Tensor, ...]
    head: Product
    heads: int
    kv_heads: int
    dim: int
    scale: float
    epsilon: float

    described = "fused layers"
    in_float32 = False

    @classmethod
    def of(cls, model: Any) -> FusedDecoder:
        """Of a transformers model that `engine.model.plain.is_plain` knows."""
        inner, attention = model.model, model.model.layers[0].self_attn
        layers = tuple(map(Layer.of, inner.layers))
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # of the matrices that were joined: pools are sized by what is free
        return cls(
            embedding=inner.embed_tokens.weight,
            rotary=inner.rotary_emb,
            layers=layers,
            norms=(*(layer.norm for layer in layers), inner.norm.weight),
            head=Product(model.lm_head.weight, model.lm_head.bias),
            heads=attention.q_proj.weight.shape[0] // attention.head_dim,
            kv_heads=attention.k_proj.weight.shape[0] // attention.head_dim,
            dim=attention.head_dim,
            scale=float(attention.scaling),
            epsilon=float(inner.norm.variance_epsilon),
        )

    @torch.inference_mode()
    def forward(
        self, context: Any, tokens: torch.Tensor, keep: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """As `LoadedModel.forward`."""
        states = functional.embedding(tokens, self.embedding)
        cos, sin = self._angles(positions)
        slots = context.slots
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=tokens.device)
        normed = self._normed(states, None, self.norms[0])
        for number, layer in enumerate(self.layers):
            joint = layer.joint(normed)
            self._rotate_and_write(layer, joint, cos, sin, slots, context.pool, number)
            call = self._call(joint, context, number)
            if context.last is not None and number == len(self.layers) - 1:
                if not context.last.rows:
                    return states.new_empty(0, 0)
                call, states = context.last.reduced(call, keep), states[keep]
            attended = context.attention(call).transpose(0, 1).reshape(len(states), -1)
            normed = self._normed(states, layer.out(attended), layer.second_norm)
            normed = self._normed(states, layer.down(_mixed(layer.gates(normed))), self.norms[number + 1])
        return self.head(normed if context.last is not None else normed[keep]).float()

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, fp32 [rows, dim / 2], as the model's own module has them."""
        cos, sin = self.rotary(torch.empty(0, device=positions.device), positions[None])
        return cos[0, :, : self.dim // 2].contiguous(), sin[0, :, : self.dim // 2].contiguous()

    def _normed(self, states: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """The norm of ``states`` [rows, width], to which ``added`` is added first."""
        rows, width = states.shape
        normed = torch.empty_like(states)
        add_norm[(rows,)](
            states, states if added is None else added, weight, normed, self.epsilon,
            WIDTH=width, PADDED=round_up(width), ADDS=added is not None,
            **early(states.device), num_warps=8 if width > 1024 else 4,
        )  # fmt: skip
        return normed

    def _rotate_and_write(
        self,
        layer: Layer,
        joint: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        pool: Any,
        number: int,
    ) -> None:
        keys, values = pool.keys[number], pool.values[number]
        groups, half = self.heads // self.kv_heads, self.dim // 2
        norms = layer.query_norm is not None
        rotate_and_write[(len(joint), self.kv_heads)](
            joint, cos, sin, layer.query_norm if norms else cos, layer.key_norm if norms else cos, slots,
            keys, values, self.epsilon, *keys.stride()[:2], *values.stride()[:2],
            KV_HEADS=self.kv_heads, GROUPS=groups, HALF=half, HEADS_PADDED=round_up(groups + 1),
            HALF_PADDED=round_up(half), NORMS=norms, **early(joint.device), num_warps=2,
        )  # fmt: skip

    def _call(self, joint: torch.Tensor, context: Any, number: int) -> LayerCall:
        """Attention of a layer over the heads of ``joint``."""
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        query, key, value = torch.split(joint.view(len(joint), -1, self.dim).transpose(0, 1), sizes)
        keys, values = context.pool.keys[number], context.pool.values[number]
        rotation = context.rotations[number]
        return LayerCall(query, key, value, keys, values, self.scale, None, None, context.metadata, rotation)


def _mixed(joint: torch.Tensor) -> torch.Tensor:
    """[rows, inner] of gate and up, [rows, 2 * inner]."""
    rows, inner = joint.shape[0], joint.shape[1] // 2
    mixed = joint.new_empty(rows, inner)
    swiglu[(rows, -(-inner // _MIXED))](
        joint, mixed, INNER=inner, BLOCK=_MIXED, **early(joint.device), num_warps=4
    )
    return mixed
