"""The load-time canary: a few tokens through regions must give the dense model's logits.

It runs on a pool of its own, in two position frames and across an append, which catches rotary layouts,
partial rotation and per-layer-type bases that our query turning does not reproduce.
"""

from __future__ import annotations

import torch

from engine.engine import Engine, Work
from engine.model import ATTENTION, LoadedModel, ModelError
from regions.tape import Retention

_FROZEN, _RECORD, _RECORDS = 5, 7, 6
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def check(loaded: LoadedModel) -> float:
    """The largest logit difference, relative to the largest logit. Raises ModelError above the tolerance."""
    total = _FROZEN + _RECORD * _RECORDS
    generator = torch.Generator().manual_seed(7)
    vocabulary = int(loaded.model.config.get_text_config().vocab_size)
    tokens = torch.randint(3, vocabulary, (total,), generator=generator).tolist()
    expected = dense_logits(loaded, tokens)
    actual = torch.cat(_over_regions(loaded, tokens))
    difference = float((actual - expected[_FROZEN:]).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not difference <= _TOLERANCE.get(loaded.dtype, 1e-1):
        raise ModelError(
            f"{loaded.model.config.model_type}: its logits over regions differ from the dense forward by "
            f"{difference:.2g} of the largest logit; the architecture is not supported"
        )
    return difference


@torch.inference_mode()
def dense_logits(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """The unmodified model's logits of every token, fp32 [tokens, vocabulary]."""
    loaded.model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([tokens], device=loaded.device)
        logits: torch.Tensor = loaded.model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        loaded.model.set_attn_implementation(ATTENTION)
    return logits


def _over_regions(loaded: LoadedModel, tokens: list[int]) -> list[torch.Tensor]:
    engine = Engine(loaded, blocks=16, block_size=4, frame_limit=1 << 30)
    tape = engine.open_tape("canary", tokens[:_FROZEN], Retention(len(tokens)))
    rows = []
    for i in range(_RECORDS):
        record = tokens[_FROZEN + i * _RECORD :][:_RECORD]
        if i == _RECORDS // 2:
            tape.new_frame(at=3)  # the second half lives in a frame of its own
        tape.acquire(_RECORD)
        rows.append(engine.logits([Work(tape, record)]))
        tape.commit([_RECORD])
    return rows
