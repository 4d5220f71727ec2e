"""What the question benchmark found, as plain data: rendering it needs no torch."""

from __future__ import annotations

import msgspec

from bench.figures import Latency, slope_ms_per_1k


class Disagreement(RuntimeError):
    """Two contenders that read the same tokens gave different answers."""


class Point(msgspec.Struct, frozen=True):
    """One context size: medians of the question's latency in ms; ``dense_ms`` where it ran.

    ``update_tokens``: read right before, in ``ingest_ours_ms`` and ``ingest_kept_ms``; older files lack them.
    """

    context_tokens: int
    ours_ms: float
    kept_ms: float
    dense_ms: float | None
    update_tokens: int = 0
    ingest_ours_ms: float | None = None
    ingest_kept_ms: float | None = None


class Questions(msgspec.Struct, frozen=True):
    """One model's figures. Ratios are ours over the reference, medians over pairs taken in turn."""

    model: str
    parameters: int
    question_tokens: int
    bar_tokens: float
    bars_an_update: int
    ours: Latency
    kept: Latency
    ratio_kept: float
    ratio_dense: list[float]
    ingest_ours: Latency
    ingest_kept: Latency
    ingest_ratio: float
    agreed: int
    compared: int
    largest_logit_difference: float
    points: list[Point]

    @property
    def slope_ours(self) -> float:
        """Ms for 1,000 tokens of context, through the medians: a few stalled samples would decide it else."""
        return slope_ms_per_1k(
            [p.context_tokens for p in self.points], [p.ours_ms * 1e6 for p in self.points]
        )

    @property
    def slope_kept(self) -> float:
        """The same of the kept cache."""
        return slope_ms_per_1k(
            [p.context_tokens for p in self.points], [p.kept_ms * 1e6 for p in self.points]
        )
