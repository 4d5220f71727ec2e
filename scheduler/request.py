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
from typing import cast

from engine.seeding import Sampling, prompt_seed
from engine.step import SampledToken
from scheduler.speculation import Lookup
from scheduler.types import PriorityClass, PromptReader, Reader, Tape


class State(Enum):
    """Where a request is; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    """Admitted: its cells count against the budget and it may hold blocks."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(Enum):
    """Moments of a request's life, named as in *Stream2LLM* section 5.1."""

    QUEUED = "QUEUED"
    SCHEDULED = "SCHEDULED"
    """Got blocks and went into a batch: first time, and again after every preemption."""
    KV_ON_GPU = "KV_ON_GPU"
    """All of its finished prompt is in KV; the first token can be sampled."""
    PREEMPTED_SWAP = "PREEMPTED_SWAP"
    PREEMPTED_RECOMPUTE = "PREEMPTED_RECOMPUTE"
    FINISHED = "FINISHED"
    """Reached a final state, whichever."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why work was not done: a code for programs and a message for people.

    Codes of this package: too_long, engine, nan_logits, no_memory, open_failed, abandoned, stopping.
    """

    code: str
    message: str


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

    Give one of three: `open_reader`, called when the request first gets blocks so that it reads the freshest
    version; `reader`, already forked at the version that must be read; `open_prompt` for a prompt of its own
    that may use the prefix cache under `salt`. The request owns the reader and releases it at its end.
    `on_done` is called once, on the thread that steps the scheduler.

    With `complete` False the prompt is still coming in (*Stream2LLM*): it may be empty, only an `open_prompt`
    can read it, what is there is computed as time permits, but for the last token, and nothing is generated
    before `Scheduler.finish`.

    With `max_tokens` 0 it only prefills: it finishes when its prompt is in KV and then leaves its reader to
    whoever asked for it. It is done in what the other work leaves over: behind all of its class, never in a
    pass with a question, in the smallest chunks, since whatever arrives waits for the pass under way. No
    limit on prompts holds for it and it claims no cells: who submits one sees to the room.

    Raises ValueError unless exactly one of the readers is given, for an empty prompt, for `max_tokens` below
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
    open_prompt: Callable[[], PromptReader] | None = None
    salt: str = ""
    """Whose prefixes it may read: the authenticated identity."""
    complete: bool = True
    """All of the prompt has come in."""

    id: int = field(init=False, default=0)
    """Sequence number, given at submit."""
    state: State = field(init=False, default=State.QUEUED)
    admitted: int = field(init=False, default=0)
    """Running number of its latest admission; 0 before the first."""
    displaced: int = field(init=False, default=0)
    """Running number of its latest preemption; 0 before the first."""
    last_chunk_ns: int = field(init=False, default=0)
    """When the newest piece of the prompt came in."""
    output: list[int] = field(init=False, default_factory=list)
    """Generated tokens, a stop token included."""
    rows: list[SampledToken] = field(init=False, default_factory=list)
    """The row behind each generated token."""
    events: list[tuple[Event, int]] = field(init=False, default_factory=list)
    """(event, time in ns of the scheduler's clock)."""
    error: Failure | None = field(init=False, default=None)
    preempted_by: list[int] = field(init=False, default_factory=list)
    """Numbers of the work it made room for, a preemption each."""
    waits: dict[str, int] = field(init=False, default_factory=dict)
    """Time (ns) it waited for a batch, by reason."""
    total_tokens_invalidated: int = field(init=False, default=0)
    """Tokens whose KV was given up because the prompt changed (*Stream2LLM* section 4.2)."""
    recomputed_tokens: int = field(init=False, default=0)
    """Tokens whose KV was dropped by preemption."""
    swapped_tokens: int = field(init=False, default=0)
    """Tokens whose KV was moved to the host by preemption."""
    drafted: int = field(init=False, default=0)
    """Guessed tokens that were verified for it."""
    accepted: int = field(init=False, default=0)
    """Guessed tokens that were right."""
    version: int = field(init=False, default=0)
    """Data version read; survives the reader."""
    cached_tokens: int = field(init=False, default=0)
    """Tokens that were reused: of a session's past, of the prefix cache, of a group's leader."""
    survival: float = field(init=False, default=1.0)
    """Part of the KV that an update of the prompt leaves, on the average of those so far."""
    lookup: Lookup | None = field(init=False, default=None)
    """Its own tokens as a source of guesses; made by the first guess."""
    place: object = field(init=False, default=None)
    """Where the scheduler's book has it."""
    head: tuple[str, int, int] | None = field(init=False, default=None)
    """(salt, tokens in KV, the next token): where its group is looked up, made once for each place."""
    hashed: tuple[int, int] | None = field(init=False, default=None)
    """(tokens in KV, hash of the next ones), made when another stands at the same place."""
    twin: tuple[Sequence[int], int] | None = field(init=False, default=None)
    """(another's prompt, the tokens at its beginning that are known to be this one's)."""
    since: dict[str, int] | None = field(init=False, default=None)
    """The waiting ledger as it was when it began to wait."""
    _sampling: Sampling | None = field(init=False, default=None)
    """How the first token is drawn."""
    _changed: bool = field(init=False, default=True)
    """The prefix cache may know more of the prompt than when it was last asked."""

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.open_reader, self.reader, self.open_prompt)) != 1:
            raise ValueError("a request takes exactly one of open_reader, reader and open_prompt")
        if (self.complete and not self.prompt) or self.max_tokens < 0:
            raise ValueError("a request needs at least one prompt token and max_tokens of at least 0")
        if not self.complete and (self.open_prompt is None or not self.max_tokens):
            raise ValueError("a prompt that comes in pieces needs an open_prompt and max_tokens above 0")
        if self.temperature:
            Sampling(self.temperature, 0, 0)  # raises for one that is no temperature

    @property
    def computed(self) -> int:
        """Own tokens in KV, in the pool or on the host."""
        return 0 if self.reader is None else self.reader.length

    @property
    def private(self) -> int:
        """Of these, the ones it computed: a prompt's reader counts what it aliased, too."""
        return self.computed - (self.reader.cached_tokens if self.reader and self.open_prompt else 0)

    @property
    def blocks(self) -> int:
        """Private blocks it holds in the pool."""
        return 0 if self.reader is None else self.reader.blocks

    @property
    def remaining(self) -> int:
        """Known tokens (prompt and generated) to be computed; of an unfinished prompt all but the last one.

        That one gives the first token's row, so that finishing a prompt always leaves something to compute.
        """
        known = len(self.prompt) + len(self.output) - (not self.complete)
        return max(0, known - self.computed)

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
        """It can give up its reader: a prompt is read anew; of a session nothing was generated yet."""
        return self.open_prompt is not None or (self.open_reader is not None and not self.output)

    @property
    def prompt_reader(self) -> PromptReader | None:
        """Its reader, if that reads a prompt of its own."""
        return None if self.open_prompt is None else cast("PromptReader | None", self.reader)

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
        if not self.temperature or not self.complete:
            return None
        if self._sampling is None:
            self._sampling = Sampling(self.temperature, prompt_seed(self.prompt), 0)
        return self._sampling.later(len(self.output))

    def chosen(self, texts: Sequence[str] | None) -> str | None:
        """Which of `texts`, one for each of its choices, it answered; None for free text."""
        if not texts or self.choices is None:
            return None
        return texts[self.choices.index(self.output[0])]

    def next_tokens(self, n: int) -> Sequence[int]:
        """The `n` known tokens after those in KV."""
        start, prompt = self.computed, len(self.prompt)
        if start >= prompt:
            return self.output[start - prompt : start + n - prompt]
        head = self.prompt[start : start + n]
        if start + n <= prompt:
            return head
        return [*head, *self.output[: start + n - prompt]]

    def blocks_needed(self, n: int, block_size: int) -> int:
        """Blocks for `n` more tokens, also before there is a reader."""
        return -(-n // block_size) if self.reader is None else self.reader.blocks_needed(n)

    def open(self) -> Reader:
        """The reader, opened now if need be. Raises whatever opening raises."""
        if self.open_prompt is not None:
            return self._open_prompt(self.open_prompt)
        if self.reader is None:
            assert self.open_reader is not None  # __post_init__: one of the three is given
            self.reader = self.open_reader()
        self.version, self.cached_tokens = self.reader.version, self.reader.cached_tokens
        return self.reader

    def replace(self, prompt: Sequence[int], now: int) -> None:
        """Another prompt: what is in KV of it stays, the rest is given up (*Stream2LLM* section 4.2)."""
        self.prompt, self.last_chunk_ns = prompt, now
        self.head = self.hashed = self.twin = None
        reader = self.prompt_reader
        if reader is None:
            return
        before = reader.length
        lost = reader.update(prompt)
        if before:
            self.survival += (1 - lost / before - self.survival) / 4
        self.total_tokens_invalidated += lost
        self._changed = True
        if reader.length >= len(prompt) > 0:
            reader.keep(len(prompt) - 1)

    def close(self) -> None:
        """Give back blocks and past. Idempotent."""
        if self.reader is not None:
            self.reader.release()
            self.reader = None

    def drop(self, event: Event, now: int, by: int) -> None:
        """It leaves the pool and waits: its KV is on the host already, or is dropped here."""
        assert self.reader is not None  # only admitted requests are preempted
        if event is Event.PREEMPTED_SWAP:
            self.swapped_tokens += self.private
        else:
            self.recomputed_tokens += self.private
            self.reader.reset()
            self._changed = True
        self.state = State.QUEUED
        self.preempted_by.append(by)
        self.events.append((event, now))

    def accept(self, row: SampledToken) -> bool:
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

    def _open_prompt(self, opening: Callable[[], PromptReader]) -> Reader:
        reader = self.prompt_reader
        if reader is None:
            reader = self.reader = opening()
            reader.update(self.prompt)
            self._changed = True
        if self._changed and not reader.swapped:
            self._changed = False
            reader.match()
        self.cached_tokens = reader.cached_tokens
        return reader


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
    due: bool = False
    """Its staleness bound is near: it goes before sessions' questions."""
    place: object = field(default=None)
    """Where the scheduler's book has it."""

    cls = PriorityClass.STREAM
    decoding = False
    prefill_only = False

    @property
    def seq(self) -> int:
        """Number of the oldest waiting record, so that a tape with a backlog cannot hold up the others."""
        return self.queue[0].seq

    @property
    def deadline(self) -> int | None:
        """When its oldest record is to be committed (ns); None when nothing is promised."""
        return self.queue[0].queued_ns + self.tape.staleness_ns if self.tape.staleness_ns else None

    @property
    def tokens(self) -> int:
        """Tokens of all records that wait."""
        return sum(len(pending.record.tokens) for pending in self.queue)

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
        self.failures, self.due = 0, False
        return [self.queue.popleft() for _ in range(n)]


Work = Request | Append
