"""Phase 1: choose the work of the next batch, and how much of each. Pure: nothing is changed.

The planner walks the policy's order once and stops when the budget is spent (*Stream2LLM* section 4.1). It
counts as available the free blocks and those of requests ranked *below* the current one, which phase 2
may preempt. A low-ranked request whose blocks are needed is left out and becomes the first victim.

Requests, all but FLASH, leave `Limits.stream_share` of the tokens and rows to tapes, as far as bars wait: no
flood of requests stops the data. A batch with questions is theirs; there tapes get no more than they get
beside questions anyway.

Work that needs KV of a session that is lost or on its way is skipped until that is there, and so are records
behind a refresh; neither delays other work.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from regions.pool_metadata import BlockPool
from regions.tape import Tape
from scheduler.grouping import Grouping
from scheduler.interfaces import Limits, PriorityClass
from scheduler.queues import QueuePosition, Queues
from scheduler.request import Failure, Request, State
from scheduler.tapes import TapeAppend, Work

POOL_SHARE = 4
"""In a batch with questions, all POOL prompts share the smallest chunk divided by this."""


class Entry(NamedTuple):
    """One row of a batch: `n` tokens of a request or `n` records of an append.

    An entry with a `source` has no row: the request reads what the source computes in this batch (grouped
    prefill). ``drafts`` are verified after the `n` tokens.
    """

    work: Work
    n: int
    source: Request | None = None
    drafts: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens it computes, without drafts."""
        return self.work.tokens_of(self.n)


@dataclass(frozen=True, slots=True)
class Plan:
    """Entries in policy order, and why other work waits."""

    entries: tuple[Entry, ...] = ()
    waits: tuple[tuple[PriorityClass, str], ...] = ()
    """For each class with waiting work, the budget that ran out or the class that came first."""
    question: bool = False
    """The batch has a row of a question (FLASH or SESSION)."""
    lost: tuple[Tape, ...] = ()
    """Tapes with lost KV that work waits for."""


def plan(
    queues: Queues,
    memory: BlockPool,
    limits: Limits,
    grouping: Grouping | None = None,
    *,
    after_question: bool = False,
) -> Plan:
    """Choose the next batch. ``after_question``: the previous batch had a question.

    The first of the order always gets an entry, and phase 2 makes room for it or ends it, so there is no
    deadlock.
    """
    return _Planner(queues, memory, limits, grouping, after_question).run()


def adaptive_chunk(decodes: int, prefills: int, limits: Limits) -> int:
    """Prefill tokens per request and batch: clamp(n_batch / N, chunk_min, chunk_max).

    *Attention Once* section 3.7. n_batch excludes the tokens of running answers; N is how many could prefill.
    """
    share = (limits.max_batch_tokens - decodes) // max(1, prefills)
    return min(max(share, limits.chunk_min), limits.chunk_max)


def cell_budget(memory: BlockPool, limits: Limits) -> int:
    """Tokens that all admitted requests may use together (*Attention Once* section 3.7)."""
    return int(memory.total_blocks * memory.block_size * limits.cell_budget_fraction)


def reserve(memory: BlockPool, limits: Limits) -> int:
    """Blocks above the high-water mark, reserved for the growth of running answers (section 3.7)."""
    return memory.total_blocks - int(memory.total_blocks * limits.high_water)


def refusal(request: Request, limits: Limits, memory: BlockPool) -> Failure | None:
    """Why the request can never run in its current form; None if it can."""
    if request.prefill_only:
        return None
    prompt, new = len(request.prompt), request.spec.max_tokens
    budget = cell_budget(memory, limits)
    if prompt > limits.max_prompt_tokens:
        message = f"the prompt has {prompt} tokens, the limit is {limits.max_prompt_tokens}"
    elif new > limits.max_new_tokens:
        message = f"the request asks for {new} new tokens, the limit is {limits.max_new_tokens}"
    elif request.cells > budget:
        message = (
            f"prompt ({prompt} tokens) and answer (up to {new}) need {request.cells} cells; requests may "
            f"use {budget} of the pool's {memory.total_blocks * memory.block_size}"
        )
    else:
        return None
    return Failure("too_long", message)


