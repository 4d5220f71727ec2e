"""*Stream2LLM*'s scheduler by the rules of its public program, in simulated time.

The program differs from the paper's text, and from `scheduler`, in what `Rules` names. This does step by step
what it does and counts blocks, without KV. So it shows how much of a difference between our figures and the
paper's is the scheduler's, and which rule makes it.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lab.simulation.device import DeviceCosts
from lab.simulation.inputs import Input
from lab.simulation.run import COLUMNS, Result, Setup
from lab.simulation.tokens import Segments

SPARE_BLOCKS = 4
"""Blocks that an allocation takes beyond what it needs (vLLM: 64 tokens)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """True is what the program does."""

    idle_first: bool = True
    """Prompts that wait for input are the first victims, the last admitted first; else the policy's order."""
    eager: bool = True
    """A victim that lost its KV is computed again as soon as tokens are left; else with its next input."""
    by_chunk: bool = True
    """What swapping and recomputing cost is asked for the chunk that needs room; else for the victim's KV."""
    oldest_first: bool = True
    """`lcas` takes the oldest last chunk first; else the newest, as section 4.4.4 has it."""


PROGRAM = Rules()


def simulate_published(
    inputs: Iterator[Input], setup: Setup, costs: DeviceCosts, rules: Rules = PROGRAM
) -> Result:
    """As `simulate`, for the policies `vllm`, `fcfs`, `lcas` and `mcps`; the host has room for all.

    Of the limits, only tokens a batch and the eviction count. Raises RuntimeError for a prompt that the pool
    cannot hold.
    """
    return _Run(inputs, setup, costs, rules).run()


@dataclass(slots=True, eq=False)
class _Prompt:
    number: int
    opened_ns: int
    tokens: Segments
    complete: bool
    last_ns: int
    """Time of the newest chunk."""
    computed: int = 0
    blocks: int = 0
    stored: int = 0
    """Blocks in the pool, and on the host."""
    parked: bool = False
    """Waits for its next input before it is computed again."""
    swaps: int = 0
    recomputes: int = 0
    invalidated: int = 0
    recomputed: int = 0
    swapped: int = 0

    @property
    def left(self) -> int:
        """Tokens to compute."""
        return 0 if self.parked else len(self.tokens) - self.computed

    def row(self, now: int) -> tuple[int, ...]:
        """Its results, by `COLUMNS`."""
        times = (self.opened_ns, self.last_ns, now, now)
        counts = (self.swaps, self.recomputes, self.invalidated, self.recomputed, self.swapped)
        return self.number, *times, len(self.tokens), 0, *counts


def _fcfs(prompt: _Prompt) -> tuple[int, ...]:
    return not prompt.complete, prompt.opened_ns, prompt.number


def _oldest_chunk(prompt: _Prompt) -> tuple[int, ...]:
    return not prompt.complete, prompt.last_ns, prompt.number


def _newest_chunk(prompt: _Prompt) -> tuple[int, ...]:
    return not prompt.complete, -prompt.last_ns, prompt.number


def _mcps(prompt: _Prompt) -> tuple[int, ...]:
    return -prompt.computed, prompt.opened_ns, prompt.number


def _order(policy: str, rules: Rules) -> Callable[[_Prompt], tuple[int, ...]]:
    orders = {"vllm": _fcfs, "fcfs": _fcfs, "mcps": _mcps}
    orders["lcas"] = _oldest_chunk if rules.oldest_first else _newest_chunk
    return orders[policy]


