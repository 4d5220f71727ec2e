"""Plain decoders: Llama and its relatives, whose layers Foretick can run itself.

They differ in little: biases, norms of queries and keys. Any other architecture runs as transformers' code.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

PLAIN = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Architectures whose layers are: norm, attention with rotated halves, norm, SwiGLU."""


def is_plain(model: Any) -> bool:
    """Return whether a transformers model is a plain decoder with weights as they were saved."""
    config = model.config
    plain = config.model_type in PLAIN and getattr(config, "sliding_window", None) is None
    if not plain or config.hidden_act != "silu":
        return False
    # quantised linears have a class of their own, and sharded ones such weights
    return all(type(each) is nn.Linear and type(each.weight.data) is torch.Tensor for each in linears(model))


def linears(model: Any) -> Iterator[Any]:
    """The modules that hold the matrices."""
    yield model.lm_head
    for layer in model.model.layers:
        yield from linears_of(layer)


def linears_of(layer: Any) -> Iterator[Any]:
    """Those of one of transformers' layers."""
    attention, mlp = layer.self_attn, layer.mlp
    yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
