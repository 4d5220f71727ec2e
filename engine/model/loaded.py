"""A loaded model whose attention runs over regions, and its forward pass.

transformers' modelling code runs unmodified; its `AttentionInterface` passes every layer's queries, keys and
values to `region_attention` (`engine.model.loading`). Compiled layers need none of that code.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import nn

from engine.attention.base import Attention, LayerCall
from engine.attention.last_layer import LastLayer, NothingRead, Written
from engine.attention.metadata import AttentionMetadata
from engine.attention.rotary import FrameRotation
from engine.compiled.decoder import CompiledDecoder
from engine.compiled.packing import decoder_of, release_plain
from engine.compiled.verdict import LayerChoice
from engine.linears.install import Linears
from engine.model.architectures import ModelError
from engine.model.by_torchao import code_bytes
from regions.kv_tensors import KVPool, LayerShape

ATTENTION = "foretick_regions"
Layers = Literal["auto", "compiled", "onednn", "torch"]
"""How layers run on a CPU. ``auto``: compiled in plain decoders, unless that measures slower; else linear
layers are packed where that measures faster; ``compiled``: the former always; ``onednn``: all linears packed;
``torch``: neither. On a GPU, ``auto`` and ``compiled`` fuse what lies between matrix products: by kernels of
ours in plain decoders (`engine.fused`), by torch.compile in others (`engine.model.fusion`)."""


Weights = Literal[
    "auto", "float", "int8", "int4", "fp8", "gguf", "torchao-int8", "torchao-int4", "torchao-fp8"
]
"""How weights are held. ``auto``: as the model's files have them; ``float``: in the model's dtype; ``int8``,
``int4``: matrices rounded to codes of 8 and 4 bits (`engine.model.quantised`), in compiled layers; ``gguf``:
as the codes of the GGUF file that the model is from (`engine.model.kept`). On a GPU ``int8``, ``int4`` and
``fp8`` become those of torchao (`engine.model.by_torchao`)."""


@dataclass(frozen=True)
class ForwardContext:
    """Arguments of the attention function for one forward pass; ``rotations``: one per layer.

    ``last``: the rows read from the last layer; None: all.
    """

    metadata: AttentionMetadata
    pool: KVPool
    slots: torch.Tensor | slice
    attention: Attention
    rotations: tuple[FrameRotation, ...]
    last: LastLayer | None = None


# a global, because some layers drop the extra keyword arguments of a forward call
_current: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)


def region_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [1, q_heads, rows, dim] to [1, rows, q_heads, dim]."""
    if attention_mask is not None:
        raise ModelError("transformers built an attention mask: this architecture has its own masking")
    context = _current.get()
    assert context is not None, "only `LoadedModel.forward` runs the layers"
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # a plain int on every attention module
    last = context.last if layer == len(context.rotations) - 1 else None
    if last is None or not last.reading:
        context.pool.put(layer, context.slots, key[0], value[0])
        if last is not None:
            raise Written
    output = context.attention(
        LayerCall(
            query[0],
            key[0],
            value[0],
            context.pool.keys[layer],
            context.pool.values[layer],
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap,
            sliding_window,
            context.metadata if last is None else last.metadata,
            context.rotations[layer],
            s_aux,
        )
    )
    # contiguous, as from transformers' own functions: a layer would otherwise copy it or fail to view it
    return output.transpose(0, 1).to(query.dtype).contiguous()[None], None


def wanted_of_last() -> LastLayer | None:
    """Return the rows read of the last layer in the pass of this thread; None outside of one."""
    context = _current.get()
    return None if context is None else context.last


