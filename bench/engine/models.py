"""The models that are measured, loaded once for all parts of a run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.engine.floor import LimitsProbe
from bench.run import Run
from engine.model.embedded import embedded_directory
from engine.model.loading import LoadedModel, load_model

EIGHTY_SHAPE: dict[str, Any] = {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "vocabulary": 4096}
"""About 80 million parameters."""
_loaded: dict[str, tuple[LoadedModel, Any]] = {}


def load(shape: dict[str, Any], threads: int) -> tuple[LoadedModel, Any]:
    """One model twice: over regions, and as transformers runs it. ``shape``: of `embedded_directory`."""
    torch.set_num_threads(threads)
    path = embedded_directory(**shape)
    if str(path) not in _loaded:
        plain = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        _loaded[str(path)] = load_model(path, dtype="float32", device="cpu"), plain
    return _loaded[str(path)]


def of(run: Run) -> tuple[LoadedModel, Any]:
    """The engine suite's model: the larger one, or the embedded one where sizes are small."""
    return load({} if run.quick else EIGHTY_SHAPE, run.threads)


def probe(run: Run) -> LimitsProbe:
    """Of the machine's rates, with the run's threads."""
    torch.set_num_threads(run.threads)
    return LimitsProbe(256, 1 << 20) if run.quick else LimitsProbe()
