"""3-PARTITION as a query stream: why meeting a TTFT for all is NP-hard (*k-LPM* definition 3, theorem 1)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lab.theory.query_stream import QueryStream

SPREAD = 4  # the modulus, and the number of odd ones out, of an instance without a split


@dataclass(frozen=True)
class ThreePartition:
    """Definition 3: can the 3m numbers be split into m triples of sum `target` each?

    Raises ValueError unless there are 3m > 0 numbers strictly between target / 4 and target / 2 with sum
    m * target.
    """

    numbers: tuple[int, ...]
    target: int

    def __post_init__(self) -> None:
        if not self.numbers or len(self.numbers) % 3:
            raise ValueError(f"3-PARTITION needs a multiple of three numbers, not {len(self.numbers)}")
        if any(not self.target < 4 * a < 2 * self.target for a in self.numbers):
            raise ValueError(f"each number must lie between {self.target}/4 and {self.target}/2")
        if sum(self.numbers) != self.m * self.target:
            raise ValueError(f"the numbers sum to {sum(self.numbers)}, not to {self.m} * {self.target}")

    @property
    def m(self) -> int:
        """The number of triples."""
        return len(self.numbers) // 3

    @property
    def ttft(self) -> int:
        """T = (m + m²) H: the stream can meet it if and only if the numbers can be split."""
        return (self.m + self.m**2) * self.target

    def stream(self) -> QueryStream:
        """Theorem 1's queries, in this order: x (3m, the numbers), y (m), z (m, equal to y), w (two).

        A y must end just when its z arrives, which leaves m windows of length H for the x.
        """
        m, ttft = self.m, self.ttft
        period = self.target * (1 + m)
        x = [((i,) * a, ttft) for i, a in enumerate(self.numbers)]
        y = [((3 * m + i,) * (m * self.target), (i + 1) * period) for i in range(m)]
        z = [(prompt, ttft + arrival) for prompt, arrival in y]
        w = [((4 * m,) * ttft, 0), ((4 * m + 1,) * ttft, 2 * ttft)]
        prompts, arrivals = zip(*(x + y + z + w), strict=True)
        return QueryStream(prompts, arrivals)

    def order(self, triples: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The schedule a split stands for: window i is filled by the numbers at the indices `triples[i]`."""
        m = self.m
        windows = [query for i, triple in enumerate(triples) for query in (*triple, 3 * m + i, 4 * m + i)]
        return (5 * m, *windows, 5 * m + 1)


def solvable(m: int, target: int, rng: random.Random) -> ThreePartition:
    """A random instance with a split. Raises ValueError when `target` is too small for one (below 16)."""
    if target < 16:
        raise ValueError(f"a target of {target} leaves too few numbers between its quarter and its half")
    numbers: list[int] = []
    while len(numbers) < 3 * m:
        pair = [rng.choice(_between(target)) for _ in range(2)]
        third = target - sum(pair)
        if target < 4 * third < 2 * target:
            numbers += [*pair, third]
    rng.shuffle(numbers)
    return ThreePartition(tuple(numbers), target)


def unsolvable(m: int, target: int, rng: random.Random) -> ThreePartition:
    """A random instance without a split, for a reason.

    Four numbers leave 1 when divided by four, the others and the target leave 0. The triple that holds the
    first of the four holds one to three of them, so its sum cannot be the target.

    Raises ValueError unless m >= 2 and `target` is a multiple of four from 48 on.
    """
    if m < 2 or target < 48 or target % SPREAD:
        raise ValueError("needs m >= 2 and a target that is a multiple of four, 48 or more")
    room = _between(target)
    classes = [[a for a in room if a % SPREAD == rest] for rest in (1, 0)]
    while True:
        numbers = [rng.choice(classes[i >= SPREAD]) for i in range(3 * m)]
        if sum(numbers) == m * target:
            rng.shuffle(numbers)
            return ThreePartition(tuple(numbers), target)


def _between(target: int) -> range:
    return range(target // 4 + 1, (target + 1) // 2)
