"""A plain model on a CPU, loaded by what an earlier start found: without transformers' modelling code.

Importing that code takes longer than all else that a start does with a small model, and what it is imported
for comes out alike each time: shapes and rotations (`engine.model.probe`), whose layers are faster
(`engine.compiled.pass_selftest`), and the dense logits by which the canary judges. They are kept by the
fingerprint of model, libraries and code (`engine.measurement_cache`); weights are read from the checkpoint
itself, and the canary compares with the logits that were kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from engine.attention.rotary import FrameRotation
from engine.compiled.decoder import CompiledDecoder
from engine.compiled.packing import PlainShape, Weight, packed
from engine.compiled.verdict import LayerChoice, Verdict
from engine.measurement_cache import Memory, Question
from engine.model import canary
from engine.model.architectures import ModelError
from engine.model.kept import codes_of, held_as
from engine.model.loaded import Layers, LoadedModel, ModelSizes, Weights
from engine.model.lora import read_adapter
from engine.model.quantised import EMBEDDING, HEAD, Quantised
from engine.model.revision import name_of, revision_of
from regions.kv_tensors import LayerShape
from support import numba_kernel

log = logging.getLogger(__name__)

MEMORY = Memory()
"""Of loads."""
_ROOT = Path(__file__).parent.parent
_CODE = tuple(_ROOT / name for name in ("", "attention", "compiled", "model"))
_VARYING = ("dynamic", "longrope")
"""Kinds of rotary tables that follow the longest position."""

Tensors = dict[str, torch.Tensor]


class Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of a load; members as of `LoadedModel`.

    ``tables``: distinct inverse frequencies, float64; ``rotations``: each layer's, by number. ``inv_freq``
    (float32) and ``scaling``: of the model's own rotary module. ``compared``: what a verdict of whose layers
    are faster is about, if there was one. ``logits``: of `canary.to_keep`, float32. ``tokenizer``: module and
    name of its class, which transformers takes seconds to find.
    """

    sizes: ModelSizes
    layers: tuple[LayerShape, ...]
    tables: tuple[bytes, ...]
    rotations: tuple[int, ...]
    max_positions: int
    untrained: bool
    trims: bool
    described: dict[str, Any]
    end_ids: tuple[int, ...]
    generation: dict[str, Any]
    shape: PlainShape
    inv_freq: bytes
    scaling: float
    dtype: Literal["float32", "bfloat16"]
    pairs: bool
    compared: dict[str, str] | None
    logits: bytes
    tokenizer: str


