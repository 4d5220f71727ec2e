"""Phase 1: which work, and how much of each, goes into the next batch. Pure: nothing is touched.

The walk goes down the policy's order once and ends where the budget does (*Stream2LLM* section 4.1). Its
estimate of memory is what is free plus what the requests ranked *below* the current one hold, since phase 2
may take that; so a high rank is never refused for the sake of a low one, and a low rank whose blocks are
already spoken for is left out and thereby becomes the first victim. What others hold is only counted once
the free blocks do not suffice.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from scheduler.book import Below, Book, Place, Walk, place_of
from scheduler.followers import Groups
from scheduler.request import Append, Request, State, Work
from scheduler.types import Limits, Memory, PriorityClass

BESIDE = 4
"""Beside questions all prompts of POOL together get the `BESIDE`-th part of the smallest chunk."""


class Entry(NamedTuple):
    """One row of a batch: `n` tokens of a request or `n` records of an append.

    With a `leader` it is no row: the request reads what the leader computes in this batch (grouped prefill).
    ``drafts``: guesses to be verified behind the `n` tokens.
    """

    work: Work
    n: int
    leader: Request | None = None
    drafts: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens it computes, drafts left out."""
        return sum(self.work.lengths(self.n)) if isinstance(self.work, Append) else self.n


@dataclass(frozen=True, slots=True)
class Plan:
    """Entries in policy order, and what kept the others out."""

    entries: tuple[Entry, ...] = ()
    waits: tuple[tuple[PriorityClass, str], ...] = ()
    """For each class that was turned away, the budget that ran out or the class that came first."""
    question: bool = False
    """It has a row of a question: FLASH or SESSION."""


def plan(book: Book, memory: Memory, limits: Limits) -> Plan:
    """Choose the next batch.

    The first of the order always gets an entry whatever the memory estimate says, because phase 2 can
    always make room for it or end it: this is what rules out a deadlock.
    """
    return _Planner(book, memory, limits).run()


def adaptive_chunk(decodes: int, prefills: int, limits: Limits) -> int:
    """Prefill tokens per request and batch: clamp(n_batch / N, chunk_min, chunk_max).

    *Attention Once* section 3.7. n_batch leaves out the running answers' tokens, so that prefills do not
    starve them within an iteration; N is the number of requests that could prefill.
    """
    share = (limits.max_batch_tokens - decodes) // max(1, prefills)
    return min(max(share, limits.chunk_min), limits.chunk_max)


def cell_budget(memory: Memory, limits: Limits) -> int:
    """Tokens that admitted requests may claim together (*Attention Once* section 3.7)."""
    return int(memory.total_blocks * memory.block_size * limits.cell_budget_fraction)


def reserve(memory: Memory, limits: Limits) -> int:
    """Blocks above the high-water mark, which running answers can still grow into (section 3.7)."""
    return memory.total_blocks - int(memory.total_blocks * limits.high_water)


