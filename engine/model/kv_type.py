"""KV in another type than the weights, on a CPU: bfloat16 under float32, or 8 bits (`regions.kv_codes`)."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import Literal

import torch

from engine.model import canary
from engine.model.architectures import ModelError
from engine.model.loaded import LoadedModel

KVType = Literal["auto", "bfloat16", "int8"]
"""``auto``: that of the weights."""


def kv_dtype(kv: KVType, weights: torch.dtype) -> torch.dtype:
    """The type of KV beside such ``weights``."""
    return weights if kv == "auto" else getattr(torch, kv)


def with_kv(loaded: LoadedModel, kv: KVType) -> LoadedModel:
    """``loaded``, whose canary has passed, with KV of another type; a model of its own, by its revision.

    Raises ModelError on a GPU, and where its logits differ too much from those without.
    """
    found = kv_dtype(kv, loaded.dtype)
    if found == loaded.dtype:
        return loaded
    if loaded.device.type != "cpu":
        raise ModelError(f"model.kv_dtype is {kv}, which is for a CPU; on a GPU, KV is of the weights' type")
    revision = blake2b(f"{loaded.revision} {kv}".encode(), digest_size=8).hexdigest()
    other = replace(loaded, kv=found, revision=revision)
    canary.check_kv(loaded, other)
    return other
