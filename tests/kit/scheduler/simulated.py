"""A device with integer costs, for results that can be computed by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.simulation.inputs import Input, Op
from lab.simulation.tokens import Segments

MS = 1_000_000


@dataclass(frozen=True)
class LinearCosts:
    """A pass takes `overhead_ns` and `token_ns` a token, a block `block_ns` in each direction."""

    token_ns: int = 10
    overhead_ns: int = 100
    block_ns: int = 40

    def recompute_ns(self, tokens: int) -> int:
        return tokens * self.token_ns

    def swap_out_ns(self, blocks: int) -> int:
        return blocks * self.block_ns

    def swap_in_ns(self, blocks: int) -> int:
        return blocks * self.block_ns

    def swap_ns(self, blocks: int) -> int:
        return 2 * blocks * self.block_ns

    def batch_ns(self, spans: Sequence[tuple[int, int]]) -> int:
        return self.overhead_ns + self.token_ns * sum(n for _, n in spans)


def piece(
    time_ns: int, request: int, op: Op, *runs: tuple[int, int], last: bool = False, max_tokens: int = 1
) -> Input:
    """An input of runs (first token, how many)."""
    tokens = Segments(range(first, first + n) for first, n in runs)
    return Input(time_ns, request, op, tokens, last, max_tokens)
