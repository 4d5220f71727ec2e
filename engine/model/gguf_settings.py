"""What a GGUF file's fields say of a model's passes, as config.json says it.

transformers skips some of them without a word and takes its defaults, which are those of one released size.
A field that is not in `READ` is refused by name.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

Field = Callable[[str], Any]
Tables = Mapping[str, torch.Tensor]

_COMMON = frozenset(
    (
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
        *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned"),
        *("rope.scaling.original_context_length", "tensor_data_layout"),
    )
)
_GEMMA = _COMMON | {"attention.sliding_window", "attention.sliding_window_pattern", "final_logit_softcapping"}
_PHI3 = {"attention.sliding_window", "rope.scaling.attn_factor"}
READ = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _COMMON),
    "gemma2": _GEMMA | {"attn_logit_softcapping"},
    "gemma3": _GEMMA | {"rope.freq_base_swa"},
    "phi3": _COMMON | _PHI3,
}
"""Architectures, with the fields that are read."""
_FACTORS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = frozenset({_FACTORS, _LONG, _SHORT})
"""Tensors that are no weights: what frequencies are divided by."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_PERIODS = {"gemma2": 2, "gemma3": 6}
"""Layers from one without a window to the next."""
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}
"""Gemma of 27 billion weights, by number of layers: as llama.cpp, no field says how it scales scores."""


def settings_of(architecture: str, names: Iterable[str], field: Field, tables: Tables) -> dict[str, Any]:
    """Members of config.json for a file of one of `READ`; ``names``: of all its fields, of the architecture.

    ``field``: the value of one, or None; ``tables``: those of `TABLES` that the file has. Raises ValueError
    for what would be lost, in words that go on from the file's name.
    """
    for name in names:
        value = field(name)
        if name not in READ[architecture] and (value != 0 or value is False):
            raise ValueError(f"says {architecture}.{name} = {value!r}")
    head = field("attention.key_length") or field("embedding_length") // field("attention.head_count")
    if field("attention.value_length") not in (None, head):
        raise ValueError("has values of another length than keys")
    if field("rope.dimension_count") not in (None, head) and architecture != "phi3":
        raise ValueError("rotates a part of each head")
    found = {"head_dim": head, "rope_parameters": _rope(architecture, field, tables, head)}
    if architecture in _PERIODS:
        found |= _gemma(architecture, field, head)
    if architecture == "phi3":
        found |= {"sliding_window": field("attention.sliding_window") or None}
        if original := field("rope.scaling.original_context_length"):
            found["original_max_position_embeddings"] = original
    return found


def _gemma(architecture: str, field: Field, head: int) -> dict[str, Any]:
    layers, width = field("block_count"), field("embedding_length") // field("attention.head_count")
    found = {"query_pre_attn_scalar": width if (architecture, layers) in _SCALED_BY_WIDTH else head}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := field(name)) is not None:
            found[name] = cap or None
    slides = field("attention.sliding_window_pattern") or _PERIODS[architecture]
    if architecture == "gemma3" and not field("attention.sliding_window"):
        slides = 1
    if not isinstance(slides, list):
        slides = [(layer + 1) % slides for layer in range(layers)]
    found["layer_types"] = ["sliding_attention" if each else "full_attention" for each in slides]
    return found


def _rope(architecture: str, field: Field, tables: Tables, head: int) -> dict[str, Any]:
    theta = float(field("rope.freq_base") or (1_000_000 if architecture == "gemma3" else 10_000))
    rope = {"rope_type": "default", "rope_theta": theta}
    if architecture == "phi3":
        rope |= _phi3(field, tables, head)
    elif (scaling := _scaling(field, tables, head, theta)) is not None:
        rope |= scaling
    else:
        raise ValueError("scales its rope in another way than Llama 3 or by one factor")
    if architecture != "gemma3":
        return rope
    sliding = {"rope_type": "default", "rope_theta": float(field("rope.freq_base_swa") or 10_000)}
    return {"full_attention": rope, "sliding_attention": sliding}


def _phi3(field: Field, tables: Tables, head: int) -> dict[str, Any]:
    found: dict[str, Any] = {"partial_rotary_factor": (field("rope.dimension_count") or head) / head}
    if not tables and field("rope.scaling.type") in (None, "none"):
        return found
    if set(tables) != {_LONG, _SHORT}:
        raise ValueError("scales its rope in another way than LongRoPE")
    found |= {
        "rope_type": "longrope",
        "long_factor": tables[_LONG].tolist(),
        "short_factor": tables[_SHORT].tolist(),
    }
    if factor := field("rope.scaling.attn_factor"):
        found["attention_factor"] = factor
    return found


def _scaling(field: Field, tables: Tables, head: int, theta: float) -> dict[str, Any] | None:
    """How the rope is scaled, as config.json says it; {} for not at all, None for in an unknown way."""
    kind = field("rope.scaling.type")
    if kind in (None, "none") and not tables:
        return {}
    if kind in (None, "none") and list(tables) == [_FACTORS]:
        return llama3_scaling(tables[_FACTORS], theta, head) or None
    factor = field("rope.scaling.factor")
    return (
        {"rope_type": "linear", "factor": float(factor)}
        if kind == "linear" and factor and not tables
        else None
    )


def llama3_scaling(factors: torch.Tensor, theta: float, head: int) -> dict[str, Any]:
    """The scaling of Llama 3.1 and later that divides frequencies by these ``factors``; {} where none does.

    A file has only the factors, [head / 2]. Those of the published models follow from the largest one.
    """
    if factors.numel() != head // 2:
        return {}
    frequencies = theta ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
    turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # none of a slow rotation, all of a fast one
    factor = float(factors.max())
    expected = 1 / (kept + (1 - kept) / factor)
    if factor <= 1 or not torch.allclose(factors.double(), expected, rtol=1e-4, atol=0):
        return {}
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
