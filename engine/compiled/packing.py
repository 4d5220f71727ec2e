"""Packs the weights of transformers' plain decoders for compiled layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from engine.compiled.decoder import CompiledDecoder, Layer, padded
from engine.compiled.layers import LAYER
from engine.compiled.packed_products import FLOATS, HALF, PAIRS, PANEL
from engine.cpu.emit import host_has
from engine.cpu.vectors import PAIRED
from engine.model.plain import is_plain, linears

Floats = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float32 | np.uint16 | np.uint32]

_KINDS: dict[type, int] = {np.float32: FLOATS, np.uint16: HALF, np.uint32: PAIRS}
"""By what packed weights are seen as."""


def serves(model: Any) -> bool:
    """Return whether a transformers model is a plain decoder on the CPU, with weights as they were saved."""
    return model.device.type == "cpu" and model.dtype in (torch.float32, torch.bfloat16) and is_plain(model)


def decoder_of(model: Any, pairs: bool = True) -> CompiledDecoder | None:
    """The compiled form of a transformers model on the CPU; None where it is no plain decoder.

    ``pairs``: weights in bfloat16 meet inputs rounded to bfloat16, in pairs, where the CPU multiplies such;
    else they are read as float32, half as fast for many rows. The head always reads them so.
    """
    if not serves(model):
        return None
    inner = model.model
    epsilon = float(inner.norm.variance_epsilon)
    width = inner.embed_tokens.weight.shape[1]
    paired = pairs and model.dtype == torch.bfloat16 and host_has(PAIRED)
    return CompiledDecoder(
        embedding=inner.embed_tokens.weight,
        rotary=inner.rotary_emb,
        layers=tuple(_layer(each, width, epsilon, _pairs if paired else _panels) for each in inner.layers),
        head=_made(
            {
                "norm": _padded_floats(inner.norm.weight),
                "queries": _panels(model.lm_head.weight),
                "bias": _bias([model.lm_head]),
            },
            {"inputs": width, "epsilon": epsilon},
        ),
        vocabulary=model.lm_head.weight.shape[0],
    )


def release_plain(model: Any) -> int:
    """Free the weights that `decoder_of` packed; ``model`` itself can no longer run. Returns the bytes."""
    tied, freed = model.get_input_embeddings().weight, 0
    for each in linears(model):
        if each.weight is not tied:
            freed += each.weight.nbytes
            each.register_parameter("weight", nn.Parameter(each.weight.new_empty(0), requires_grad=False))
    return freed


def _layer(layer: Any, width: int, epsilon: float, panels: Callable[[torch.Tensor], Weights]) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    joined = (attention.q_proj, attention.k_proj, attention.v_proj)
    gates, gates_bias = _interleaved(mlp.gate_proj, mlp.up_proj)
    arrays = {
        "norm": _padded_floats(layer.input_layernorm.weight),
        "queries": panels(torch.cat([each.weight for each in joined])),
        "bias": _bias(joined),
        "out": panels(attention.o_proj.weight),
        "second_norm": _padded_floats(layer.post_attention_layernorm.weight),
        "gates": panels(gates),
        "gates_bias": gates_bias,
        "down": panels(mlp.down_proj.weight),
    }
    for name, norm in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
        if hasattr(attention, norm):
            arrays[name] = getattr(attention, norm).weight.detach().float().numpy()
    inner = mlp.gate_proj.weight.shape[0]
    numbers = {
        "inputs": width,
        "heads": attention.q_proj.weight.shape[0] // attention.head_dim,
        "kv_heads": attention.k_proj.weight.shape[0] // attention.head_dim,
        "dim": attention.head_dim,
        "inner": inner,
        "mixed_width": padded(inner),
        "epsilon": epsilon,
    }
    return _made(arrays, numbers, float(attention.scaling))


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


def _bias(linears: Sequence[Any]) -> Floats:
    """The joint bias, padded; zeros where there is none."""
    parts = [
        torch.zeros(each.weight.shape[0]) if each.bias is None else each.bias.detach().float()
        for each in linears
    ]
    return _padded_floats(torch.cat(parts))


def _interleaved(gate: Any, up: Any) -> tuple[torch.Tensor, Floats]:
    """Half panels of gate and up in turn, weights [outputs, inputs] and biases."""
    half = PANEL // 2
    inner = gate.weight.shape[0]
    pad = -inner % half

    def mixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = [torch.cat((each, each.new_zeros(pad, *each.shape[1:]))) for each in (a, b)]
        return torch.stack([torch.unflatten(part, 0, (-1, half)) for part in parts], 1).flatten(0, 2)

    weights = mixed(gate.weight.detach(), up.weight.detach())
    biases = [torch.zeros(inner) if each.bias is None else each.bias.detach().float() for each in (gate, up)]
    return weights, mixed(*biases).numpy()