def first_half(entries: Sequence[Entry]) -> list[Entry]:
    """The leading entries that make up half of the tokens, for a retry after the device ran out of memory.

    A prompt is cut to the tokens left, an append to the whole records left. The first entry keeps at least
    one token or record, so that the retry makes progress.
    """
    left = max(1, sum(entry.tokens for entry in entries) // 2)
    kept: list[Entry] = []
    for entry in entries:
        n = entry.work.units_within(left, entry.n) or (0 if kept else 1)
        if n:
            kept.append(entry._replace(n=n))
            left -= kept[-1].tokens
    return kept


@dataclass(slots=True)
class _TapeShare:
    """Tokens and rows that requests leave to tapes, less what these have got; the longest first bar."""

    tokens: int
    rows: int
    longest_bar: int

    def take(self, tokens: int) -> None:
        """A tape got a row of ``tokens``."""
        self.tokens, self.rows = max(0, self.tokens - tokens), max(0, self.rows - 1)


class _Planner:
    """The budgets left during the walk."""

    def __init__(
        self,
        queues: Queues,
        memory: BlockPool,
        limits: Limits,
        grouping: Grouping | None,
        after_question: bool,
    ) -> None:
        self.queues, self.limits, self.grouping = queues, limits, grouping
        self.after_question = after_question
        self.block_size = memory.block_size
        self.chunk = adaptive_chunk(queues.decodes, queues.prefills, limits)
        self.tokens, self.rows = limits.max_batch_tokens, limits.max_batch_requests
        self.cells = cell_budget(memory, limits) - queues.cells
        """Cells left by admitted requests, those of this plan included; negative in an overload."""
        self.free = memory.free_blocks
        """Free blocks less the planned ones; below zero, the blocks to be taken from lower ranks."""
        self.reserve = reserve(memory, limits)
        """Blocks that prefill chunks must leave free (the high-water mark)."""
        self.admitting = True
        self.has_request = False
        """A foreground request has a row in this batch."""
        self.pool_share: int | None = None
        """Tokens left for POOL prompts in a batch with a question; None without one."""
        self.held = self._held_for_tapes()
        self.entries: list[Entry] = []
        self.waits: dict[PriorityClass, str] = {}
        self.lost: dict[Tape, None] = {}
        if grouping is not None:
            grouping.begin()

    def run(self) -> Plan:
        for work in self.queues.walk(lambda: self.admitting):
            if not self.rows or not self.tokens:
                self._note(work, "rows" if not self.rows else "tokens")
                break
            if isinstance(work, TapeAppend):
                entry = self._append(work)
            elif self._is_full(work):
                self._append_rest()
                break
            else:
                position = self.queues.position(work)
                generates = position.decoding and position.state is State.RUNNING
                entry = (self._decode(work) if generates else None) or self._request(work, position)
            if entry is not None:
                self.entries.append(entry)
        waits, lost = tuple(self.waits.items()), tuple(self.lost)
        return Plan(tuple(self.entries), waits, self.pool_share is not None, lost)

    def _held_for_tapes(self) -> _TapeShare:
        """The share of tapes, as far as bars wait that could run."""
        limits = self.limits
        max_tokens = int(limits.stream_share * limits.max_batch_tokens)
        max_rows = int(limits.stream_share * limits.max_batch_requests)
        tokens = rows = longest = 0
        if not max_tokens:
            return _TapeShare(0, 0, 0)
        for append in self.queues.sorted_appends():
            barrier = self.queues.barriers.get(append.tape)
            if append.away or (barrier is not None and append.seq > barrier):
                continue
            rows += 1
            longest = max(longest, len(append.queue[0].tokens))
            for item in append.queue:
                tokens += len(item.tokens)
                if tokens >= max_tokens:
                    break
            if tokens >= max_tokens and rows >= max_rows:
                break
        held = max(min(tokens, max_tokens), longest)
        # the first of the order always gets a token and a row
        rows = min(rows, max_rows, limits.max_batch_requests - 1)
        return _TapeShare(min(held, limits.max_batch_tokens - 1), rows, longest)

    def _held_from(self, request: Request) -> tuple[int, int]:
        """Tokens and rows that a request leaves to tapes; beside questions what these may have there."""
        if request.cls is PriorityClass.FLASH:
            return 0, 0
        if request.cls > PriorityClass.SESSION and self.pool_share is None:
            return self.held.tokens, self.held.rows
        if not self.after_question:
            return 0, 0
        chunk = max(self.limits.chunk_min, self.held.longest_bar)
        return min(self.held.tokens, chunk), min(self.held.rows, 1)

    def _is_full(self, request: Request) -> bool:
        """Whether the batch has no room left for this request, nor for any after it, but only for tapes."""
        tokens, rows = self._held_from(request)
        if self.tokens > tokens and self.rows > rows:
            return False
        self._note(request, "tokens" if self.tokens <= tokens else "rows")
        return True

    def _append_rest(self) -> None:
        """Give the rest to the tapes behind the requests that are turned away."""
        for append in self.queues.sorted_appends():
            if not self.rows or not self.tokens:
                self._note(append, "rows" if not self.rows else "tokens")
                break
            if not append.due and (entry := self._append(append)) is not None:
                self.entries.append(entry)

    def _decode(self, request: Request) -> Entry | None:
        """One decode, the entry of most rows; None without free memory for it."""
        blocks = request.blocks_needed(1, self.block_size)
        if blocks > self.free:
            return None
        self._spend(1, blocks)
        if not self.has_request:
            self._has_row(request)
        return Entry(request, 1)

    def _request(self, request: Request, position: QueuePosition) -> Entry | None:
        waiting = position.state is State.QUEUED
        if request.away:
            self._restore(request, request.spec.tape)
            return None
        if waiting and not self._has_cells(request):
            self._note(request, "cells")
            self.admitting = False
            return None
        source = self.grouping.source_of(request) if self.grouping else None
        if source is not None:
            entry = Entry(request, 0, source)
        else:
            n, blocks = self._tokens(request, position)
            if not n:
                if waiting:
                    # Admission keeps the order of a class: once one is turned away, no later one is admitted.
                    self.admitting = False
                return None
            entry = Entry(request, n)
            self._spend(n, blocks)
            if self.pool_share is not None and request.cls is PriorityClass.POOL:
                self.pool_share -= n
            self._has_row(request)
            if self.grouping:
                self.grouping.add_source(request, n)
        if waiting:
            self.cells -= request.cells
        return entry

    def _has_row(self, request: Request) -> None:
        if not request.background:
            self.has_request = True
            if request.cls <= PriorityClass.SESSION and self.pool_share is None:
                # the first batch with a question is the question's, except for the tokens of running answers
                self.pool_share = max(1, self.limits.chunk_min // POOL_SHARE) if self.after_question else 0

    def _spend(self, tokens: int, blocks: int) -> None:
        self.rows -= 1
        self.tokens -= tokens
        self.free -= blocks

    def _note(self, work: Work, reason: str) -> None:
        """Keep the first reason for which a class waits."""
        self.waits.setdefault(work.cls, reason)

    def _restore(self, work: Work, tape: Tape | None) -> None:
        self._note(work, "restore")
        if tape is not None and tape.lost:
            self.lost[tape] = None

    def _has_cells(self, request: Request) -> bool:
        """Whether the cell budget admits it, next to the admitted requests that it cannot preempt."""
        if request.cells <= self.cells:
            return True
        return self.queues.victims_have(request, request.cells - self.cells)

    def _tokens(self, request: Request, position: QueuePosition) -> tuple[int, int]:
        """Tokens that the budgets allow it in this batch, and the blocks they take."""
        n = self._wanted(request, position.left)
        if not n:
            behind_questions = request.cls is PriorityClass.POOL and self.pool_share == 0
            self._note(request, "order" if request.background or behind_questions else "tokens")
            return 0, 0
        blocks = request.blocks_needed(n, self.block_size)
        reserve = 0 if position.decoding else self.reserve
        if not self.entries or blocks <= self.free - reserve:
            return n, blocks
        room = self.free + self.queues.victims_blocks(request, blocks + reserve - self.free) - reserve
        if blocks > room:
            self._note(request, "high_water" if blocks <= room + reserve else "blocks")
            n = bisect_right(range(1, n + 1), room, key=lambda k: request.blocks_needed(k, self.block_size))
            blocks = request.blocks_needed(n, self.block_size) if n else 0
        return n, blocks

    def _wanted(self, request: Request, left: int) -> int:
        if request.background:
            chunk = 0 if self.has_request else self.limits.chunk_min
        elif request.cls is PriorityClass.FLASH:
            chunk = left  # a question is short, and its wait is what users see
        elif self.pool_share is not None and request.cls is PriorityClass.POOL:
            # a question waits for the whole pass, so lower-ranked prompts only get enough to make progress
            chunk = min(self.chunk, self.pool_share)
        else:
            chunk = self.chunk
        return min(left, chunk, self.tokens - self._held_from(request)[0])

    def _append(self, append: TapeAppend) -> Entry | None:
        barrier = self.queues.barriers.get(append.tape)
        if barrier is not None and append.seq > barrier:
            self._restore(append, None)
            return None
        if append.away:
            self._restore(append, append.tape)
            return None
        if self.pool_share is not None and not self.after_question and not append.due:
            self._note(append, "order")
            return None
        n, tokens, blocks = self._records(append, barrier)
        if not n:
            self._note(append, "tokens")
            return None
        self._spend(tokens, blocks)
        self.held.take(tokens)
        return Entry(append, n)

    def _records(self, append: TapeAppend, barrier: int | None) -> tuple[int, int, int]:
        """Whole records up to ``barrier``. Memory limits them from the second on: eviction makes room."""
        n = tokens = blocks = 0
        retention = append.tape.retention
        most = min(self.tokens, retention.tokens)
        # Questions wait for the whole pass, so next to them a tape gets the smallest chunk or one record.
        # Next to prompts alone it gets what these leave to tapes.
        beside = self.limits.chunk_min if self.pool_share is not None else self.held.tokens
        share = min(most, max(beside, self.limits.chunk_min))
        if append.due or not self.has_request:
            share = most
        oldest = newest = append.queue[0].ts_event
        for item in islice(append.queue, retention.records or None):
            after = tokens + len(item.tokens)
            if after > most or (n and after > share) or (barrier is not None and item.seq > barrier):
                break
            oldest, newest = min(oldest, item.ts_event), max(newest, item.ts_event)
            if retention.span_ns and newest - oldest > retention.span_ns:
                break
            need = append.tape.blocks_needed(after)
            if (
                n
                and need > self.free
                and need > self.free + self.queues.victims_blocks(append, need - self.free)
            ):
                break
            n, tokens, blocks = n + 1, after, need
        return n, tokens, blocks
