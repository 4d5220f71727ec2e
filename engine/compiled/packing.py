"""Packs the weights of plain decoders for compiled layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from engine.compiled.decoder import CompiledDecoder, Layer, Rotary, padded
from engine.compiled.layers import LAYER
from engine.compiled.packed_products import (
    BYTE_PAIRS,
    BYTES,
    FLOATS,
    HALF,
    IN_PAIRS,
    NIBBLE_PAIRS,
    NIBBLES,
    PAIRS,
    PANEL,
)
from engine.cpu.emit import host_has
from engine.cpu.vectors import PAIRED
from engine.model.plain import is_plain, linears
from engine.model.quantised import EMBEDDING, HEAD, Quantised

Floats = npt.NDArray[np.float32]
Weight = torch.Tensor | Quantised
Tensors = Mapping[str, Weight]
"""Of a plain decoder, by their names in transformers and in its checkpoints; matrices may be quantised."""


@dataclass(frozen=True)
class Panels:
    """A packed matrix: an array [panels, ...] of a kind of `packed_products`. ``size``: number of weights."""

    array: npt.NDArray[np.float32 | np.uint8 | np.uint16 | np.uint32]
    kind: int
    size: int


@dataclass(frozen=True)
class PlainShape:
    """What the tensors of a plain decoder do not say. ``scale``: of scores; ``epsilon``: of its norms."""

    layers: int
    dim: int
    scale: float
    epsilon: float

    @classmethod
    def of(cls, model: Any) -> "PlainShape":
        """Of a transformers model."""
        layers, attention = model.model.layers, model.model.layers[0].self_attn
        epsilon = float(model.model.norm.variance_epsilon)
        return cls(len(layers), int(attention.head_dim), float(attention.scaling), epsilon)


def serves(model: Any) -> bool:
    """Return whether a transformers model is a plain decoder on the CPU, with weights as they were saved."""
    return model.device.type == "cpu" and model.dtype in (torch.float32, torch.bfloat16) and is_plain(model)


def decoder_of(
    model: Any, pairs: bool = True, quantised: Mapping[str, Quantised] | None = None
) -> CompiledDecoder | None:
    """The compiled form of a transformers model on the CPU; None where it is no plain decoder.

    ``pairs``: as of `packed`. ``quantised``: matrices, by name, in place of the model's own.
    """
    if not serves(model):
        return None
    tensors = model.state_dict() | (quantised or {})
    return packed(tensors, PlainShape.of(model), model.model.rotary_emb, pairs=pairs)


def packed(tensors: Tensors, shape: PlainShape, rotary: Rotary, *, pairs: bool = True) -> CompiledDecoder:
    """The compiled form of a plain decoder, of whose matrices all are quantised or none.

    ``pairs``: weights of a decoder in bfloat16 meet inputs rounded to bfloat16, in pairs, where the CPU
    multiplies such; else they are read as float32, half as fast for many rows. The head always reads them so.
    """
    norm, embedding, head = _plain(tensors, "model.norm.weight"), tensors[EMBEDDING], _panels(tensors[HEAD])
    paired = pairs and norm.dtype == torch.bfloat16 and host_has(PAIRED)
    return CompiledDecoder(
        embedding=embedding if isinstance(embedding, torch.Tensor) else None,
        rotary=rotary,
        layers=tuple(
            _layer(tensors, f"model.layers.{number}", shape, _pairs if paired else _panels)
            for number in range(shape.layers)
        ),
        head=_made(
            {"norm": _padded_floats(norm), "bias": _bias(tensors, ["lm_head"])},
            {"queries": head},
            {"inputs": len(norm), "epsilon": shape.epsilon},
        ),
        vocabulary=_outputs(tensors[HEAD]),
    )


def release_plain(model: Any, decoder: CompiledDecoder) -> int:
    """Free the weights that ``decoder`` has packed; ``model`` itself can no longer run. Returns the bytes."""
    embedding, freed = model.get_input_embeddings(), 0
    kept = embedding.weight if decoder.embedding is not None else None
    packed = [each for each in (*linears(model), embedding) if each.weight is not kept]
    freed = sum({id(each.weight): each.weight.nbytes for each in packed}.values())
    for each in packed:
        each.register_parameter("weight", nn.Parameter(each.weight.new_empty(0), requires_grad=False))
    return freed


def _layer(tensors: Tensors, layer: str, shape: PlainShape, panels: Callable[[Weight], Panels]) -> Layer:
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    queries, keys, _ = joined = [f"{attention}.{name}_proj" for name in "qkv"]
    gate, up = f"{mlp}.gate_proj", f"{mlp}.up_proj"
    arrays = {
        "norm": _padded_floats(_plain(tensors, f"{layer}.input_layernorm.weight")),
        "bias": _bias(tensors, joined),
        "second_norm": _padded_floats(_plain(tensors, f"{layer}.post_attention_layernorm.weight")),
        "gates_bias": _interleaved(_bias_of(tensors, gate), _bias_of(tensors, up)).numpy(),
    }
    for name, norm in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
        if f"{attention}.{norm}.weight" in tensors:
            arrays[name] = _plain(tensors, f"{attention}.{norm}.weight").float().numpy()
    matrices = {
        "queries": _moved(_concatenated, *(tensors[f"{each}.weight"] for each in joined)),
        "out": tensors[f"{attention}.o_proj.weight"],
        "gates": _moved(_interleaved, tensors[f"{gate}.weight"], tensors[f"{up}.weight"]),
        "down": tensors[f"{mlp}.down_proj.weight"],
    }
    inner, width = (
        _outputs(tensors[f"{gate}.weight"]),
        len(_plain(tensors, f"{layer}.input_layernorm.weight")),
    )
    numbers = {
        "inputs": width,
        "heads": _outputs(tensors[f"{queries}.weight"]) // shape.dim,
        "kv_heads": _outputs(tensors[f"{keys}.weight"]) // shape.dim,
        "dim": shape.dim,
        "inner": inner,
        "mixed_width": padded(inner),
        "epsilon": shape.epsilon,
    }
    return _made(arrays, {name: panels(each) for name, each in matrices.items()}, numbers, shape.scale)


def _made(
    arrays: Mapping[str, Any],
    matrices: Mapping[str, Panels],
    numbers: Mapping[str, float],
    scale: float = 1.0,
) -> Layer:
    """A layer of named ``arrays``, ``matrices`` and ``numbers`` of `LAYER`."""
    call = np.zeros(1, LAYER)
    for name, array in arrays.items():
        call[name] = array.ctypes.data
    for name, number in numbers.items():
        call[name] = number
    for name, panels in matrices.items():
        call[name], call[f"{name}_kind"] = panels.array.ctypes.data, panels.kind
        if name != "down":  # whose outputs are those of "out"
            call[f"{name}_panels"] = len(panels.array)
    call["width"] = padded(int(numbers["inputs"]))
    return Layer(
        words=call.view(np.int64),
        arrays=(*arrays.values(), *(each.array for each in matrices.values())),
        size=sum(each.size for each in matrices.values()),
        dtype=torch.bfloat16 if matrices["queries"].kind in IN_PAIRS else torch.float32,
        joint=len(matrices["queries"].array) * PANEL,
        mixed=int(numbers.get("mixed_width", 0)),
        heads=int(numbers.get("heads", 0)),
        kv_heads=int(numbers.get("kv_heads", 0)),
        dim=int(numbers.get("dim", 0)),
        scale=scale,
    )


def _plain(tensors: Tensors, name: str) -> torch.Tensor:
    """A tensor that is never quantised."""
    found = tensors[name]
    assert isinstance(found, torch.Tensor), name
    return found.detach()


def _outputs(weight: Weight) -> int:
    return len(weight if isinstance(weight, torch.Tensor) else weight.codes)


def _moved(rows: Callable[..., torch.Tensor], *parts: Weight) -> Weight:
    """One matrix of the outputs of ``parts``, as ``rows`` moves them."""
    coded = [each for each in parts if isinstance(each, Quantised)]
    if not coded:
        return rows(*parts)
    assert len(coded) == len(parts), "all are quantised or none"
    return coded[0].joined(rows, *coded[1:])


def _concatenated(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def _padded_floats(weight: torch.Tensor) -> Floats:
    weight = weight.detach().float()
    return nn.functional.pad(weight, (0, padded(len(weight)) - len(weight))).numpy()


def _seen(tensor: torch.Tensor) -> Any:
    """Floats, or bfloat16 as uint16."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint16)).detach().numpy()


