"""Models as llama.cpp's convert_hf_to_gguf.py writes them: names, permutations, shifted norms and fields."""

import math
from pathlib import Path
from typing import Any

import numpy as np


def name_of(architecture: str) -> str:
    """What a file calls transformers' ``architecture``."""
    return {"gemma3_text": "gemma3", "mistral": "llama"}.get(architecture, architecture)


def write_fields(writer: Any, fields: dict[str, Any]) -> None:
    """Each in the type of its value; None is left out."""
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
            getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def fields_of(config: Any) -> dict[str, Any]:
    """What a file says of ``config``, by name behind the architecture's."""
    kind, rope = config.model_type, config.rope_parameters
    head, window = getattr(config, "head_dim", None), getattr(config, "sliding_window", None)
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": sliding.get("rope_theta"),
    }
    if full["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": full["factor"]}
    if kind in ("llama", "mistral"):
        found |= {"vocab_size": config.vocab_size, "rope.dimension_count": head}
    elif kind == "gemma2":
        caps = {"attn_logit_softcapping": config.attn_logit_softcapping}
        found |= caps | {"attention.sliding_window": window, "rope.freq_base": None}
    elif kind == "gemma3_text":
        found |= {"attention.sliding_window": window}
    elif kind == "phi3":
        rotary = int(full["partial_rotary_factor"] * config.hidden_size) // config.num_attention_heads
        found |= {"rope.dimension_count": rotary, "attention.sliding_window": window or 0}
        original, longest = config.original_max_position_embeddings, config.max_position_embeddings
        found |= {"rope.scaling.original_context_length": original}
        if full["rope_type"] == "longrope":
            scale = math.sqrt(1 + math.log(longest / original) / math.log(original))
            found |= {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": scale}
    if cap := getattr(config, "final_logit_softcapping", None):
        found["final_logit_softcapping"] = cap
    return {key: value for key, value in found.items() if value is not None}


def write_model(file: Path, model: Any, tokenizer: dict[str, Any], kind: str = "F32", **more: Any) -> None:
    """``tokenizer``: its fields; ``kind``: of matrices; ``more``: fields behind the architecture's name."""
    import gguf

    config = model.config
    architecture = name_of(config.model_type)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, architecture)
    fields = fields_of(config) | {key.replace("__", "."): value for key, value in more.items()}
    write_fields(writer, {f"{architecture}.{key}": value for key, value in fields.items()})
    write_fields(writer, {f"tokenizer.{key}": value for key, value in tokenizer.items()})
    for name in ("long", "short"):
        if factors := config.rope_parameters.get(f"{name}_factor"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(factors, np.float32))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = values.reshape(-1, 2, config.head_dim // 2, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        stored = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(mapped, gguf.quantize(np.array(values), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
