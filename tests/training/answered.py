"""Answers of an imagined model: logits of known quality."""

import numpy as np

from tapes.rules import UNDEFINED
from training.sources import Answers


def answers(
    n: int,
    *,
    choices: tuple[str, ...] = ("UP", "DOWN"),
    sharpness: float = 2.0,
    seed: int = 0,
    tapes: int = 100,
) -> Answers:
    """Labels are drawn from the softmax of ``logits / sharpness``; NONE's logit shows the undefined tenth."""
    rng = np.random.default_rng(seed)
    true = rng.normal(0, 2, (n, len(choices)))
    weights = np.exp(true - true.max(1, keepdims=True))
    cumulated = np.cumsum(weights / weights.sum(1, keepdims=True), 1)
    label = np.minimum((rng.random((n, 1)) > cumulated).sum(1), len(choices) - 1)
    undefined = rng.random(n) < 0.1
    none = np.where(undefined, 60.0, -60.0)
    logits = np.concatenate([true * sharpness, none[:, None]], 1)
    return Answers(
        name="trend",
        choices=choices,
        logits=logits,
        label=np.where(undefined, UNDEFINED, label),
        before=np.roll(label, 1),
        margin=rng.normal(0, 1, n),
        guess=rng.integers(0, len(choices), n),
        tape=np.arange(n) % tapes,
        right=logits[:, :-1].argmax(1) == np.where(undefined, UNDEFINED, label),
    )