def _panels(weight: Weight) -> Panels:
    """[outputs, inputs] as [panels, inputs, PANEL], zeros behind the last output; or in blocks of codes."""
    if isinstance(weight, Quantised):
        kind = BYTES if weight.bits == 8 else NIBBLES
        return Panels(weight.packed(pairs=False), kind, weight.codes.numel())
    outputs, inputs = weight.shape
    packed = weight.new_zeros(padded(outputs), inputs)
    packed[:outputs] = weight
    kind = FLOATS if weight.dtype == torch.float32 else HALF
    seen = _seen(packed.view(-1, PANEL, inputs).transpose(1, 2).contiguous())
    return Panels(seen, kind, weight.numel())


def _pairs(weight: Weight) -> Panels:
    """bfloat16 [outputs, inputs] as [panels, inputs / 2, PANEL] pairs, zeros behind the last input; or in
    blocks of pairs of codes."""
    if isinstance(weight, Quantised):
        kind = BYTE_PAIRS if weight.bits == 8 else NIBBLE_PAIRS
        return Panels(weight.packed(pairs=True), kind, weight.codes.numel())
    outputs, inputs = weight.shape
    packed = weight.new_zeros(padded(outputs), inputs + inputs % 2)
    packed[:outputs, :inputs] = weight.detach()
    words = packed.view(torch.int32).view(-1, PANEL, packed.shape[1] // 2).transpose(1, 2).contiguous()
    return Panels(words.numpy().view(np.uint32), PAIRS, weight.numel())


def _bias(tensors: Tensors, linears: Sequence[str]) -> Floats:
    """The joint bias, padded; zeros where there is none."""
    return _padded_floats(torch.cat([_bias_of(tensors, each) for each in linears]))


def _bias_of(tensors: Tensors, linear: str) -> torch.Tensor:
    if f"{linear}.bias" in tensors:
        return _plain(tensors, f"{linear}.bias").float()
    return torch.zeros(_outputs(tensors[f"{linear}.weight"]))


def _interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Half panels of the outputs of gate and up in turn."""
    half = PANEL // 2
    pad = -len(gate) % half
    parts = [torch.cat((each, each.new_zeros(pad, *each.shape[1:]))) for each in (gate.detach(), up.detach())]
    return torch.stack([torch.unflatten(part, 0, (-1, half)) for part in parts], 1).flatten(0, 2)
