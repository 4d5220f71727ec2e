"""A Hugging Face Llama as GGUF, llama.cpp's format, without a vocabulary: contestants exchange token ids.

llama.cpp's own converter refuses tokenizers that it does not know. Runs in llama.cpp's environment: imports
only numpy, gguf and the standard library.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_PLAIN = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WEIGHT = re.compile(r"(?:model\.layers\.(\d+)\.)?(.+)\.weight")


def write_gguf(model: Path, dtype: str, into: Path) -> int:
    """Write the model in directory ``model`` to file ``into`` in ``dtype``, "float32" or "bfloat16".

    Norms are rounded to it, and stored in float32, which llama.cpp wants. Returns the type's number in ggml.
    Raises ModuleNotFoundError without gguf, ValueError as `tensors`.
    """
    import gguf

    config = json.loads((model / "config.json").read_text())
    kind = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}[dtype]
    writer = gguf.GGUFWriter(into, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, tensor in tensors(model, config):
        values = gguf.quantize(tensor, kind)
        if tensor.ndim == 1:
            writer.add_tensor(name, gguf.dequantize(values, kind))
        else:
            writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return int(kind)


def tensors(model: Path, config: dict[str, Any]) -> Iterator[tuple[str, Floats]]:
    """The weights under GGUF's names, queries and keys with `adjacent` pairs; tied embeddings come once.

    Raises ValueError for anything but a Llama with plain rotary embedding and without biases.
    """
    if config["model_type"] != "llama" or config["rope_parameters"]["rope_type"] != "default":
        raise ValueError(f"{model} is not a Llama with plain rotary embedding")
    for path in sorted(model.glob("*.safetensors")):
        for name, tensor in _safetensors(path):
            found = _WEIGHT.fullmatch(name)
            if found is None or found[2] not in _PLAIN:
                raise ValueError(f"{path}: {name} is no weight of a Llama")
            if found[2] in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = adjacent(tensor, config["head_dim"])
            prefix = "" if found[1] is None else f"blk.{found[1]}."
            yield f"{prefix}{_PLAIN[found[2]]}.weight", tensor


def adjacent(projection: Floats, head: int) -> Floats:
    """Rows ``i`` and ``i + head / 2`` of each head side by side: llama.cpp rotates adjacent pairs."""
    halves = projection.reshape(-1, 2, head // 2, projection.shape[1])
    return halves.swapaxes(1, 2).reshape(projection.shape)


def _safetensors(path: Path) -> Iterator[tuple[str, Floats]]:
    """One file's tensors, bfloat16 widened: length of the header in 8 bytes, header in JSON, then data."""
    length = int(np.fromfile(path, "<u8", 1)[0])
    data = np.memmap(path, np.uint8, "r", 8)
    header = json.loads(data[:length].tobytes())
    header.pop("__metadata__", None)
    for name, each in header.items():
        begin, end = each["data_offsets"]
        stored = data[length + begin : length + end]
        if each["dtype"] == "BF16":
            values = (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif each["dtype"] == "F32":
            values = stored.view("<f4")
        else:
            raise ValueError(f"{path}: {name} is {each['dtype']}, neither F32 nor BF16")
        yield name, values.reshape(each["shape"])
