"""The seed of an answer: derived only from its prompt and the index of the token.

So an answer at any temperature is the same however it was batched, its prompt was cut into chunks, or it was
preempted. No torch here: the scheduler uses it, too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""Step of splitmix64's counter."""
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw token ``index`` of an answer at ``temperature`` above 0; ``seed``: 32 bits per answer.

    ``top_p``: draw among the likeliest tokens that together have this probability at the temperature.
    ``top_k``: draw among that many of the likeliest; 0: any. Neither applies where the token is one of given
    choices. Raises ValueError for a temperature that is not a number above 0, and for others out of range.
    """

    temperature: float
    seed: int
    index: int
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"a sampling temperature must be a number above 0, not {self.temperature}")
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError("top_p must lie above 0 and be at most 1, and top_k must be 0 or more")

    @property
    def cuts(self) -> bool:
        """Unlikely tokens are never drawn."""
        return self.top_p < 1 or self.top_k > 0

    def later(self, tokens: int) -> Sampling:
        """The sampling of the same answer ``tokens`` tokens later."""
        return replace(self, index=self.index + tokens)

    @property
    def key(self) -> int:
        """The start of the row's noise: 64 bits, different for every (seed, index) below 2**32."""
        return mix(((self.seed << 32) | self.index) & MASK)


def prompt_seed(tokens: Sequence[int]) -> int:
    """The 32-bit seed of a prompt (*Attention Once* equation 20); a token id is 4 bytes, little-endian."""
    return fnv1a(struct.pack(f"<{len(tokens)}I", *tokens))


def answer_seed(prompt: int, seed: int, index: int) -> int:
    """The 32-bit seed of answer ``index`` to a prompt of seed ``prompt``, as a client's ``seed`` asks."""
    return fnv1a(struct.pack("<IqI", prompt, seed, index))


def fnv1a(data: bytes) -> int:
    """The 32-bit FNV-1a hash."""
    value = 0x811C9DC5
    for byte in data:
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def mix(value: int) -> int:
    """splitmix64's finaliser, a permutation of 64-bit numbers; every bit depends on every bit."""
    first, second = MULTIPLIERS
    value = (value ^ value >> SHIFTS[0]) * first & MASK
    value = (value ^ value >> SHIFTS[1]) * second & MASK
    return value ^ value >> SHIFTS[2]


def signed(value: int) -> int:
    """The same 64 bits as a signed number, for a tensor."""
    return value - (1 << 64) if value >> 63 else value
