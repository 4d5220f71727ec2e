"""What a comparison of compiled layers with transformers' found."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import geometric_mean

import msgspec

SLOWER = 1.05
"""What compiled layers may lose and still run: less is noise, and they are more exact in bfloat16."""


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of whole passes with compiled layers and with transformers', by number of ``rows``.

    ``measured``: the day. Raises ValueError for numbers that no measurement gives.
    """

    rows: tuple[int, ...]
    compiled_s: tuple[float, ...]
    plain_s: tuple[float, ...]
    measured: str

    def __post_init__(self) -> None:
        """Check what a file may say."""
        if not self.rows or not len(self.rows) == len(self.compiled_s) == len(self.plain_s):
            raise ValueError("a verdict has as many seconds as numbers of rows")
        if not all(isfinite(each) and each > 0 for each in (*self.compiled_s, *self.plain_s)):
            raise ValueError("seconds of a verdict are positive")

    @property
    def speedup(self) -> float:
        """How many times as fast compiled layers are, each number of rows weighing the same."""
        return geometric_mean(p / c for c, p in zip(self.compiled_s, self.plain_s, strict=True))

    @property
    def compiled(self) -> bool:
        """Whether compiled layers run."""
        return self.speedup * SLOWER >= 1

    def __str__(self) -> str:
        """As in the log."""
        times = ", ".join(
            f"{1e3 * c:.3g} against {1e3 * p:.3g} ms for {n} row{'s'[: n > 1]}"
            for n, c, p in zip(self.rows, self.compiled_s, self.plain_s, strict=True)
        )
        return f"compiled layers are {self.speedup:.2g} times as fast as transformers' ({times})"


@dataclass(frozen=True)
class LayerChoice:
    """A verdict that decided how layers run, and where it is kept. ``remembered``: from an earlier start.

    ``question``: what it is about.
    """

    verdict: Verdict
    remembered: bool
    path: Path
    question: Mapping[str, str]

    def __str__(self) -> str:
        """As in the log and in `foretick check`."""
        if not self.remembered:
            return f"{self.verdict}, measured now"
        return f"{self.verdict}, remembered from {self.verdict.measured} in {self.path}"
