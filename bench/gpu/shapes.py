"""Models and sizes that `foretick bench gpu` measures, with their floors: bytes to read, arithmetic to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.model.loading import LoadedModel, prepare

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 1 << 18,  # the curves reach 128k tokens and answers behind them
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Plan:
    """What one run measures. Tokens everywhere; ``repeats``: of a question, ``answer``: tokens decoded.

    ``eager_repeats``: of a question while passes are not captured, for comparison: it takes longest.
    """

    name: str
    shape: dict[str, Any]
    context: int = 15_000
    update: int = 990
    question: int = 40
    answer: int = 64
    repeats: int = 100
    eager_repeats: int = 15
    standing: int = 25
    curve: Sequence[int] = field(default=tuple(1024 << i for i in range(8)))
    attention_rows: Sequence[int] = (1, 40)
    chunk: int = 2048
    copy_bytes: int = 2 << 30
    matrix: int = 8192

    @property
    def pool_tokens(self) -> int:
        """KV that is alive at once, at most."""
        tape = self.context + self.update + self.standing * (self.question + 16) + self.answer
        return max(tape, max(self.curve)) + 1024


FULL = Plan("Llama-3.1-8B shape, random weights", LLAMA_8B)
QUICK = Plan(
    "tiny",
    TINY,
    context=300,
    update=40,
    question=8,
    answer=4,
    repeats=3,
    standing=5,
    curve=(64, 128, 256),
    chunk=128,
    copy_bytes=1 << 20,
    matrix=128,
)


def random_model(shape: dict[str, Any], device: str) -> LoadedModel:
    """A Llama of ``shape`` with random weights, made where they are used: bf16 on a GPU, fp32 elsewhere."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**shape), attn_implementation="eager", dtype=dtype
        )
    return prepare(model, None, name="random")


@dataclass(frozen=True)
class Costs:
    """What a pass over a model must at least read and compute."""

    weight_bytes: int
    """Every weight but the input embedding, of which a pass reads a row a token."""
    matrix_flops: int
    """Of one token, attention and the output layer left out."""
    head_flops: int
    """The output layer's, for one sampled row."""
    kv_bytes: int
    """Of one token, all layers."""
    attention_flops: int
    """Of one query token meeting one key, all layers."""
    unread_flops: int
    """Of `matrix_flops`: the last layer's but keys and values, of no use for a token that chooses none."""
    unread_attention_flops: int
    """Of `attention_flops`: the last layer's."""

    @classmethod
    def of(cls, loaded: LoadedModel) -> Costs:
        """Counted from the model itself."""
        model, config = loaded.model, loaded.model.config
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        all_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
        element = embedding.element_size()
        heads = config.num_attention_heads
        last = model.get_decoder().layers[-1].named_parameters()
        unread = sum(p.numel() for name, p in last if p.dim() == 2 and not re.search(r"[kv]_proj", name))
        attention = [2 * heads * (layer.key_dim + layer.value_dim) for layer in loaded.layers]
        return cls(
            all_bytes - embedding.numel() * element,
            2 * (matrices - embedding.numel() - head.numel()),
            2 * head.numel(),
            sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in loaded.layers) * element,
            sum(attention),
            2 * unread,
            attention[-1],
        )

    def memory_floor_s(self, context: int, bytes_per_s: float) -> float:
        """Seconds to read weights and the KV of ``context`` tokens once."""
        return (self.weight_bytes + context * self.kv_bytes) / bytes_per_s

    def matrix_floor_s(self, rows: int, context: int, flops_per_s: float) -> float:
        """Seconds of arithmetic for ``rows`` new tokens behind ``context`` tokens, none of them sampled."""
        keys = context + (rows + 1) / 2
        matrices = self.matrix_flops - self.unread_flops
        attention = self.attention_flops - self.unread_attention_flops
        return rows * (matrices + keys * attention) / flops_per_s
