"""What goes wrong in one run, and when: drawn from a seed."""

from dataclasses import dataclass
from random import Random
from typing import Literal

Fault = Literal[
    "kill gateway", "kill engine", "kill both", "terminate", "stop broker", "kill broker", "power loss",
    "fill disk", "zombie", "idle past expiry", "bad network", "delay commit", "kill standby",
]  # fmt: skip
Moment = Literal["settled", "sent", "answering"]
"""All is answered; a bar's records are acknowledged by the broker; the first answer of a bar is read back."""


@dataclass(frozen=True)
class Deck:
    """The first fault of a run, in turn: at least once, and then exactly once. Further ones are drawn."""

    at_least_once: tuple[Fault, ...]
    exactly_once: tuple[Fault, ...]

    @property
    def runs(self) -> int:
        """After so many seeds in a row each delivery has met all its faults."""
        return len(self.at_least_once) + len(self.exactly_once)

    def first(self, seed: int) -> tuple[Fault, bool]:
        """The fault, and whether delivery is exactly once."""
        cards = [(each, False) for each in self.at_least_once] + [(each, True) for each in self.exactly_once]
        return cards[seed % len(cards)]


DECK = Deck(
    (
        "kill engine", "kill broker", "zombie", "kill gateway", "bad network",
        "power loss", "fill disk", "delay commit", "kill both", "terminate",
    ),
    (
        "kill engine", "kill broker", "zombie", "kill gateway", "bad network",
        "power loss", "fill disk", "delay commit", "stop broker", "idle past expiry",
    ),
)  # fmt: skip
"""Idle past expiry takes half a minute, and concerns transactions alone."""
_PAIR: tuple[Fault, ...] = (
    "kill gateway", "kill engine", "zombie", "terminate", "kill broker", "bad network",
    "kill standby", "kill both", "power loss", "stop broker", "fill disk", "delay commit",
)  # fmt: skip
PAIR_DECK = Deck(_PAIR, _PAIR)
"""Two daemons, of which one stands by."""
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
    exactly_once: bool
    bars: int
    events: tuple[Event, ...]

    def __str__(self) -> str:
        delivery = "exactly once" if self.exactly_once else "at least once"
        return "\n".join([f"seed {self.seed}, {delivery}, {self.bars} bars", *map(str, self.events)])


def draw(seed: int, *, bars: int, faults: int, deck: Deck = DECK) -> Schedule:
    """A schedule with ``faults`` of them, each in a bar of its own, of more ``bars`` than that."""
    rng = Random(seed)
    first, exactly_once = deck.first(seed)
    chosen = [first, *rng.choices(deck.at_least_once + deck.exactly_once, k=faults - 1)]
    rng.shuffle(chosen)
    at = sorted(rng.sample(range(bars - 1), faults))  # a bar without a fault comes last
    return Schedule(
        seed,
        exactly_once,
        bars,
        tuple(
            Event(n, fault, rng.choice(("settled", "sent", "answering")), rng.randrange(LATEST_MS))
            for n, fault in zip(at, chosen, strict=True)
        ),
    )
