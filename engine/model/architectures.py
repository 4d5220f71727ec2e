"""Architectures that are tested over regions, and those known to give wrong results, with the reason.

The tables name transformers' ``model_type``. Other models may still be served: `engine.model.probe` and
`engine.model.canary` measure them at load time and refuse those that do not work.
"""

import logging
from typing import Any

log = logging.getLogger(__name__)


class ModelError(Exception):
    """The model cannot be served; the message says why."""


TESTED: dict[str, str] = {
    "llama": "Llama 2 and 3.x; `llama3` and other fixed rope scalings",
    "qwen2": "bias on queries, keys and values",
    "qwen3": "norms on queries and keys",
    "qwen3_moe": "mixture of experts",
    "mistral": "sliding window",
    "mixtral": "mixture of experts",
    "gemma2": "soft-capped scores and logits, sliding window on every second layer",
    "gemma3_text": "one rope base for sliding and one for full layers",
    "gemma3": "the language model alone; images are never given",
    "phi3": "fused projections, partial rotary; with `longrope` served up to its original length",
    "smollm3": "every fourth layer without positions",
    "gpt_oss": "attention sinks, mixture of experts, sliding window on every second layer, YaRN",
}
"""Tested architectures and their special features."""

_LEARNED = "it adds positions to the token embeddings, which cannot be rotated between frames"
_ALIBI = "its positions are a bias on the scores (ALiBi), not a rotation of queries and keys"
_PAIRS = (
    "its rotary embedding rotates neighbouring dimensions in pairs, frames rotate the two halves of a head"
)
_STATE = "some of its layers keep a recurrent or convolutional state, which can be neither forked nor evicted"
_LATENT = "its latent attention has the rotary dimensions last in a head, frames rotate the first ones"
_CHUNKS = (
    "some of its layers attend within fixed chunks of positions, whose borders move when records are evicted"
)
_OWN = "it computes attention in code of its own, which regions cannot replace"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "biogpt", "xglm", "ctrl", "openai-gpt"), _LEARNED
    ),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(("cohere", "cohere2", "glm", "glm4", "ernie4_5", "ernie4_5_moe", "helium"), _PAIRS),
    **dict.fromkeys(("gptj", "codegen"), _PAIRS),
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "zamba", "zamba2"), _STATE
    ),
    **dict.fromkeys(
        ("jamba", "bamba", "falcon_h1", "nemotron_h", "kimi_linear", "minimax", "olmo_hybrid"), _STATE
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _STATE),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _STATE),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("llama4", "llama4_text"), _CHUNKS),
    **dict.fromkeys(("falcon", "gpt_neox_japanese"), _OWN),
    "diffllama": "each of its layers attends twice and subtracts, regions keep one attention a layer",
}
"""Architectures that would run with wrong results, and why."""


def check_known(config: Any) -> None:
    """Warn about an untested architecture. Raises ModelError for one known to give wrong results."""
    kinds = dict.fromkeys((config.model_type, config.get_text_config().model_type))
    for kind in kinds:
        if kind in REFUSED:
            raise ModelError(f"{kind} is not supported: {REFUSED[kind]}")
    if not TESTED.keys() & kinds:
        log.warning(
            "%s is not in the table of tested architectures: served if its canary passes", config.model_type
        )
