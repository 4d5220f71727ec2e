"""Loading a causal language model and proving, before it serves, that it computes what the dense model does.

transformers' own modelling code runs unmodified; its `AttentionInterface` hands every layer's queries, keys
and values to `region_attention`. Some architectures pass through silently wrong (hybrids, learned positions,
other rotary layouts), so loading ends with a *canary*: every layer calls us once, packed equals dense, also
when the tokens lie in two position frames. A model that fails is refused with the reason.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from engine.attention import Attention, LayerCall
from engine.batch import BatchPlan
from engine.rotary import FrameTurner, find_turner
from regions.pool import KVPool, LayerShape

ATTENTION = "foretick_regions"
disable_progress_bar()


class ModelError(Exception):
    """The model cannot be served; the message says why."""


@dataclass
class Pass:
    """What the attention function needs during one forward pass."""

    plan: BatchPlan
    pool: KVPool
    slots: torch.Tensor | slice
    attention: Attention
    turner: FrameTurner
    calls: int = 0


Probe = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called instead of attention with (layer, key, value) while shapes are discovered."""

# Some layers drop the extra keyword arguments of a forward call, so the current pass is kept here; one
# worker thread owns the device.
_current = threading.local()


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
        raise ModelError("transformers built an attention mask: this architecture masks in its own way")
    if s_aux is not None:
        raise ModelError("attention sinks are not supported")
    work: Pass | Probe = _current.work
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # a plain int on every attention module
    if not isinstance(work, Pass):
        work(layer, key, value)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    work.calls += 1
    work.pool.keys[layer][:, work.slots] = key[0]
    work.pool.values[layer][:, work.slots] = value[0]
    output = work.attention(
        LayerCall(
            query[0],
            key[0],
            value[0],
            work.pool.keys[layer],
            work.pool.values[layer],
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap,
            sliding_window,
            work.plan,
            work.turner,
        )
    )
    return output.transpose(0, 1)[None], None


AttentionInterface.register(ATTENTION, region_attention)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run over regions."""

    model: Any
    tokenizer: Any
    layers: tuple[LayerShape, ...]
    turner: FrameTurner
    name: str
    revision: str
    untrained: bool
    max_positions: int

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' type; KV has it too."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @torch.inference_mode()
    def forward(self, work: Pass, tokens: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """One pass over packed ``tokens`` [rows]; logits of rows ``keep``, fp32 [keep, vocabulary]."""
        _current.work = work
        try:
            output = self.model(
                input_ids=tokens[None],
                position_ids=work.plan.positions()[None],
                use_cache=False,
                logits_to_keep=keep,
            )
        finally:
            _current.work = None
        return output.logits[0].float()  # type: ignore[no-any-return]  # transformers is untyped here


def load_model(path: Path, *, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load the causal language model and tokenizer in directory ``path``.

    Raises ModelError when the directory or its architecture cannot be served.
    """
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model directory: it has no config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=_dtype(dtype), attn_implementation="eager"
        )
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ModelError(f"{path} cannot be loaded: {error}") from error
    model.to(resolve_device(device))
    return prepare(model, tokenizer, name=path.name, revision=_revision(path))


def prepare(model: Any, tokenizer: Any, *, name: str, revision: str = "") -> LoadedModel:
    """Wrap a loaded transformers model. Raises ModelError when our attention cannot serve it."""
    model.eval().requires_grad_(False)
    turner = find_turner(model)
    if turner is None:
        raise ModelError(
            f"{model.config.model_type}: not exactly one rotary position base, which frames need"
        )
    return LoadedModel(
        model,
        tokenizer,
        _probe(model),
        turner,
        name,
        revision,
        bool(getattr(model.config, "foretick_untrained", False)),
        int(getattr(model.config, "max_position_embeddings", 0) or 1 << 30),
    )


def resolve_device(device: str) -> str:
    """``auto`` is the GPU if there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError("device cuda was asked for and no GPU is visible")
    return device


def _dtype(name: str) -> Any:
    return "auto" if name == "auto" else getattr(torch, name)


@torch.inference_mode()
def _probe(model: Any) -> tuple[LayerShape, ...]:
    """Per-layer KV shapes, from one token's pass; proves that every layer calls us exactly once."""
    kind = model.config.model_type
    shapes: dict[int, LayerShape] = {}
    calls: list[int] = []

    def probe(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        calls.append(layer)
        shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])

    model.set_attn_implementation(ATTENTION)
    _current.work = probe
    try:
        zero = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        model(input_ids=zero, position_ids=zero, use_cache=False)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{kind}: its forward pass does not run over our attention: {error}") from error
    finally:
        _current.work = None
    expected = list(range(int(model.config.get_text_config().num_hidden_layers)))
    if calls != expected:
        raise ModelError(f"{kind}: layers {calls} reach our attention, expected each of {len(expected)} once")
    return tuple(shapes[layer] for layer in expected)


def _revision(path: Path) -> str:
    """A fingerprint of the configuration, the tokenizer and the headers of the weights."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(path.iterdir()):
        if file.suffix == ".safetensors":
            with file.open("rb") as stream:
                digest.update(stream.read(int.from_bytes(stream.read(8), "little")))
            digest.update(str(file.stat().st_size).encode())
        elif file.suffix == ".json":
            digest.update(file.read_bytes())
    return digest.hexdigest()
