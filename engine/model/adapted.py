"""The weights of a question pack: a plain model whose rows are a question's tokens, over the same KV.

Its layers are the model's with the pack's changes merged. Keys and values of the tape are the model's own,
which the pack's rows only read.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.compiled.packing import PlainShape, packed
from engine.model.architectures import ModelError
from engine.model.loaded import LoadedModel
from engine.model.plain import PLAIN
from engine.model.quantised import EMBEDDING, HEAD
from engine.model.question_pack import ANSWERS, TOKEN, QuestionPack
from engine.model.remembered import FixedRotary, Tensors, tensors_of


def adapted(loaded: LoadedModel, directory: Path, pack: QuestionPack) -> LoadedModel:
    """``loaded``, the model in ``directory``, as the pack changes it: its tokens are 0 and up.

    Raises ModelError for a pack of another model, and where the model does not run on a CPU.
    """
    if pack.head.base != loaded.revision:
        raise ModelError(f"was taught to model {pack.head.base}, and this one is {loaded.revision}")
    if loaded.device.type != "cpu":
        raise ModelError(f"question packs run on a CPU, and this model is on {loaded.device.type}")
    if loaded.sizes.kind not in PLAIN:
        raise ModelError(f"question packs are for plain decoders, not for {loaded.sizes.kind}")
    try:
        tensors = merged(tensors_of(directory, torch.float32), pack)
        epsilon = float(json.loads((directory / "config.json").read_bytes())["rms_norm_eps"])
    except (OSError, KeyError, ValueError, IndexError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"does not fit the model: {error}") from error
    dim = loaded.layers[0].key_dim
    shape = PlainShape(loaded.sizes.layers, dim, dim**-0.5, epsilon)
    rotary = FixedRotary(loaded.rotations[0].inv_freq.float(), 1.0)
    cast = {name: tensor.to(loaded.dtype) for name, tensor in tensors.items()}
    return replace(loaded, model=None, decoder=packed(cast, shape, rotary), choice=None, weights="float")


def merged(tensors: Tensors, pack: QuestionPack) -> Tensors:
    """The model's weights with the pack's changes. Raises KeyError or RuntimeError where they do not fit."""
    given = {name: torch.from_numpy(array) for name, array in pack.tensors.items()}
    found = dict(tensors)
    for name in [name.removesuffix(".a") for name in given if name.endswith(".a")]:
        found[f"{name}.weight"] = tensors[f"{name}.weight"] + given[f"{name}.b"] @ given[f"{name}.a"]
    found[EMBEDDING] = given[TOKEN]
    found[HEAD] = tensors[HEAD].clone()
    found[HEAD][list(pack.head.answers)] = given[ANSWERS]
    return found