class _Run:
    def __init__(self, inputs: Iterator[Input], setup: Setup, costs: DeviceCosts, rules: Rules) -> None:
        self.inputs, self.upcoming = inputs, next(inputs, None)
        self.setup, self.costs, self.rules = setup, costs, rules
        self.key = _order(setup.ordering.name, rules)
        self.free = self.least = self.total
        """Free blocks, now and at the least."""
        self.live: dict[int, _Prompt] = {}
        self.running: dict[_Prompt, None] = {}
        """In the order of admission; the others are in `waiting`."""
        self.waiting: deque[_Prompt] = deque()
        self.now = self.copied_ns = 0
        """Virtual time, and the end of the last transfer."""
        self.passes = self.computed = self.busy_ns = self.copying_ns = 0
        self.rows = array("q")

    @property
    def total(self) -> int:
        """Blocks of the pool."""
        return self.setup.pool_tokens // self.setup.block_size

    def run(self) -> Result:
        while True:
            batch = self.vllm_batch() if self.setup.ordering.name == "vllm" else self.ordered_batch()
            if batch:
                self.execute(batch)
            elif self.upcoming is not None:
                self.feed(self.upcoming.time_ns)
            else:
                break
        if self.live:
            raise RuntimeError(f"the scheduler stopped with {len(self.live)} unfinished prompts")
        table = np.array(self.rows, np.int64).reshape(-1, len(COLUMNS))
        table = table[np.argsort(table[:, 0])]
        return Result(
            columns={name: np.ascontiguousarray(table[:, at]) for at, name in enumerate(COLUMNS)},
            failures={},
            ended_ns=self.now,
            passes=self.passes,
            computed_tokens=self.computed,
            busy_ns=self.busy_ns,
            copying_ns=self.copying_ns,
            peak_tokens=(self.total - self.least) * self.setup.block_size,
        )

    # Input, between two batches.

    def feed(self, until: int) -> None:
        """Advance the time and take in what arrived."""
        self.now = max(self.now, until)
        while self.upcoming is not None and self.upcoming.time_ns <= until:
            self.take_in(self.upcoming)
            self.upcoming = next(self.inputs, None)

    def take_in(self, piece: Input) -> None:
        if piece.op == "open":
            prompt = _Prompt(piece.request, piece.time_ns, piece.tokens, piece.last, piece.time_ns)
            self.live[piece.request] = prompt
            self.waiting.append(prompt)
            self.check(prompt)
            return
        prompt = self.live[piece.request]
        prompt.last_ns, prompt.complete, prompt.parked = piece.time_ns, piece.last, False
        if piece.op == "append":
            prompt.tokens = prompt.tokens + piece.tokens
        else:
            self.update(prompt, piece.tokens)
        self.check(prompt)
        if prompt.complete and not prompt.left:
            prompt.computed -= 1  # the end brought nothing: its last token gives the answer
            prompt.recomputed += 1

    def check(self, prompt: _Prompt) -> None:
        if self.blocks(len(prompt.tokens)) + SPARE_BLOCKS > self.total:
            raise RuntimeError(
                f"prompt {prompt.number} has {len(prompt.tokens)} tokens, too many for the pool"
            )

    def update(self, prompt: _Prompt, tokens: Segments) -> None:
        kept = common(prompt.tokens, tokens)
        prompt.tokens = tokens
        if prompt.computed <= kept:
            return
        prompt.invalidated += prompt.computed - kept
        prompt.computed, blocks = kept, self.blocks(kept)
        self.free += max(0, prompt.blocks - blocks)
        prompt.blocks, prompt.stored = min(prompt.blocks, blocks), min(prompt.stored, blocks)

    # Batches: (prompt, tokens).

    def ordered_batch(self) -> list[tuple[_Prompt, int]]:
        """By the policy's order whatever fits the whole pool; then room for it, at the others' expense."""
        tokens, room = self.setup.limits.max_batch_tokens, self.total
        chosen: dict[_Prompt, int] = {}
        for prompt in sorted((each for each in self.live.values() if each.left), key=self.key):
            n = min(prompt.left, tokens)
            blocks = self.blocks(prompt.computed + n) + SPARE_BLOCKS
            if not n:
                break
            if blocks <= room:
                chosen[prompt] = n
                tokens, room = tokens - n, room - blocks
        victims = self.victims(chosen)
        batch = [(prompt, chosen[prompt]) for prompt in self.running if prompt in chosen]
        batch += [(prompt, n) for prompt, n in chosen.items() if prompt not in self.running]
        for prompt, n in batch:
            while not self.allocate(prompt, n):
                self.preempt(next(victims), n)
        return batch

    def victims(self, chosen: dict[_Prompt, int]) -> Iterator[_Prompt]:
        others = [prompt for prompt in self.running if prompt not in chosen]
        if self.rules.idle_first:
            busy = sorted((prompt for prompt in others if prompt.left), key=self.key)
            others = busy + [prompt for prompt in others if not prompt.left]
        else:
            others.sort(key=self.key)
        yield from reversed(others)

    def vllm_batch(self) -> list[tuple[_Prompt, int]]:
        """Running prompts in order of admission, then the waiting ones if none was preempted."""
        tokens, batch, preempted = self.setup.limits.max_batch_tokens, list[tuple[_Prompt, int]](), False
        for prompt in list(self.running):
            n = min(prompt.left, tokens)
            if not n or prompt not in self.running:
                continue
            while prompt in self.running and not self.allocate(prompt, n):
                self.preempt(next(reversed(self.running)), n)
                preempted = True
            if prompt not in self.running:
                return batch
            batch.append((prompt, n))
            tokens -= n
        while tokens and not preempted:
            first = next((prompt for prompt in self.waiting if not prompt.parked), None)
            if first is None:
                break
            if not first.left:  # swapped out while it waited for input: its last block is computed again
                again = min(first.computed, self.setup.block_size)
                first.computed, first.recomputed = first.computed - again, first.recomputed + again
            n = min(first.left, tokens)
            if not self.allocate(first, n):
                break
            batch.append((first, n))
            tokens -= n
        return batch

    def execute(self, batch: Sequence[tuple[_Prompt, int]]) -> None:
        begin = max(self.now, self.copied_ns)
        took = self.costs.batch_ns([(prompt.computed, n) for prompt, n in batch])
        self.copying_ns, self.busy_ns = self.copying_ns + begin - self.now, self.busy_ns + took
        self.now, self.passes, self.least = begin + took, self.passes + 1, min(self.least, self.free)
        for prompt, n in batch:
            prompt.computed += n
            self.computed += n
            if prompt.complete and not prompt.left:
                self.rows.extend(prompt.row(self.now))
                self.free += prompt.blocks
                del self.running[prompt], self.live[prompt.number]
        self.feed(self.now)

    # Memory.

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.setup.block_size)

    def allocate(self, prompt: _Prompt, n: int) -> bool:
        """Blocks for `n` more tokens and for what is on the host; it runs then. False: there is no room."""
        more = self.blocks(prompt.computed + n) - prompt.blocks
        if more > self.free:
            return False
        if more > 0:
            more = min(more + SPARE_BLOCKS, self.free)
            prompt.blocks, self.free = prompt.blocks + more, self.free - more
        if prompt not in self.running:
            self.waiting.remove(prompt)
            self.running[prompt] = None
            self.copy(self.costs.swap_in_ns(prompt.stored))
            prompt.stored = 0
        return True

    def preempt(self, victim: _Prompt, n: int) -> None:
        """Take its blocks; a chunk of `n` tokens needs them."""
        del self.running[victim]
        self.waiting.appendleft(victim)
        self.free, victim.blocks = self.free + victim.blocks, 0
        if victim.computed and self.swaps(victim, n):
            victim.stored = self.blocks(victim.computed)
            victim.swaps, victim.swapped = victim.swaps + 1, victim.swapped + victim.computed
            self.copy(self.costs.swap_out_ns(victim.stored))
            return
        victim.parked = not self.rules.eager and not victim.left
        victim.recomputes, victim.recomputed = victim.recomputes + 1, victim.recomputed + victim.computed
        victim.computed = 0

    def swaps(self, victim: _Prompt, n: int) -> bool:
        tokens = n if self.rules.by_chunk else victim.computed
        cheaper = self.costs.swap_ns(self.blocks(tokens)) <= self.costs.recompute_ns(tokens)
        return self.setup.limits.eviction == "swap" or (self.setup.limits.eviction == "cost" and cheaper)

    def copy(self, ns: int) -> None:
        if ns:
            self.copied_ns = max(self.copied_ns, self.now) + ns


def common(old: Segments, new: Segments) -> int:
    """Tokens of the longest common prefix."""
    length = 0
    for a, b in zip(old.ranges, new.ranges, strict=False):
        if a.start != b.start:
            break
        length += min(len(a), len(b))
        if len(a) != len(b):
            break
    return length
