"""The oracle of KV state: the unmodified model run densely over the whole history, without a cache.

All tokens go through the model at position 0, where rotary embedding is the identity; this attention then
rotates queries and keys itself, in float64, to the positions the semantics prescribe: a tape token at
stream coordinate ``s`` sees a tape key at ``s'`` at distance ``s - s'`` and frozen key ``i`` at distance
``frozen + s - evicted - i``, where ``evicted`` is what had left the window when the token was computed. It
knows nothing of extents, frames or pools. A layer's rotary table is the model's own, by the layer type of the
configuration; attention scaling of the rope is in queries and keys at position 0 already.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.model.fusion import as_written
from engine.model.loaded import ATTENTION, LoadedModel
from engine.model.loading import prepare
from engine.model.plain import is_plain
from regions.kv_codes import numbers, stored
from tests.kit import tolerance

DEVICE = os.environ.get("FORETICK_TEST_DEVICE", "cpu")
"""Where `tiny` models run: `cuda` gives the engine's tests to the kernels and graphs of a GPU."""
VOCABULARY = 199
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mistral": {"head_dim": 16, "sliding_window": 9},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 7.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
    },
    "phi3": {
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1, 1.3, 1.7],
            "long_factor": [2.0, 3.0, 5.0, 9.0],
            "original_max_position_embeddings": 128,
        },
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 9,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
}


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of `VOCABULARY` words, for `tiny` models on disk."""
    vocabulary = {f"w{token}": token for token in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w0")))


def tiny(architecture: str, *, layers: int = 4, **extra: Any) -> LoadedModel:
    """A tiny random model of the architecture, fp32."""
    weights = random_weights(tiny_config(architecture, layers=layers, **extra)).to(DEVICE)
    # torch.compile takes seconds for each of them, and is tested in `test_engine_gpu`
    ours = DEVICE == "cpu" or is_plain(weights)
    return prepare(weights, None, name=f"tiny-{architecture}", layers="compiled" if ours else "torch")


def tiny_config(architecture: str, *, layers: int = 4, **extra: Any) -> Any:
    """The configuration of that model; ``extra`` overrides it."""
    special = ARCHITECTURES.get(architecture, {})
    if "layer_types" in special:
        special = {**special, "layer_types": special["layer_types"][:layers]}
    return CONFIG_MAPPING[architecture](
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
            **special,
            **extra,
        }
    )


def random_weights(config: Any) -> Any:
    """A model of ``config``, fp32, always equal; wide weights make answers depend on the context."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.5 if "embed" in name else 0.08)
            elif "sinks" in name:
                torch.nn.init.normal_(parameter, std=1.0)
    return model


class Window:
    """What a tape's retention keeps, one record after the other: as if each came alone."""

    def __init__(self, max_tokens: int, max_records: int = 0) -> None:
        self._most_tokens, self._most_records = max_tokens, max_records
        self._lengths: deque[int] = deque()
        self.tokens = self.evicted = 0

    def add(self, length: int) -> int:
        """Add a record of so many tokens; returns the tokens that have left the window before it."""
        while self._lengths and (
            self.tokens + length > self._most_tokens or len(self._lengths) == self._most_records
        ):
            self.tokens -= self._lengths[0]
            self.evicted += self._lengths.popleft()
        self._lengths.append(length)
        self.tokens += length
        return self.evicted


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
    checks: list[tuple[slice, torch.Tensor]] = field(default_factory=list)
    stored_at: list[int] = field(default_factory=list)
    """Local positions of all tokens, at which keys are rounded to the model's type of KV; else none are."""

    @classmethod
    def begin(cls, frozen: list[int]) -> History:
        n = len(frozen)
        return cls(list(frozen), n, list(range(n)), [0] * n, [0] * n)

    def add(
        self,
        tokens: Sequence[int],
        coord: int,
        evicted: int,
        owner: int = 0,
        logits: torch.Tensor | None = None,
    ) -> slice:
        """``logits`` of the tokens are to be the oracle's, see `verify`."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.coords.extend(range(coord, coord + len(tokens)))
        self.evicted.extend([evicted] * len(tokens))
        self.owner.extend([owner] * len(tokens))
        where = slice(start, start + len(tokens))
        if logits is not None:
            self.checks.append((where, logits))
        return where

    def verify(self, loaded: LoadedModel) -> None:
        """All logits that were added are the oracle's."""
        expected = oracle_logits(loaded, self)
        for where, actual in self.checks:
            tolerance.assert_logits(loaded, actual, expected[where])


def _rotate(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    angles = positions.double()[:, None] * inv_freq.double()
    half = inv_freq.numel()
    first, second, rest = x.double().split([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _inv_freq_of(model: Any, layer: int) -> torch.Tensor:
    rotary = model.model.rotary_emb
    if not getattr(model.config, "no_rope_layers", [1] * (layer + 1))[layer]:
        return torch.empty(0, device=model.device)
    if hasattr(rotary, "inv_freq"):
        return rotary.inv_freq
    return getattr(rotary, f"{model.config.layer_types[layer]}_inv_freq")


_asked: list[tuple[Any, History, torch.dtype]] = []


def _oracle_attention(  # type: ignore[no-untyped-def]  # transformers' signature
    module, query, key, value, mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **_
):
    model, history, kind = _asked[-1]
    inv_freq = _inv_freq_of(model, module.layer_idx)
    frozen, total = history.frozen, len(history.tokens)
    here = partial(torch.tensor, device=query.device)
    coords, evicted, owner = here(history.coords), here(history.evicted), here(history.owner)
    is_frozen = torch.arange(total, device=query.device) < frozen
    groups = query.shape[1] // key.shape[1]
    key, value = key[0], value[0]
    if history.stored_at:
        at = here(history.stored_at)
        key = _rotate(numbers(stored(_rotate(key, at, inv_freq).float(), kind)).double(), -at, inv_freq)
        value = numbers(stored(value, kind))
    keys = key.repeat_interleave(groups, 0)
    values = value.repeat_interleave(groups, 0).double()
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
    starts = here([first[o] for o in history.owner])
    visible &= ~(later & (coords[None] >= starts[:, None]))
    if sliding_window:
        visible &= distance < sliding_window
    scores = scores.masked_fill(~visible, float("-inf"))
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.double()[:, None, None].expand(-1, total, 1)), -1)
    weights = torch.softmax(scores, -1)[..., :total]
    return (weights @ values).to(query.dtype).transpose(0, 1)[None], None


AttentionInterface.register("oracle", _oracle_attention)


@torch.inference_mode()
def oracle_logits(loaded: LoadedModel, history: History) -> torch.Tensor:
    """Logits of every token of ``history``, fp32 [tokens, vocabulary]."""
    _asked.append((loaded.model, history, loaded.kv_dtype))
    loaded.model.set_attn_implementation("oracle")
    try:
        ids = torch.tensor([history.tokens], device=loaded.device)
        with as_written(loaded.device):
            output = loaded.model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False)
        return output.logits[0].float()
    finally:
        loaded.model.set_attn_implementation(ATTENTION)
        _asked.pop()
