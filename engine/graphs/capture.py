"""Can a model's forward pass be captured in a CUDA graph? Found out on any machine, without running it.

Fake tensors have shapes and no values: code that reads a device value on the host (a routing table of
experts, rotary tables that follow the longest position) raises under them, as it would break a capture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface

_TRACE = "foretick_trace"


def _no_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(_TRACE, _no_attention)


def capture_obstacle(model: Any, attention: str) -> str | None:
    """Why ``model``'s forward cannot be captured, None if it can. ``attention``: what it is set back to."""
    model.set_attn_implementation(_TRACE)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
            ids = torch.zeros(1, 8, dtype=torch.long, device=model.device)
            keep = torch.zeros(2, dtype=torch.long, device=model.device)
            model(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=keep)
    except Exception as error:  # whatever it is, the pass does not go through without values
        message = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {message[:200]}"
    finally:
        model.set_attn_implementation(attention)
    return None