@dataclass(slots=True)
class _Planner:
    """What is left while the order is walked."""

    book: Book
    memory: Memory
    limits: Limits
    walk: Walk = field(init=False)
    tokens: int = field(init=False)
    rows: int = field(init=False)
    cells: int = field(init=False)
    """Cells that the admitted leave, those admitted by this plan included; below zero in an overload."""
    free: int = field(init=False)
    """Free blocks less those planned; below zero it counts blocks to be taken from lower ranks."""
    reserve: int = field(init=False)
    """Blocks that prefill chunks leave alone (the high-water mark)."""
    chunk: int = field(init=False)
    block_size: int = field(init=False)
    groups: Groups | None = field(init=False)
    entries: list[Entry] = field(init=False, default_factory=list)
    waits: dict[PriorityClass, str] = field(init=False, default_factory=dict)
    asked: bool = field(init=False, default=False)
    """A request has a row in this batch."""
    beside: int | None = field(init=False, default=None)
    """Tokens left for prompts of POOL beside a question; None without one in this batch."""
    below: Below | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        memory, limits, book = self.memory, self.limits, self.book
        self.walk = book.walk()
        self.tokens, self.rows = limits.max_batch_tokens, limits.max_batch_requests
        self.cells = cell_budget(memory, limits) - book.cells
        self.free = memory.free_blocks
        self.reserve = reserve(memory, limits)
        self.chunk = adaptive_chunk(book.decodes, book.prefills, limits)
        self.block_size = memory.block_size
        self.groups = Groups() if limits.grouping else None

    def run(self) -> Plan:
        for work in self.walk:
            if not self.rows or not self.tokens:
                self._note(work, "rows" if not self.rows else "tokens")
                break
            if isinstance(work, Append):
                entry = self._append(work)
            else:
                place = place_of(work)
                generates = place.decoding and place.state is State.RUNNING
                entry = (self._decode(work) if generates else None) or self._request(work, place)
            if entry is not None:
                self.entries.append(entry)
        return Plan(tuple(self.entries), tuple(self.waits.items()), self.beside is not None)

    def _decode(self, request: Request) -> Entry | None:
        """One token of an answer, as most rows of most batches; None without free memory for it."""
        assert request.reader is not None  # it generates
        blocks = request.reader.blocks_needed(1)
        if blocks > self.free:
            return None
        self._spend(1, blocks)
        if not self.asked:
            self._asks(request)
        return Entry(request, 1)

    def _request(self, request: Request, place: Place) -> Entry | None:
        waiting = place.state is State.QUEUED
        if waiting and not self._has_cells(request):
            self._note(request, "cells")
            self.walk.close()
            return None
        leader = self.groups.leader_of(request) if self.groups else None
        if leader is not None:
            entry = Entry(request, 0, leader)
        else:
            n, blocks = self._tokens(request, place)
            if not n:
                if waiting:
                    # Nobody starts before an earlier one of its class: the door closes for all behind.
                    self.walk.close()
                return None
            entry = Entry(request, n)
            self._spend(n, blocks)
            if self.beside is not None and request.cls is PriorityClass.POOL:
                self.beside -= n
            self._asks(request)
            if self.groups:
                self.groups.lead(request, n)
        if waiting:
            self.cells -= request.cells
        return entry

    def _asks(self, request: Request) -> None:
        if not request.prefill_only:
            self.asked = True
            if request.cls <= PriorityClass.SESSION and self.beside is None:
                # the first batch with a question is its own, but for the tokens of running answers
                self.beside = max(1, self.limits.chunk_min // BESIDE) if self.book.questioned else 0

    def _spend(self, tokens: int, blocks: int) -> None:
        self.rows -= 1
        self.tokens -= tokens
        self.free -= blocks

    def _note(self, work: Work, reason: str) -> None:
        """Remember the first reason for which a class had to wait."""
        self.waits.setdefault(work.cls, reason)

    def _has_cells(self, request: Request) -> bool:
        """Whether the budget holds it beside the admitted that make no room for it."""
        if request.cells <= self.cells:
            return True
        return self.book.holders_have(request, request.cells - self.cells)

    def _tokens(self, request: Request, place: Place) -> tuple[int, int]:
        """Tokens that the budgets leave it in this batch, and the blocks they take."""
        n = self._wanted(request, place.left)
        if not n:
            self._note(request, "order" if self._gives_way(request) else "tokens")
            return 0, 0
        blocks = request.blocks_needed(n, self.block_size)
        reserve = 0 if place.decoding else self.reserve
        if not self.entries or blocks <= self.free - reserve:
            return n, blocks
        room = self.free + self._blocks_below(request, blocks + reserve - self.free) - reserve
        if blocks > room:
            self._note(request, "high_water" if blocks <= room + reserve else "blocks")
            n = bisect_right(range(1, n + 1), room, key=lambda k: request.blocks_needed(k, self.block_size))
            blocks = request.blocks_needed(n, self.block_size) if n else 0
        return n, blocks

    def _wanted(self, request: Request, left: int) -> int:
        if request.prefill_only:
            chunk = 0 if self.asked else self.limits.chunk_min
        elif request.cls is PriorityClass.FLASH:
            # It is short and its wait is the product: no chunking, all that fit go together.
            chunk = left
        elif self.beside is not None and request.cls is PriorityClass.POOL:
            # A question waits for the whole of its pass: the prompts below it only keep moving, and where
            # they had the batch before, not even that.
            chunk = min(self.chunk, self.beside)
        else:
            chunk = self.chunk
        return min(left, chunk, self.tokens)

    def _gives_way(self, request: Request) -> bool:
        """Whether questions are what keeps a request out."""
        return request.prefill_only or (request.cls is PriorityClass.POOL and self.beside == 0)

    def _append(self, append: Append) -> Entry | None:
        if self.beside is not None and not self.book.questioned and not append.due:
            self._note(append, "order")
            return None
        n, tokens, blocks = self._records(append)
        if not n:
            self._note(append, "tokens")
            return None
        self._spend(tokens, blocks)
        return Entry(append, n)

    def _records(self, append: Append) -> tuple[int, int, int]:
        """Whole records only; memory bounds them from the second on: eviction makes room for the first."""
        n = tokens = blocks = 0
        most = min(self.tokens, append.tape.append_tokens)
        # Beside questions the tape gets the smallest chunk (or one record): they wait for the whole pass.
        share = most if append.due or not self.asked else min(most, self.limits.chunk_min)
        oldest = newest = append.queue[0].record.ts_event
        span = append.tape.append_span_ns
        for pending in islice(append.queue, append.tape.append_records):
            after = tokens + len(pending.record.tokens)
            if after > most or (n and after > share):
                break
            oldest, newest = min(oldest, pending.record.ts_event), max(newest, pending.record.ts_event)
            if span and newest - oldest > span:
                break
            need = append.tape.blocks_needed(after)
            if n and need > self.free and need > self.free + self._blocks_below(append, need - self.free):
                break
            n, tokens, blocks = n + 1, after, need
        return n, tokens, blocks

    def _blocks_below(self, work: Work, needed: int) -> int:
        """Blocks that phase 2 may take for `work` from others, or enough of them."""
        if self.below is None:
            self.below = self.book.blocks_below()
        return self.below(work, needed)
