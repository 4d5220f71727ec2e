"""A model without its weights: its tokenizer, and what its KV and weights take."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from engine.model.architectures import ModelError, check_known
from engine.model.kv_type import KVType, kv_dtype
from regions.kv_tensors import KVPool, LayerShape

_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Outline:
    """``token_bytes``: KV of a token. ``weight_bytes``: of the files. ``described``: see `LoadedModel`."""

    name: str
    tokenizer: Any
    described: Mapping[str, Any]
    token_bytes: int
    weight_bytes: int
    max_positions: int


def outline_of(path: Path, dtype: str = "auto", kv: KVType = "auto") -> Outline:
    """The outline of the model in directory ``path``; ``dtype`` as of `load_model`.

    Raises ModelError when the directory or its architecture cannot be served.
    """
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model directory: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        check_known(config)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    kept: torch.dtype = getattr(text, "dtype", None) or torch.float32
    files = next((found for kind in _WEIGHTS if (found := list(path.glob(kind)))), [])
    weights = sum(file.stat().st_size for file in files)
    served: torch.dtype = kept if dtype == "auto" else getattr(torch, dtype)
    layer = LayerShape(int(getattr(text, "num_key_value_heads", None) or heads), size, size)
    return Outline(
        path.name,
        tokenizer,
        getattr(config, "foretick", None) or {},
        KVPool.block_bytes([layer] * int(text.num_hidden_layers), 1, kv_dtype(kv, served)),
        weights * served.itemsize // kept.itemsize,
        int(getattr(text, "max_position_embeddings", 1 << 31)),
    )
