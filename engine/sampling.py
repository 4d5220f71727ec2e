"""Greedy choice with its confidence: the logit gap of *Attention Once* equation 10."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Choice:
    """The best token and the two highest logits of the set it was chosen from.

    ``error`` is set, and the token meaningless, when the logits are not finite.
    """

    token: int
    top1: float
    top2: float
    error: str | None = None


def choose(logits: torch.Tensor, choices: Sequence[tuple[int, ...] | None]) -> list[Choice]:
    """The argmax of each row of ``logits`` [rows, vocabulary], restricted to ``choices[row]`` if given.

    A single choice has no second best: its gap is zero.
    """
    finite = torch.isfinite(logits).all(-1).tolist()
    values, tokens = torch.topk(logits, 2, dim=-1)
    best = list(zip(values.tolist(), tokens.tolist(), strict=True))
    rows: list[Choice] = []
    for row, allowed in enumerate(choices):
        if not finite[row]:
            rows.append(Choice(0, 0.0, 0.0, "the model's logits are not finite"))
        elif allowed is None:
            (top1, top2), (token, _) = best[row]
            rows.append(Choice(token, top1, top2))
        else:
            ranked = sorted(zip(logits[row, list(allowed)].tolist(), allowed, strict=True), reverse=True)
            rows.append(Choice(ranked[0][1], ranked[0][0], ranked[min(1, len(ranked) - 1)][0]))
    return rows
