"""Weights for llama.cpp: names, values, and pairs of rows as it rotates them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from bench.peers.convert import Floats, adjacent, tensors

_HEAD = 16
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"} | {
    f"blk.{i}.{ours}": f"model.layers.{i}.{theirs}"
    for i in range(2)
    for ours, theirs in {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }.items()
}


def saved(directory: Path, **changes: Any) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """A small Llama whose norms differ from one, and its configuration as saved."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=_HEAD, **changes,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    return model, json.loads((directory / "config.json").read_text())


def rotated(vector: Floats, position: int, base: float) -> Floats:
    """llama.cpp's rotary embedding of one head: pair ``i`` are the elements ``2 i`` and ``2 i + 1``."""
    angles = position * base ** (-np.arange(0, _HEAD, 2) / _HEAD)
    turned = (vector[0::2] + 1j * vector[1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=1).reshape(-1)


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_comes_once(tmp_path: Path, tied: bool) -> None:
    """Queries and keys with adjacent pairs, all others as they are; tied embeddings are no output."""
    model, config = saved(tmp_path, tie_word_embeddings=tied)
    found = dict(tensors(tmp_path, config))
    assert ("output.weight" in found) == (not tied)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    for ours, values in found.items():
        theirs = NAMES[ours.removesuffix(".weight")]
        expected = state.pop(f"{theirs}.weight")
        if theirs.endswith(("q_proj", "k_proj")):
            expected = adjacent(expected, _HEAD)
        np.testing.assert_array_equal(values, expected, err_msg=f"{theirs} as {ours}")
    assert not state


def test_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    model, config = saved(tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    found = dict(tensors(tmp_path, config))
    expected = model.state_dict()["model.layers.1.mlp.up_proj.weight"].float().numpy()
    np.testing.assert_array_equal(found["blk.1.ffn_up.weight"], expected)


def test_another_type_is_refused(tmp_path: Path) -> None:
    model, config = saved(tmp_path)
    model.to(torch.float16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="F16, neither"):
        dict(tensors(tmp_path, config))


@torch.no_grad()
def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    """Queries times keys, each at its position, by transformers' rotation and by llama.cpp's."""
    model, config = saved(tmp_path, rope_theta=500.0)
    found, attention = dict(tensors(tmp_path, config)), model.model.layers[0].self_attn
    hidden, positions = torch.randn(1, 5, 48), torch.tensor([[0, 1, 7, 60, 400]])
    queries = attention.q_proj(hidden).view(1, 5, 4, _HEAD).transpose(1, 2)
    keys = attention.k_proj(hidden).view(1, 5, 2, _HEAD).transpose(1, 2)
    angles = LlamaRotaryEmbedding(model.config)(hidden, positions)
    queries, keys = apply_rotary_pos_emb(queries, keys, *angles)
    expected = queries @ keys.repeat_interleave(2, dim=1).transpose(2, 3)
    base = config["rope_parameters"]["rope_theta"]
    assert base == 500.0

    def heads(name: str) -> Floats:
        rows = (hidden[0].numpy() @ found[f"blk.0.{name}.weight"].T).reshape(5, -1, _HEAD)
        at = positions[0].tolist()
        return np.array([[rotated(head, p, base) for head in row] for row, p in zip(rows, at, strict=True)])

    ours = np.einsum("qhd,khd->hqk", heads("attn_q"), np.repeat(heads("attn_k"), 2, axis=1))
    np.testing.assert_allclose(ours, expected[0].numpy(), rtol=1e-4, atol=1e-4)


def test_other_models_are_refused(tmp_path: Path) -> None:
    _, config = saved(tmp_path)
    scaled = {"rope_type": "llama3", "rope_theta": 1e4}
    for changed in (config | {"model_type": "gemma3"}, config | {"rope_parameters": scaled}):
        with pytest.raises(ValueError, match="plain rotary embedding"):
            next(tensors(tmp_path, changed))
    save_file({"model.layers.0.self_attn.q_proj.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"q_proj\.bias"):
        list(tensors(tmp_path, config))
