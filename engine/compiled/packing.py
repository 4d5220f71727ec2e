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
from engine.compiled.packed_products import FLOATS, HALF, PAIRS, PANEL
from engine.cpu.emit import host_has
from engine.cpu.vectors import PAIRED
from engine.model.plain import is_plain, linears

Floats = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float32 | np.uint16 | np.uint32]
Tensors = Mapping[str, torch.Tensor]
"""Of a plain decoder, by their names in transformers and in its checkpoints."""

_KINDS: dict[type, int] = {np.float32: FLOATS, np.uint16: HALF, np.uint32: PAIRS}
"""By what packed weights are seen as."""


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


def decoder_of(model: Any, pairs: bool = True) -> CompiledDecoder | None:
    """The compiled form of a transformers model on the CPU; None where it is no plain decoder.

    ``pairs``: as of `packed`.
    """
    if not serves(model):
        return None
    return packed(model.state_dict(), PlainShape.of(model), model.model.rotary_emb, pairs=pairs)


def packed(tensors: Tensors, shape: PlainShape, rotary: Rotary, *, pairs: bool = True) -> CompiledDecoder:
    """The compiled form of a plain decoder.

    ``pairs``: weights in bfloat16 meet inputs rounded to bfloat16, in pairs, where the CPU multiplies such;
    else they are read as float32, half as fast for many rows. The head always reads them so.
    """
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    paired = pairs and embedding.dtype == torch.bfloat16 and host_has(PAIRED)
    return CompiledDecoder(
        embedding=embedding,
        rotary=rotary,
        layers=tuple(
            _layer(tensors, f"model.layers.{number}", shape, _pairs if paired else _panels)
            for number in range(shape.layers)
        ),
        head=_made(
            {
                "norm": _padded_floats(tensors["model.norm.weight"]),
                "queries": _panels(head),
                "bias": _bias(tensors, ["lm_head"]),
            },
            {"inputs": embedding.shape[1], "epsilon": shape.epsilon},
        ),
        vocabulary=head.shape[0],
    )


def release_plain(model: Any) -> int:
    """Free the weights that `decoder_of` packed; ``model`` itself can no longer run. Returns the bytes."""
    tied, freed = model.get_input_embeddings().weight, 0
    for each in linears(model):
        if each.weight is not tied:
            freed += each.weight.nbytes
            each.register_parameter("weight", nn.Parameter(each.weight.new_empty(0), requires_grad=False))
    return freed


def _layer(
    tensors: Tensors, layer: str, shape: PlainShape, panels: Callable[[torch.Tensor], Weights]
) -> Layer:
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    queries, keys, _ = joined = [f"{attention}.{name}_proj" for name in "qkv"]
    gates, gates_bias = _interleaved(tensors, f"{mlp}.gate_proj", f"{mlp}.up_proj")
    arrays = {
        "norm": _padded_floats(tensors[f"{layer}.input_layernorm.weight"]),
        "queries": panels(torch.cat([tensors[f"{each}.weight"] for each in joined])),
        "bias": _bias(tensors, joined),
        "out": panels(tensors[f"{attention}.o_proj.weight"]),
        "second_norm": _padded_floats(tensors[f"{layer}.post_attention_layernorm.weight"]),
        "gates": panels(gates),
        "gates_bias": gates_bias,
        "down": panels(tensors[f"{mlp}.down_proj.weight"]),
    }
    for name, norm in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
        if (weight := tensors.get(f"{attention}.{norm}.weight")) is not None:
            arrays[name] = weight.detach().float().numpy()
    inner, width = tensors[f"{mlp}.gate_proj.weight"].shape
    numbers = {
        "inputs": width,
        "heads": len(tensors[f"{queries}.weight"]) // shape.dim,
        "kv_heads": len(tensors[f"{keys}.weight"]) // shape.dim,
        "dim": shape.dim,
        "inner": inner,
        "mixed_width": padded(inner),
        "epsilon": shape.epsilon,
    }
    return _made(arrays, numbers, shape.scale)


