"""LoRA adapters in peft's format: a directory with `adapter_config.json` and `adapter_model.safetensors`.

For each matrix W [outputs, inputs] that it changes, an adapter has A [rank, inputs] and B [outputs, rank]
(LoRA, arXiv 2106.09685). The model that is served has W + scale B A, merged once as it is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from engine.model.architectures import ModelError
from engine.model.revision import ADAPTER_CONFIG, ADAPTER_WEIGHTS, revision_of
from support.durable_file import replacing

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_BASE = "foretick_base"
"""In the metadata of the weights: the revision of the model that it was trained on."""


class AdapterError(ModelError):
    """The directory is no adapter, a broken one, or one of another model; the message names it."""


class _Config(msgspec.Struct, frozen=True):
    """What is read of adapter_config.json; other members do not change the weights."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: tuple[str, ...] | str
    base_model_name_or_path: str | None = None
    use_rslora: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    init_lora_weights: bool | str = True
    modules_to_save: tuple[str, ...] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_parameters: tuple[str, ...] | None = None
    trainable_token_indices: Any = None

    def unsupported(self) -> str:
        """What it has that is not merged here; "" is nothing."""
        if self.peft_type != "LORA":
            return f"peft_type {self.peft_type}"
        if self.bias != "none":
            return f"bias {self.bias}"
        if isinstance(self.init_lora_weights, str) and self.init_lora_weights != "gaussian":
            return f"init_lora_weights {self.init_lora_weights}"  # some change the base's weights
        names = (
            *("fan_in_fan_out", "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern"),
            *("target_parameters", "trainable_token_indices"),
        )
        return next((name for name in names if getattr(self, name)), "")


@dataclass(frozen=True)
class Adapter:
    """``matrices``: A and B, float32, by the module's name in the model. ``base``: revision of the model
    that it was trained on, "" where it does not say.
    """

    directory: Path
    scale: float
    matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    base: str = ""

    @property
    def rank(self) -> int:
        """Of all its matrices."""
        return next(len(a) for a, _ in self.matrices.values())

    def check(self, directory: Path) -> None:
        """Raise AdapterError where it was trained on another model than the one in ``directory``."""
        if self.base and self.base != (found := revision_of(directory)):
            raise AdapterError(
                f"the adapter {self.directory} was trained on model {self.base}, "
                f"and {directory.name} is {found}"
            )

    @torch.no_grad()
    def merge(self, tensors: MutableMapping[str, torch.Tensor]) -> None:
        """Change the weights of a model, in place, by name. Raises AdapterError before any is changed."""
        for name, (a, b) in self.matrices.items():
            weight, shape = tensors.get(f"{name}.weight"), [len(b), a.shape[1]]
            if weight is None:
                raise AdapterError(f"the adapter {self.directory} changes {name}, which the model lacks")
            if type(weight.data) is not torch.Tensor:
                raise AdapterError(f"the adapter {self.directory} changes {name}, whose weights are codes")
            if list(weight.shape) != shape:
                of = f"is for a {name} of {shape}, and the model's is {list(weight.shape)}"
                raise AdapterError(f"the adapter {self.directory} {of}: it was trained on another model")
        for name, (a, b) in self.matrices.items():
            weight = tensors[f"{name}.weight"]
            weight.copy_(weight.float() + (self.scale * (b @ a)).to(weight.device))


def read_adapter(directory: Path) -> Adapter:
    """Read an adapter. Raises AdapterError for what is broken, and for what is not merged here."""
    config = _config(directory / ADAPTER_CONFIG)
    file = directory / ADAPTER_WEIGHTS
    try:
        with safe_open(file, "pt") as opened:
            base = (opened.metadata() or {}).get(_BASE, "")
            found = {key: opened.get_tensor(key).float() for key in opened.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file} is missing, cut or broken: {error}") from error
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in found.items():
        named = _NAME.fullmatch(key)
        if named is None:
            raise AdapterError(f"{file} has {key}, which is no matrix of a LoRA")
        if not tensor.isfinite().all():
            raise AdapterError(f"{file} has numbers in {key} that are not finite")
        halves.setdefault(named[1], {})[named[2]] = tensor
    for name, pair in halves.items():
        if pair.keys() != {"A", "B"}:
            raise AdapterError(f"{file} has only one of the two matrices of {name}")
        ranks = [pair["A"].shape[0], pair["B"].shape[-1]]
        if pair["A"].dim() != 2 or pair["B"].dim() != 2 or ranks != [config.r, config.r]:
            raise AdapterError(f"{file}: {name} does not have the rank of its config, {config.r}")
    _check_targets(file, config, halves)
    scale = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    return Adapter(directory, scale, {name: (pair["A"], pair["B"]) for name, pair in halves.items()}, base)


def _config(file: Path) -> _Config:
    try:
        config = msgspec.json.decode(file.read_bytes(), type=_Config)
    except OSError as error:
        raise AdapterError(f"{file.parent} is no adapter: {file.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    if config.r < 1:
        raise AdapterError(f"{file}: r is {config.r}, and a rank is 1 or more")
    if why := config.unsupported():
        raise AdapterError(f"{file} has {why}, which is not merged here: merge it into a checkpoint by peft")
    return config


def _check_targets(file: Path, config: _Config, found: Mapping[str, Any]) -> None:
    """Raise AdapterError where modules that the config names have no matrices."""
    named = config.target_modules
    lost = [] if isinstance(named, str) else [
        each for each in named if not any(name == each or name.endswith(f".{each}") for name in found)
    ]  # fmt: skip
    if lost or not found:
        of = f"the target {lost[0]}" if lost else "any module"
        raise AdapterError(f"{file} has no matrices of {of}")


def write_adapter(adapter: Adapter, base: str) -> None:
    """Write an adapter into its directory as peft does; ``base``: the name of the model it was trained on.

    Its weights come last, so what a killed writer leaves is the old adapter or no readable one.
    """
    targets = sorted({name.rpartition(".")[2] for name in adapter.matrices})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": adapter.rank,
        "lora_alpha": adapter.scale * adapter.rank, "lora_dropout": 0.0, "bias": "none",
        "target_modules": targets, "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    tensors = {
        f"base_model.model.{name}.lora_{which}.weight": each.detach().float().contiguous()
        for name, pair in adapter.matrices.items()
        for which, each in zip("AB", pair, strict=True)
    }
    # one entry: several are written in any order, and equal adapters are to have equal files
    metadata = {_BASE: adapter.base} if adapter.base else {"format": "pt"}
    adapter.directory.mkdir(parents=True, exist_ok=True)
    written = {
        ADAPTER_CONFIG: json.dumps(config, indent=1).encode() + b"\n",
        ADAPTER_WEIGHTS: save(tensors, metadata),
    }
    for name, content in written.items():
        with replacing(adapter.directory / name, opened=lambda temporary: temporary.open("xb")) as out:
            out.write(content)
