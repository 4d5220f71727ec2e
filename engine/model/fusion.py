"""torch.compile over decoder layers on a GPU that `engine.fused` does not know: it fuses their small kernels.

Norms, rotations, activations and sums are most launches of a pass and move little, so a pass of few rows
waits for them: on an H200, a token of an 8B model takes 8.4 ms by transformers' layers and 7.2 ms fused, a
question of 40 tokens 11.9 and 9.9 ms (`docs/benchmarks.md`). Attention stays one opaque call, at which each
layer is split. All layers of a kind share what is compiled, for one row and for any number of rows.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of configurations whose layers route tokens by values on the host, where compiling breaks off."""


def fuses(model: Any) -> bool:
    """Whether ``model`` runs on a GPU and its layers do not depend on values."""
    config = model.config.get_text_config()
    return model.device.type == "cuda" and not any(getattr(config, name, None) for name in EXPERTS)


def fuse(layers: nn.ModuleList) -> None:
    """Compile the layers, each when it first runs. Errors of the compiler are raised there."""
    for kind in {type(layer) for layer in layers}:
        forward = torch.compile(kind.forward, dynamic=True)
        for layer in layers:
            if type(layer) is kind:
                vars(layer)["forward"] = partial(forward, layer)


def as_written(device: torch.device) -> AbstractContextManager[None]:
    """A context in which compiled layers run as transformers wrote them."""
    # not on a CPU: nothing is compiled there, and importing the compiler takes a second
    if device.type == "cpu":
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