def _made(arrays: Mapping[str, Any], numbers: Mapping[str, float], scale: float = 1.0) -> Layer:
    """A layer of named ``arrays`` and ``numbers`` of `LAYER`."""
    call = np.zeros(1, LAYER)
    for name, array in arrays.items():
        call[name] = array.ctypes.data
    for name, number in numbers.items():
        call[name] = number
    matrices = {name: arrays[name] for name in ("queries", "out", "gates", "down") if name in arrays}
    for name in matrices.keys() - {"down"}:
        call[f"{name}_panels"] = len(matrices[name])
    call["width"] = padded(int(numbers["inputs"]))
    kind = call["kind"] = _KINDS[arrays["queries"].dtype.type]
    return Layer(
        words=call.view(np.int64),
        arrays=tuple(arrays.values()),
        size=sum(each.nbytes for each in matrices.values()) // (4 if kind == FLOATS else 2),
        dtype=torch.bfloat16 if kind == PAIRS else torch.float32,
        joint=len(arrays["queries"]) * PANEL,
        mixed=int(numbers.get("mixed_width", 0)),
        heads=int(numbers.get("heads", 0)),
        kv_heads=int(numbers.get("kv_heads", 0)),
        dim=int(numbers.get("dim", 0)),
        scale=scale,
    )


def _padded_floats(weight: torch.Tensor) -> Floats:
    weight = weight.detach().float()
    return nn.functional.pad(weight, (0, padded(len(weight)) - len(weight))).numpy()


def _seen(tensor: torch.Tensor) -> Any:
    """Floats, or bfloat16 as uint16."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint16)).detach().numpy()


def _panels(weight: torch.Tensor) -> Weights:
    """[outputs, inputs] as [panels, inputs, PANEL], zeros behind the last output."""
    outputs, inputs = weight.shape
    packed = weight.new_zeros(padded(outputs), inputs)
    packed[:outputs] = weight
    seen: Weights = _seen(packed.view(-1, PANEL, inputs).transpose(1, 2).contiguous())
    return seen


def _pairs(weight: torch.Tensor) -> Weights:
    """bfloat16 [outputs, inputs] as [panels, inputs / 2, PANEL] pairs, zeros behind the last input."""
    outputs, inputs = weight.shape
    packed = weight.new_zeros(padded(outputs), inputs + inputs % 2)
    packed[:outputs, :inputs] = weight.detach()
    words = packed.view(torch.int32).view(-1, PANEL, packed.shape[1] // 2).transpose(1, 2).contiguous()
    seen: Weights = words.numpy().view(np.uint32)
    return seen


def _bias(tensors: Tensors, linears: Sequence[str]) -> Floats:
    """The joint bias, padded; zeros where there is none."""
    return _padded_floats(torch.cat([_bias_of(tensors, each) for each in linears]))


def _bias_of(tensors: Tensors, linear: str) -> torch.Tensor:
    bias = tensors.get(f"{linear}.bias")
    return torch.zeros(len(tensors[f"{linear}.weight"])) if bias is None else bias.detach().float()


def _interleaved(tensors: Tensors, gate: str, up: str) -> tuple[torch.Tensor, Floats]:
    """Half panels of gate and up in turn, weights [outputs, inputs] and biases."""
    half = PANEL // 2
    pad = -len(tensors[f"{gate}.weight"]) % half

    def mixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = [torch.cat((each, each.new_zeros(pad, *each.shape[1:]))) for each in (a, b)]
        return torch.stack([torch.unflatten(part, 0, (-1, half)) for part in parts], 1).flatten(0, 2)

    weights = mixed(*(tensors[f"{each}.weight"].detach() for each in (gate, up)))
    return weights, mixed(*(_bias_of(tensors, each) for each in (gate, up))).numpy()
