"""The trained model as a transformers directory that the daemon, or anyone, loads; and back again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flash.question import EXACT_VALUE
from tapes.rules import RULES
from training.model import HEADS, Shape, TapeModel, transformers_model
from training.tokenizer import NONE, VOCABULARY, build_tokenizer, question_token

WINDOW = 64
"""Bars of the window that the model is trained for."""
LARGEST = 20 * 2**20
"""Bytes of weights that may be committed."""


def foretick_block(window: int = WINDOW) -> dict[str, Any]:
    """The ``foretick`` block of config.json: how the daemon renders prompts for this model."""
    questions = {rule.name: _question(rule.name, rule.text, rule.choices) for rule in RULES}
    exact = EXACT_VALUE
    # to copy a level is learnt last; by number it was not, in 1,900 steps that asked by number
    questions[exact.name] = _question(exact.name, exact.text) | {"by_number": False}
    block = {"layout": "terse", "lines": "compact", "window_bars": window, "none": NONE}
    return block | {"questions": questions}


def _question(name: str, text: str, choices: Sequence[str] = ()) -> dict[str, Any]:
    return {"text": text, "token": question_token(name), "choices": list(choices)}


def export(model: TapeModel, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write weights in ``dtype``, configuration, generation configuration and tokenizer.

    Raises ValueError when the weights are larger than LARGEST.
    """
    size = sum(p.numel() for name, p in model.named_parameters() if name not in HEADS) * dtype.itemsize
    if size > LARGEST:
        raise ValueError(
            f"the weights take {size / 2**20:.1f} MiB of at most {LARGEST >> 20}; export them as bfloat16"
        )
    tokenizer = build_tokenizer()
    plain = transformers_model(model).to(dtype)
    plain.generation_config.update(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    plain.save_pretrained(directory, safe_serialization=True)
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["foretick"] = foretick_block()  # transformers sorts the questions
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(directory)


def is_packed(directory: Path) -> bool:
    """Whether `tape_model` reads this model: a terse Llama of our tokenizer and one KV head a query head."""
    config = _config(directory)
    ours = config.get("model_type") == "llama" and config.get("vocab_size") == VOCABULARY
    return "foretick" in config and ours and config["num_attention_heads"] == config["num_key_value_heads"]


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config


def tape_model(directory: Path, dtype: torch.dtype = torch.float32) -> TapeModel:
    """The model of an exported directory, for packed batches in ``dtype``."""
    from safetensors.torch import load_file

    config = _config(directory)
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    hidden, layers, heads, inner = (config[name] for name in names)
    model = TapeModel(Shape(hidden, layers, heads, inner, theta))
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= load_file(file)
    own = {_own_name(name): weight.float() for name, weight in weights.items() if name != "lm_head.weight"}
    for_training = {name: value for name, value in model.state_dict().items() if name in HEADS}
    model.load_state_dict(for_training | own)
    model.dtype = dtype
    return model.eval()


def _own_name(name: str) -> str:
    """The parameter of `TapeModel` for a name of transformers'."""
    parts = [part for part in name.split(".") if part not in ("model", "mlp", "self_attn", "weight")]
    return ".".join(parts)
