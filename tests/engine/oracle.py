"""The oracle of KV state: the unmodified model run densely over the whole history, nothing cached.

All tokens go through the model at position 0, where rotary embedding is the identity; this attention then
rotates queries and keys itself, in float64, to the positions the semantics prescribe: a tape token at
stream coordinate ``s`` sees a tape key at ``s'`` at distance ``s - s'`` and frozen key ``i`` at distance
``frozen + s - evicted - i``, where ``evicted`` is what had left the window when the token was computed. It
knows nothing of extents, frames or pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM

from engine.model import ATTENTION, LoadedModel, prepare

VOCABULARY = 199
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 9},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 7.0,
    },
}


def tiny(architecture: str, *, layers: int = 4, **extra: Any) -> LoadedModel:
    """A tiny random model of the architecture, fp32."""
    config = CONFIG_MAPPING[architecture](
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **ARCHITECTURES.get(architecture, {}),
            **extra,
        }
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.5 if "embed" in name else 0.08)
    return prepare(model, None, name=f"tiny-{architecture}")


@dataclass(frozen=True)
class History:
    """Every token ever computed, frozen prefix first.

    ``coords`` are stream coordinates (frozen ones: their index); ``evicted`` what had left the window
    when each token was computed; ``owner`` 0 for frozen and tape, else the fork that owns the token.
    """

    tokens: list[int]
    frozen: int
    coords: list[int]
    evicted: list[int]
    owner: list[int]

    @classmethod
    def begin(cls, frozen: list[int]) -> History:
        n = len(frozen)
        return cls(list(frozen), n, list(range(n)), [0] * n, [0] * n)

    def add(self, tokens: list[int], coord: int, evicted: int, owner: int = 0) -> slice:
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.coords.extend(range(coord, coord + len(tokens)))
        self.evicted.extend([evicted] * len(tokens))
        self.owner.extend([owner] * len(tokens))
        return slice(start, start + len(tokens))


def _rotate(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    angles = positions.double()[:, None] * inv_freq.double()
    half = x.shape[-1] // 2
    first, second = x[..., :half].double(), x[..., half:].double()
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


_history: list[History] = []
_inv_freq: list[torch.Tensor] = []


def _oracle_attention(module, query, key, value, mask, scaling=None, sliding_window=None, softcap=None, **_):  # type: ignore[no-untyped-def]
    history, inv_freq = _history[-1], _inv_freq[-1]
    frozen, total = history.frozen, len(history.tokens)
    coords, evicted = torch.tensor(history.coords), torch.tensor(history.evicted)
    owner = torch.tensor(history.owner)
    is_frozen = torch.arange(total) < frozen
    groups = query.shape[1] // key.shape[1]
    keys = key[0].repeat_interleave(groups, 0)
    values = value[0].repeat_interleave(groups, 0).double()
    # query and key positions for the two kinds of keys
    anchored = torch.where(is_frozen, coords, frozen + coords - evicted)
    to_frozen = _rotate(query[0], anchored, inv_freq) @ _rotate(keys, coords, inv_freq).transpose(1, 2)
    to_tape = _rotate(query[0], coords, inv_freq) @ _rotate(keys, coords, inv_freq).transpose(1, 2)
    scores = torch.where(is_frozen[None, None], to_frozen, to_tape) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.where(is_frozen[None], anchored[:, None] - coords[None], coords[:, None] - coords[None])
    alive = is_frozen[None] | (~is_frozen[:, None] & (coords[None] >= evicted[:, None]))
    mine = (owner[None] == 0) | (owner[None] == owner[:, None])
    visible = (distance >= 0) & alive & mine & ~(is_frozen[:, None] & ~is_frozen[None])
    # a fork reads the version it was taken from: tape tokens beyond its own first coordinate are invisible
    later = (owner[:, None] > 0) & (owner[None] == 0) & ~is_frozen[None]
    first = {
        o: min(c for c, w in zip(history.coords, history.owner, strict=True) if w == o)
        for o in set(history.owner)
    }
    starts = torch.tensor([first[o] for o in history.owner])
    visible &= ~(later & (coords[None] >= starts[:, None]))
    if sliding_window:
        visible &= distance < sliding_window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1)
    return (weights @ values).to(query.dtype).transpose(0, 1)[None], None


AttentionInterface.register("oracle", _oracle_attention)


@torch.inference_mode()
def oracle_logits(loaded: LoadedModel, history: History) -> torch.Tensor:
    """Logits of every token of ``history``, fp32 [tokens, vocabulary]."""
    _history.append(history)
    _inv_freq.append(loaded.model.model.rotary_emb.inv_freq)
    loaded.model.set_attn_implementation("oracle")
    try:
        ids = torch.tensor([history.tokens])
        return (
            loaded.model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False).logits[0].float()
        )
    finally:
        loaded.model.set_attn_implementation(ATTENTION)
        _history.pop()
        _inv_freq.pop()