@dataclass(frozen=True)
class FixedRotary:
    """Angles as transformers' rotary modules compute them where their table never changes, to the bit."""

    inv_freq: torch.Tensor
    scaling: float

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Rotary`."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def remember(
    loaded: LoadedModel,
    path: Path,
    dtype: str,
    layers: Layers,
    memory: Memory | None = None,
    adapter: Path | None = None,
) -> None:
    """Keep how the model in directory ``path`` was loaded, if `recall` can load it by that.

    ``memory``: `MEMORY` by default. ``adapter``: as of `load_model`. Call it before the model's plain weights
    are released.
    """
    memory = memory or MEMORY
    decoder, choice = loaded.decoder, loaded.choice
    chosen = choice is not None or layers != "auto" or loaded.weights != "float"
    if not isinstance(decoder, CompiledDecoder) or not chosen:
        return
    model, rotary = loaded.model, loaded.model.model.rotary_emb
    state = model.state_dict()
    if any(kind in str(rotary.rope_type) for kind in _VARYING) or not _reads_back(
        path, loaded, state, adapter
    ):
        return
    tokenizer = f"{type(loaded.tokenizer).__module__}:{type(loaded.tokenizer).__name__}"
    if not _is_loaded_by(tokenizer, path, loaded.tokenizer):
        return
    tables = list(dict.fromkeys(loaded.rotations))
    found = Found(
        sizes=loaded.sizes,
        layers=loaded.layers,
        tables=tuple(each.inv_freq.numpy().tobytes() for each in tables),
        rotations=tuple(map(tables.index, loaded.rotations)),
        max_positions=loaded.max_positions,
        untrained=loaded.untrained,
        trims=loaded.trims,
        described=dict(loaded.described),
        end_ids=tuple(sorted(loaded.end_ids)),
        generation=dict(loaded.generation),
        shape=PlainShape.of(model),
        inv_freq=rotary.inv_freq.float().numpy().tobytes(),
        scaling=float(rotary.attention_scaling),
        dtype="bfloat16" if loaded.dtype == torch.bfloat16 else "float32",
        pairs=decoder.pairs,
        compared=None if choice is None else dict(choice.question),
        logits=canary.to_keep(loaded).numpy().tobytes(),
        tokenizer=tokenizer,
    )
    memory.remember(_question(loaded.revision, dtype, layers), found)


def recall(
    path: Path,
    dtype: str,
    layers: Layers,
    memory: Memory | None = None,
    adapter: Path | None = None,
    weights: Weights = "auto",
) -> LoadedModel | None:
    """The model in directory ``path`` as an earlier start loaded it, its canary passed.

    None where that is not known, or does not hold any more: then load it as if for the first time.
    """
    memory = memory or MEMORY
    if layers not in ("auto", "compiled") or not (path / "config.json").is_file():
        return None
    held = held_as(path, weights, layers, dtype, "cpu", adapter)
    try:
        revision = revision_of(path, adapter, held)
    except OSError:
        return None
    found = memory.recall(_question(revision, dtype, layers), Found)
    choice = None if found is None else _choice(found.compared, memory)
    if found is None or (found.compared is not None and choice is None):
        return None
    try:
        loaded = _loaded(found, path, adapter, revision, choice, held)
        canary.check(loaded, _floats(found.logits).view(-1, canary.KEPT))
    except (OSError, KeyError, ValueError, ImportError, SafetensorError, ModelError) as error:
        log.warning("%s is loaded as if for the first time: %s", path, error)
        return None
    if choice is not None:
        log.info("layers: %s", choice)
    return loaded


def _loaded(
    found: Found,
    path: Path,
    adapter: Path | None,
    revision: str,
    choice: LayerChoice | None,
    weights: Weights,
) -> LoadedModel:
    dtype: torch.dtype = getattr(torch, found.dtype)
    tables = [FrameRotation(torch.from_numpy(np.frombuffer(each).copy())) for each in found.tables]
    rotary = FixedRotary(_floats(found.inv_freq), found.scaling)
    return LoadedModel(
        None,
        _tokenizer(path, found.tokenizer),
        found.sizes,
        torch.device("cpu"),
        dtype,
        found.layers,
        tuple(tables[each] for each in found.rotations),
        name_of(path, adapter),
        revision,
        found.untrained,
        found.max_positions,
        found.trims,
        found.described,
        decoder=packed(_held(path, dtype, adapter, weights), found.shape, rotary, pairs=found.pairs),
        end_ids=frozenset(found.end_ids),
        generation=found.generation,
        choice=choice,
        weights=weights,
    )


def _held(path: Path, dtype: torch.dtype, adapter: Path | None, weights: Weights) -> Mapping[str, Weight]:
    """The tensors in directory ``path`` with those of an adapter, quantised where ``weights`` says so."""
    tensors = tensors_of(path, dtype, adapter)
    return {**tensors, **codes_of(path, tensors, weights)}


def _tokenizer(path: Path, kind: str) -> Any:
    """The tokenizer in directory ``path``, by its class. Raises ImportError, and what transformers raises."""
    return resolve_name(kind).from_pretrained(path, local_files_only=True)


def _is_loaded_by(kind: str, path: Path, tokenizer: Any) -> bool:
    """Whether the class alone makes the same ``tokenizer`` of the directory."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return False
    try:
        found = _tokenizer(path, kind)
    except Exception as error:  # whatever a class raises that is not made for this
        log.info("%s does not load by %s: %s", path, kind, error)
        return False
    one, other = (
        (each.backend_tokenizer.to_str(), each.special_tokens_map, getattr(each, "chat_template", None))
        for each in (tokenizer, found)
    )
    return one == other


def _question(revision: str, dtype: str, layers: Layers) -> Question:
    code = numba_kernel.fingerprint(_CODE)
    return {"about": "a load", "model": revision, "dtype": dtype, "layers": layers, "code": code}


def _choice(compared: Question | None, memory: Memory) -> LayerChoice | None:
    verdict = None if compared is None else memory.recall(compared, Verdict)
    if compared is None or verdict is None or not verdict.compiled:
        return None
    return LayerChoice(verdict, True, memory.path(compared), compared)


def tensors_of(path: Path, dtype: torch.dtype, adapter: Path | None = None) -> Tensors:
    """The weights in directory ``path``, with those of an adapter; a tied head is the embedding.

    Raises OSError, SafetensorError and AdapterError.
    """
    index = path / "model.safetensors.index.json"
    whole = path / "model.safetensors"
    names = {whole.name} if whole.is_file() else set(json.loads(index.read_bytes())["weight_map"].values())
    found: Tensors = {}
    for name in sorted(names):
        with safe_open(path / name, "pt") as file:
            found |= {key: file.get_tensor(key).to(dtype) for key in file.keys()}  # noqa: SIM118  # no mapping
    if adapter is not None:
        read_adapter(adapter).merge(found)
    found.setdefault(HEAD, found[EMBEDDING])
    return found


def _reads_back(
    path: Path, loaded: LoadedModel, state: Mapping[str, torch.Tensor], adapter: Path | None
) -> bool:
    """Whether the files hold exactly the tensors that transformers has made of them, or their codes do."""
    try:
        read = _held(path, loaded.dtype, adapter, loaded.weights)
    except (OSError, KeyError, ValueError, SafetensorError, ModelError):
        return False
    if read.keys() != state.keys():
        return False
    for name, each in read.items():
        plain = each.expanded().to(loaded.dtype) if isinstance(each, Quantised) else each
        if not torch.equal(plain, state[name]):
            return False
    return True


def _floats(kept: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(kept, np.float32).copy())