class Decoder(Protocol):
    """Runs a model's layers instead of transformers' code."""

    @property
    def described(self) -> str:
        """By whose code."""

    @property
    def in_float32(self) -> bool:
        """Whether states and sums are in float32 whatever the weights are."""

    def forward(
        self, context: ForwardContext, tokens: torch.Tensor, keep: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """As `LoadedModel.forward`."""


@dataclass(frozen=True)
class ModelSizes:
    """``kind``: transformers' `model_type`. ``vocabulary``: tokens. ``width``: of the widest sum."""

    kind: str
    vocabulary: int
    width: int
    layers: int

    @classmethod
    def of(cls, config: Any) -> ModelSizes:
        """Of a transformers configuration."""
        text = config.get_text_config()
        width = max(text.hidden_size, text.intermediate_size)
        return cls(config.model_type, int(text.vocab_size), width, int(text.num_hidden_layers))


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run over regions.

    ``model``: transformers'; None: its weights are in ``decoder`` alone, which then never changes.
    ``device``, ``dtype``: of the weights. ``layers``, ``rotations``: KV shape and query rotation
    of each layer; under tensor parallelism, of this rank. ``max_positions``: local positions stay below it.
    ``trims``: a pass may read only some rows of the last layer. ``described``: what the model says of itself,
    `foretick` in its config.json. ``linears``: how its linear layers run.
    """

    model: Any
    tokenizer: Any
    sizes: ModelSizes
    device: torch.device
    dtype: torch.dtype
    layers: tuple[LayerShape, ...]
    rotations: tuple[FrameRotation, ...]
    name: str
    revision: str
    untrained: bool
    max_positions: int
    trims: bool = False
    described: Mapping[str, Any] = field(default_factory=dict)
    linears: Linears = field(default_factory=Linears)
    decoder: Decoder | None = None
    """Runs the layers; None: transformers' code does."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, as the model's configurations name them."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Members of its generation_config.json that say how to draw tokens; none that transformers made up."""
    choice: LayerChoice | None = None
    """The measurement that decided it; None where nothing was to be decided."""
    weights: Weights = "float"
    """How they are held, never ``auto``. A ``model`` has what the codes of quantised ones expand to."""
    kv: torch.dtype | None = None
    """The type of KV, where it is not that of the weights."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the pool's tensors."""
        return self.kv or self.dtype

    @property
    def layers_run(self) -> str:
        """By whose code its layers run."""
        return "transformers' layers" if self.decoder is None else self.decoder.described

    @property
    def packed_bytes(self) -> int:
        """Memory of the weights that compiled layers have packed, or else of torchao's codes."""
        if isinstance(self.decoder, CompiledDecoder):
            return self.decoder.bytes
        return 0 if self.model is None else code_bytes(self.model)

    def more_exact(self) -> LoadedModel | None:
        """The same model with the next slower way to run its layers; None if there is none."""
        if self.decoder is None or self.model is None or self.weights != "float":
            return None
        halves = isinstance(self.decoder, CompiledDecoder) and self.decoder.pairs
        return replace(self, decoder=decoder_of(self.model, pairs=False) if halves else None)

    def release_plain(self) -> None:
        """Free the weights that only transformers' code reads, if it no longer runs. Call it last."""
        if self.model is not None and isinstance(
            self.decoder, CompiledDecoder
        ):  # a `FusedDecoder` shares them
            release_plain(self.model, self.decoder)

    @torch.inference_mode()
    def forward(
        self,
        context: ForwardContext,
        tokens: torch.Tensor,
        keep: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run packed ``tokens`` [rows]; returns the logits of rows ``keep``, fp32 [keep, vocabulary].

        ``positions``: local positions [rows], by default the metadata's. With ``context.last``, ``keep`` must
        be its rows; without any the result is empty.
        """
        if positions is None:
            positions = context.metadata.positions()
        if self.decoder is not None:
            return self.decoder.forward(context, tokens, keep, positions)
        token = _current.set(context)
        try:
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=keep if context.last is None else 0,
            )
        except NothingRead:
            return torch.empty(0, 0, device=tokens.device)
        finally:
            _current.reset(token)
        return output.logits[0].float()  # type: ignore[no-any-return]  # transformers is untyped here
