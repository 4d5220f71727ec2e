"""Question packs of random weights, for a model directory of the tape model's tokenizer."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import load_file

from engine.model.question_pack import ANSWERS, TOKEN, Array, PackHead, QuestionPack, digest_of
from engine.model.revision import revision_of
from flash.confidence import QuestionCalibration
from training.tokenizer import NONE, build_tokenizer

TEXT, CHOICES = "Is the close near the high of the last ten bars?", ("YES", "NO")
FITTED = QuestionCalibration(
    name="near",
    text=TEXT,
    choices=list(CHOICES),
    temperature=2.0,
    scores=[(n + 1) / 250 for n in range(200)],
    labels=2000,
    mean_gap=1.0,
)


def random_pack(
    directory: Path, *, tokens: int = 1, rank: int = 2, seed: int = 0, **head: Any
) -> QuestionPack:
    """A pack that changes every matrix of the model; ``head``: other members of `PackHead`."""
    rng, weights = np.random.default_rng(seed), load_file(directory / "model.safetensors")

    def noise(*shape: int, scale: float = 1.0) -> Array:
        return (rng.normal(size=shape) * scale).astype(np.float32)

    width = weights["model.embed_tokens.weight"].shape[1]
    tensors = {TOKEN: noise(tokens, width), ANSWERS: noise(len(CHOICES) + 1, width)}
    for name in sorted(name.removesuffix(".weight") for name in weights if "proj" in name):
        outputs, inputs = weights[f"{name}.weight"].shape
        tensors[f"{name}.a"] = noise(rank, inputs, scale=inputs**-0.5)
        tensors[f"{name}.b"] = noise(outputs, rank, scale=0.5)
    tokenizer = build_tokenizer()
    answers = [tokenizer.encode(each, add_special_tokens=False)[0] for each in (*CHOICES, NONE)]
    said: dict[str, Any] = {
        "name": "near",
        "text": TEXT,
        "choices": CHOICES,
        "none": NONE,
        "answers": tuple(answers),
        "base": revision_of(directory),
        "lines": "compact",
        "window_bars": 8,
        "question": {},
        "calibrations": (msgspec.to_builtins(FITTED),),
        "card": {},
        "digest": digest_of(tensors),
    }
    return QuestionPack(PackHead(**said | head), tensors)
