"""Measures how a model's layers use positions and masks, by passes over a single token.

At position 0 rotary embedding is the identity, so the queries and keys of the same token at another position
show which of the model's tables rotated them, layer by layer. The mask that transformers would build is
computed at far-apart positions and compared with the sliding window that the layer passes to attention. The
probe's attention returns zeros, so layers cannot see positions in any other way than the one measured.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from engine.attention.rotary import FrameRotation, rotations_of
from engine.model.architectures import ModelError
from regions.kv_tensors import LayerShape

log = logging.getLogger(__name__)

PROBE = "foretick_probe"
_NEAR = 97
"""A position at which any two rotary tables differ in their first dimensions."""
_FARTHEST = 1 << 17
_MASK_ROWS = (0, 1, 2, 7, 64, 1000, 8192, _FARTHEST - 1)
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_HALF = 5e-2


@dataclass(frozen=True)
class Probed:
    """The measured properties of the layers.

    ``rotations``: one table per layer, valid for local positions below ``max_positions``.
    """

    layers: tuple[LayerShape, ...]
    rotations: tuple[FrameRotation, ...]
    max_positions: int


@dataclass(frozen=True)
class _Seen:
    """One layer's attention call for one token: ``query``, ``key`` and ``value`` [heads, 1, dim]."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    window: int | None
    mask: torch.Tensor | None


_seen: list[_Seen] = []


@torch.inference_mode()
def probe(model: Any) -> Probed:
    """Measure ``model``; leaves its attention function set to the probe's.

    Raises ModelError for a layer that regions and frames cannot reproduce.
    """
    kind = model.config.model_type
    model.set_attn_implementation(PROBE)
    zero = _pass(model, 0)
    tables = rotations_of(model)
    config = model.config.get_text_config()
    calls, layers = [seen.layer for seen in zero], int(config.num_hidden_layers)
    if calls != list(range(layers)):
        raise ModelError(f"{kind}: layers {calls} reach our attention, expected each of {layers} once")
    for seen in zero:
        _check_mask(kind, seen)
    limit = min(int(getattr(config, "max_position_embeddings", 0) or _FARTHEST), _FARTHEST)
    near = min(_NEAR, limit - 1)
    rotations = tuple(
        _rotation(kind, tables, *pair, near) for pair in zip(zero, _pass(model, near), strict=True)
    )

    def rotated(position: int) -> bool:
        after = _pass(model, position)
        return all(
            _error(t, a, b, position) <= _tolerance(a.key.dtype, position)
            for t, a, b in zip(rotations, zero, after, strict=True)
        )

    positions = _positions(rotated, near, limit)
    if positions < limit:
        log.warning("%s: positions are served up to %d, the model rotates otherwise beyond", kind, positions)
    return Probed(
        tuple(LayerShape(s.key.shape[0], s.key.shape[2], s.value.shape[2]) for s in zero),
        rotations,
        positions,
    )


def single_token(model: Any) -> None:
    """Make one pass over a token; leaves the model's attention function set to the probe's."""
    model.set_attn_implementation(PROBE)
    _pass(model, 0)


def _positions(rotated: Callable[[int], bool], near: int, limit: int) -> int:
    """How many positions from 0 on rotate alike; ``near`` does, and none from some position on."""
    if rotated(limit - 1):
        return limit
    return bisect_left(range(limit), True, near + 1, limit - 1, key=lambda at: not rotated(at))


def _pass(model: Any, position: int) -> list[_Seen]:
    token = int(model.config.get_text_config().vocab_size) // 2
    device = model.device
    _seen.clear()
    try:
        model(
            input_ids=torch.tensor([[token]], device=device),
            position_ids=torch.tensor([[position]], device=device),
            use_cache=False,
        )
    except Exception as error:
        kind = model.config.model_type
        raise ModelError(f"{kind}: its forward pass does not run over our attention: {error}") from error
    seen = list(_seen)
    _seen.clear()
    return seen


def _check_mask(kind: str, seen: _Seen) -> None:
    if seen.mask is None:
        raise ModelError(
            f"{kind}: layer {seen.layer} gets no causal mask from transformers to compare ours with"
        )
    query, key = _mask_indices(seen.mask.device)
    expected = key <= query
    if seen.window is not None:
        expected &= query - key < seen.window
    if seen.mask.shape[-2:] != expected.shape[-2:] or not (seen.mask == expected).all():
        window = "none" if seen.window is None else f"{seen.window} tokens"
        raise ModelError(
            f"{kind}: layer {seen.layer} masks otherwise than causally with the sliding window it declares "
            f"({window})"
        )


def _rotation(
    kind: str, tables: list[FrameRotation], zero: _Seen, near: _Seen, position: int
) -> FrameRotation:
    error, best = min(
        ((_error(table, zero, near, position), i) for i, table in enumerate(tables)), default=(1.0, 0)
    )
    if not error <= _tolerance(zero.key.dtype, position):
        raise ModelError(
            f"{kind}: layer {zero.layer} does not rotate the halves of its queries and keys by any rotary "
            "table of the model, which position frames need"
        )
    return tables[best]


def _error(rotation: FrameRotation, zero: _Seen, after: _Seen, position: int) -> float:
    """The rotation's error against the model between two positions, relative to the vectors."""
    worst = 0.0
    for before, expected in ((zero.query, after.query), (zero.key, after.key)):
        if 2 * rotation.inv_freq.numel() > before.shape[-1]:
            return float("inf")
        rotated = rotation.rotate(before, torch.tensor([position], device=before.device))
        difference = torch.linalg.vector_norm((rotated - expected).float())
        worst = max(worst, float(difference / torch.linalg.vector_norm(expected.float()).clamp(min=1e-6)))
    return worst


def _tolerance(dtype: torch.dtype, position: int) -> float:
    # models compute angles in float32, which rounds the angle of a far position by this much
    return _TOLERANCE.get(dtype, _TOLERANCE_HALF) + position * 2.0**-23


def _mask_indices(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    query = torch.tensor(_MASK_ROWS, device=device)[None, None, :, None]
    return query, torch.arange(_FARTHEST, device=device)[None, None, None]


def _probe_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # a plain int on every attention module
    _seen.append(_Seen(layer, query[0], key[0], value[0], sliding_window, attention_mask))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _probe_mask(
    *, mask_function: Callable[..., torch.Tensor], device: torch.device, **_: Any
) -> torch.Tensor:
    query, key = _mask_indices(device)
    nothing = torch.zeros_like(query[:, :, :1])
    return mask_function(nothing, nothing, query, key)


AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)
