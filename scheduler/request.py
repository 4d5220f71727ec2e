"""The two kinds of work: a `Request` reads a session through a fork, an `Append` grows one tape.

Both are plain state; the deciding is in `planner`, `acquisition` and `scheduler`. A request ends exactly
once, in one of three states, and carries its own history: events with times, every sampled row, the version
it read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from engine.seeding import Sampling, prompt_seed
from scheduler.types import PriorityClass, Reader, Row, Tape


class State(Enum):
    """Where a request is; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    """Admitted: its cells count against the budget and it may hold blocks."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(Enum):
    """Moments of a request's life, named as in Stream2LLM. PREEMPTED_SWAP comes with the host tier."""

    QUEUED = "QUEUED"
    SCHEDULED = "SCHEDULED"
    """Got blocks and went into a batch: first time, and again after every preemption."""
    KV_ON_GPU = "KV_ON_GPU"
    """All of its known tokens are in KV; the first token can be sampled."""
    PREEMPTED_RECOMPUTE = "PREEMPTED_RECOMPUTE"
    FINISHED = "FINISHED"
    """Reached a final state, whichever."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why work was not done: a code for programs and a sentence for people.

    Codes of this package: too_long, engine, nan_logits, no_memory, open_failed, stopping.
    """

    code: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Record:
    """One indivisible piece of a tape (a bar) with whatever its owner wants back at commit.

    ``ts_event``: its event time, ns; needed when the tape keeps a span of event time.
    """

    tokens: Sequence[int]
    payload: object = None
    ts_event: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """A prompt to be continued after one version of a session, or after nothing.

    Give either `open_reader`, called when the request first gets blocks so that it reads the freshest
    version, or `reader`, already forked at the version that must be read. The request owns the reader and
    releases it at its end. `on_done` is called once, on the thread that steps the scheduler.

    With `max_tokens` 0 it only prefills: it finishes when its prompt is in KV and then leaves its reader to
    whoever asked for it. It is done in what the other work leaves over: behind all of its class, never in a
    pass with a question, in the smallest chunks, since whatever arrives waits for the pass under way. No
    limit on prompts holds for it and it claims no cells: who submits one sees to the room.

    Raises ValueError if both or neither of the readers are given, for an empty prompt, for `max_tokens` below
    0, or for a `temperature` that is negative or not a number.
    """

    cls: PriorityClass
    session: str
    prompt: Sequence[int]
    max_tokens: int
    on_done: Callable[[Request], None]
    open_reader: Callable[[], Reader] | None = None
    reader: Reader | None = None
    stop_ids: frozenset[int] = frozenset()
    choices: tuple[int, ...] | None = None
    """Token ids the answer is one of; such a request ends after one token."""
    temperature: float = 0.0
    """0 takes the best token; above, tokens are drawn, the same ones for the same prompt (equation 20)."""

    id: int = field(init=False, default=0)
    """Sequence number, given at submit."""
    state: State = field(init=False, default=State.QUEUED)
    output: list[int] = field(init=False, default_factory=list)
    """Generated tokens, a stop token included."""
    rows: list[Row] = field(init=False, default_factory=list)
    """The row behind each generated token."""
    events: list[tuple[Event, int]] = field(init=False, default_factory=list)
    """(event, time in ns of the scheduler's clock)."""
    error: Failure | None = field(init=False, default=None)
    tokens_invalidated: int = field(init=False, default=0)
    """Tokens whose KV was computed and then thrown away by preemption."""
    version: int = field(init=False, default=0)
    """Data version read; survives the reader."""
    past_tokens: int = field(init=False, default=0)
    """Tokens of the shared past that were reused, not computed."""
    _sampling: Sampling | None = field(init=False, default=None)
    """How the first token is drawn."""

    def __post_init__(self) -> None:
        if (self.open_reader is None) == (self.reader is None):
            raise ValueError("a request takes either open_reader or reader")
        if not self.prompt or self.max_tokens < 0:
            raise ValueError("a request needs at least one prompt token and max_tokens of at least 0")
        if self.temperature:
            self._sampling = Sampling(self.temperature, prompt_seed(self.prompt), 0)

    @property
    def computed(self) -> int:
        """Private tokens in KV."""
        return 0 if self.reader is None else self.reader.length

    @property
    def remaining(self) -> int:
        """Known tokens (prompt and generated) that are not in KV yet; at least 1 until the request ends."""
        return len(self.prompt) + len(self.output) - self.computed

    @property
    def prefill_only(self) -> bool:
        """It wants KV and no answer."""
        return not self.max_tokens

    @property
    def decoding(self) -> bool:
        """The next pass computes just the token sampled last."""
        return bool(self.output) and self.remaining == 1

    @property
    def cells(self) -> int:
        """Tokens of KV it may come to hold out of the questions' share: prompt + max_tokens."""
        return 0 if self.prefill_only else len(self.prompt) + self.max_tokens

    @property
    def restartable(self) -> bool:
        """It can give up its version: nothing was generated from it and a fresh one can be opened."""
        return self.open_reader is not None and not self.output

    @property
    def seq(self) -> int:
        """Submission order."""
        return self.id

    @property
    def answer(self) -> list[int]:
        """Generated tokens without the stop token."""
        return self.output[:-1] if self.output and self.output[-1] in self.stop_ids else self.output

    @property
    def sampling(self) -> Sampling | None:
        """How the next token is drawn; None takes the best. Preemption changes nothing about it."""
        return self._sampling and self._sampling.later(len(self.output))

    def next_tokens(self, n: int) -> Sequence[int]:
        """The `n` known tokens after those in KV."""
        start, prompt = self.computed, len(self.prompt)
        head = self.prompt[start : start + n]
        if start + n <= prompt:
            return head
        return [*head, *self.output[max(0, start - prompt) : start + n - prompt]]

    def blocks_needed(self, n: int, block_size: int) -> int:
        """Blocks for `n` more tokens, also before there is a reader."""
        return -(-n // block_size) if self.reader is None else self.reader.blocks_needed(n)

    def open(self) -> Reader:
        """The reader, opened now if need be. Raises whatever `open_reader` raises."""
        if self.reader is None:
            assert self.open_reader is not None  # __post_init__: one of the two is given
            self.reader = self.open_reader()
        self.version, self.past_tokens = self.reader.version, self.reader.past_tokens
        return self.reader

    def close(self) -> None:
        """Give back blocks and past. Idempotent."""
        if self.reader is not None:
            self.reader.release()
            self.reader = None

    def preempt(self, now: int) -> None:
        """Give back the private blocks; the version stays pinned so that the answer stays the same."""
        assert self.reader is not None  # only admitted requests are preempted
        self.tokens_invalidated += self.reader.length
        self.reader.reset()
        self.state = State.QUEUED
        self.events.append((Event.PREEMPTED_RECOMPUTE, now))

    def accept(self, row: Row) -> bool:
        """Take one sampled row; True when the answer is complete."""
        self.rows.append(row)
        self.output.append(row.token)
        return self.choices is not None or row.token in self.stop_ids or len(self.output) >= self.max_tokens

    def end(self, state: State, now: int, error: Failure | None = None) -> None:
        """Reach a final state and give back all memory; what was only prefilled stays with the reader."""
        if not (self.prefill_only and state is State.FINISHED):
            self.close()
        self.state, self.error = state, error
        self.events.append((Event.FINISHED, now))

    def first(self, event: Event) -> int | None:
        """Time (ns) of the first `event`, None if it never happened."""
        return next((at for what, at in self.events if what is event), None)


@dataclass(frozen=True, slots=True)
class Pending:
    """A record that waits for its batch."""

    seq: int
    record: Record
    queued_ns: int


@dataclass(eq=False, slots=True)
class Append:
    """STREAM work: the records one tape still has to take, oldest first."""

    tape: Tape
    queue: deque[Pending] = field(default_factory=deque)
    failures: int = 0
    """Batches lost in a row with the records at the head; the second loss drops them."""

    cls = PriorityClass.STREAM
    decoding = False
    prefill_only = False

    @property
    def seq(self) -> int:
        """Number of the oldest waiting record, so that a tape with a backlog cannot hold up the others."""
        return self.queue[0].seq

    def head(self, n: int) -> list[Record]:
        """The `n` oldest records."""
        return [pending.record for pending in islice(self.queue, n)]

    def lengths(self, n: int) -> list[int]:
        """Tokens of each of the `n` oldest records."""
        return [len(record.tokens) for record in self.head(n)]

    def times(self, n: int) -> list[int]:
        """Event time of each of the `n` oldest records, ns."""
        return [record.ts_event for record in self.head(n)]

    def queued_ns(self, n: int) -> list[int]:
        """When each of the `n` oldest records was queued."""
        return [pending.queued_ns for pending in islice(self.queue, n)]

    def next_tokens(self, n: int) -> list[int]:
        """The tokens of the `n` oldest records, joined."""
        return [token for record in self.head(n) for token in record.tokens]

    def take(self, n: int) -> list[Pending]:
        """Remove the `n` oldest records from the queue."""
        self.failures = 0
        return [self.queue.popleft() for _ in range(n)]


Work = Request | Append
