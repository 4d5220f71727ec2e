"""What goes wrong in one run, and when: drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

Fault = Literal[
    "kill front", "kill engine", "kill both", "terminate", "stop broker", "kill broker", "fill disk",
    "zombie", "idle past expiry", "kill standby",
]  # fmt: skip
Moment = Literal["settled", "sent", "answering"]
"""All is answered; a bar's records are acknowledged by the broker; the first answer of a bar is read back."""

DECK: tuple[Fault, ...] = (
    "kill engine", "kill broker", "kill both", "stop broker", "kill engine",
    "fill disk", "kill front", "kill broker", "kill engine", "terminate",
    "stop broker", "kill both", "fill disk", "idle past expiry", "zombie",
    "kill broker", "kill front", "kill engine", "stop broker", "terminate",
)  # fmt: skip
"""The first fault of a run by its seed, so that a few runs have all of them."""
PAIR_DECK: tuple[Fault, ...] = (
    "kill front", "kill engine", "zombie", "terminate", "kill broker",
    "kill standby", "kill both", "kill engine", "stop broker", "fill disk",
)  # fmt: skip
"""The same for two daemons, of which one stands by."""
LATEST_MS = 60
"""A fault strikes up to so long after its moment."""


@dataclass(frozen=True)
class Event:
    """``fault`` strikes ``delay_ms`` after ``moment`` of bar ``bar``, counted from the first of the run."""

    bar: int
    fault: Fault
    moment: Moment
    delay_ms: int

    def __str__(self) -> str:
        return f"bar {self.bar}: {self.fault}, {self.delay_ms} ms after {self.moment}"


@dataclass(frozen=True)
class Schedule:
    """``bars`` closed bars, and what goes wrong meanwhile, by bar."""

    seed: int
    bars: int
    events: tuple[Event, ...]

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}, {self.bars} bars", *map(str, self.events)])


def draw(seed: int, *, bars: int, faults: int, deck: tuple[Fault, ...] = DECK) -> Schedule:
    """A schedule with ``faults`` of them, each in a bar of its own, of more ``bars`` than that."""
    rng = Random(seed)
    chosen = [deck[seed % len(deck)], *rng.choices(deck, k=faults - 1)]
    rng.shuffle(chosen)
    at = sorted(rng.sample(range(bars - 1), faults))  # a bar without a fault comes last
    return Schedule(
        seed,
        bars,
        tuple(
            Event(n, fault, rng.choice(("settled", "sent", "answering")), rng.randrange(LATEST_MS))
            for n, fault in zip(at, chosen, strict=True)
        ),
    )
