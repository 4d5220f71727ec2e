"""A request: what was asked (`RequestSpec`), and its running state (`Request`).

A request ends exactly once and keeps its history: events with times, sampled tokens, the version it read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, cast

from engine.seeding import Sampling, answer_seed, prompt_seed
from engine.step import Chunk, SampledToken
from regions.cache_priority import ORDINARY, PrefixRetention
from regions.ephemeral import Fork
from regions.offload.kv_store import NotResident
from regions.streaming_kv import StreamingPrompt
from regions.tape import Tape
from scheduler.deadlines import Deadline
from scheduler.fair_queue import check_weight, virtual
from scheduler.interfaces import PriorityClass


class State(Enum):
    """The state of a request; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    """Admitted: its cells count against the budget, and it may hold blocks."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class LifecycleEvent(Enum):
    """Moments of a request's life, named as in *Stream2LLM* section 5.1."""

    QUEUED = "QUEUED"
    SCHEDULED = "SCHEDULED"
    """Got blocks and entered a batch: once at first, and again after each preemption."""
    KV_ON_GPU = "KV_ON_GPU"
    """The whole finished prompt is in KV; the first token can be sampled."""
    PREEMPTED_SWAP = "PREEMPTED_SWAP"
    PREEMPTED_RECOMPUTE = "PREEMPTED_RECOMPUTE"
    FINISHED = "FINISHED"
    """Reached any final state."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why work was not done: a code for programs, a message for people.

    Codes of this package: too_long, bad_prompt, engine, nan_logits, no_memory, open_failed, abandoned, late,
    stopping.
    """

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A prompt to continue, after one version of a session or on its own.

    Give exactly one of ``tape``, to read the version that is newest when the request first gets blocks;
    ``reader``, a fork of the version to read; and ``open_prompt``, for a prompt of its own that may use the
    prefix cache under ``salt``. The request owns the reader and releases it at its end. ``on_done`` is called
    once, on the thread that steps the scheduler.

    With ``max_tokens`` 0 the request only prefills: it finishes when its prompt is in KV and leaves the
    reader to the caller. It uses no cells, and the limits on prompts do not apply.

    Raises ValueError for fields that contradict one another.
    """

    cls: PriorityClass
    session: str
    prompt: Sequence[int]
    max_tokens: int
    on_done: Callable[[Request], None]
    tape: Tape | None = None
    reader: Fork | None = None
    open_prompt: Callable[[], StreamingPrompt] | None = None
    stop_ids: frozenset[int] = frozenset()
    choices: tuple[int, ...] | None = None
    """Token ids to choose the answer from; such a request ends after one token."""
    grammar: Callable[[Sequence[int], int], tuple[int, ...]] | None = None
    """Token ids that may follow the generated ones, given how many more fit; None: any."""
    forced: Callable[[Sequence[int]], int | None] | None = None
    """The likely next token where `grammar` leaves one text only, for drafts."""
    temperature: float = 0.0
    """0 takes the best token. Above 0 tokens are drawn, always the same ones for a prompt (equation 20)."""
    top_p: float = 1.0
    """See `engine.seeding.Sampling`, as `top_k`."""
    top_k: int = 0
    seed: tuple[int, int] | None = None
    """A client's seed (64 bits, signed) and the number of the answer (32 bits), of several to one prompt:
    the tokens drawn depend on these, too."""
    top_logprobs: int | None = None
    """See `engine.step.Chunk`."""
    on_token: Callable[[Request], bool] | None = None
    """Called after each generated token, on the thread that steps the scheduler; true ends the answer."""
    salt: str = ""
    """Prefixes are shared under equal salts only; derive it from the authenticated identity."""
    tenant: str = ""
    """Tenants share a class by weight."""
    weight: float = 1.0
    trace_id: str = ""
    """For the log."""
    retention: PrefixRetention = ORDINARY
    """How long the prefix cache keeps prompt and answer."""
    complete: bool = True
    """The prompt is finished. Otherwise (*Stream2LLM*; needs an ``open_prompt``) all but its last token is
    computed as time permits, and nothing is generated before `Scheduler.finish`."""
    deadline: Deadline | None = None
    """Past it the request fails as `late`, between two batches; None: it has all the time."""
    background: bool = False
    """Prefill with the tokens that other work leaves: last in its class, never in a batch with a question, in
    the smallest chunks."""

    def __post_init__(self) -> None:
        if sum(source is not None for source in (self.tape, self.reader, self.open_prompt)) != 1:
            raise ValueError("a request needs exactly one of tape, reader and open_prompt")
        if (self.complete and not self.prompt) or self.max_tokens < 0:
            raise ValueError("a request needs at least one prompt token, and max_tokens of at least 0")
        if not self.complete and (self.open_prompt is None or not self.max_tokens):
            raise ValueError("an unfinished prompt needs an open_prompt and max_tokens above 0")
        if self.background and self.max_tokens:
            raise ValueError("a background request only prefills: its max_tokens must be 0")
        check_weight(self.weight)
        if self.choices is not None and self.grammar is not None:
            raise ValueError("a request has choices or a grammar, not both")
        if self.temperature:
            Sampling(self.temperature, 0, 0, self.top_p, self.top_k)  # raises for an invalid one


class Drafts(NamedTuple):
    """Draft tokens of a request: those that were verified, and those of them that were right."""

    verified: int
    accepted: int


NO_DRAFTS = Drafts(0, 0)


@dataclass(eq=False, slots=True)
class Request:
    """The running state of one `RequestSpec`; work whose units are tokens."""

    spec: RequestSpec
    prompt: Sequence[int] = field(init=False)
    """The prompt received so far."""
    complete: bool = field(init=False)
    """The prompt is finished."""
    reader: Fork | None = field(init=False)
    id: int = 0
    """Sequence number, assigned by submit."""
    state: State = State.QUEUED
    last_chunk_ns: int = 0
    """Time of the newest piece of the prompt, ns."""
    version: int = 0
    """Data version read; kept after the reader is released."""
    start: int = 0
    """Its start in the virtual time of its class, see `scheduler.fair_queue`."""
    admitted: int = 0
    """Running number of its latest admission; 0 before the first."""
    preempted: int = 0
    """Running number of its latest preemption; 0 before the first."""
    output: list[int] = field(default_factory=list)
    """Generated tokens, a stop token included."""
    samples: list[SampledToken] = field(default_factory=list)
    """What was sampled for each generated token."""
    error: Failure | None = None
    events: list[tuple[LifecycleEvent, int]] = field(default_factory=list)
    """(event, time in ns of the scheduler's clock)."""
    waits: dict[str, int] = field(default_factory=dict)
    """Time waited for a batch, ns, by reason."""
    preempted_by: list[int] = field(default_factory=list)
    """Numbers of the work that it was preempted for, one for each preemption."""
    cached_tokens: int = 0
    """Tokens reused from a session's context, the prefix cache or a shared prefill."""
    total_tokens_invalidated: int = 0
    """Tokens whose KV was dropped because the prompt changed (*Stream2LLM* section 4.2)."""
    survival: float = 1.0
    """Running average of the part of the KV that an update of the prompt keeps."""
    recomputed_tokens: int = 0
    """Tokens whose KV was dropped by preemption."""
    swapped_tokens: int = 0
    """Tokens whose KV was moved to the host by preemption."""
    computed_tokens: int = 0
    """Once it has ended: tokens in KV that it had computed itself."""
    engine_ns: int = 0
    """Its part of the passes that it was in, by their tokens, ns."""
    drafts: Drafts = NO_DRAFTS
    _sampling: Sampling | None = None
    """How to draw the first token."""
    _prefix_stale: bool = True
    """The prefix cache may have more of the prompt than at the last look-up."""

    def __post_init__(self) -> None:
        spec = self.spec
        self.prompt, self.complete, self.reader = spec.prompt, spec.complete, spec.reader

    @property
    def cls(self) -> PriorityClass:
        """Its priority class."""
        return self.spec.cls

    @property
    def session(self) -> str:
        """The name of its session; empty without one."""
        return self.spec.session

    @property
    def background(self) -> bool:
        """It uses only what other work leaves of a batch."""
        return self.spec.background

    @property
    def prefill_only(self) -> bool:
        """It produces KV but no answer."""
        return not self.spec.max_tokens

    @property
    def computed(self) -> int:
        """Its tokens in KV, in the pool or on the host."""
        return 0 if self.reader is None else self.reader.length

    @property
    def private(self) -> int:
        """Those of `computed` that it computed itself, without aliased ones."""
        return self.computed - (self.reader.cached_tokens if self.reader and self.spec.open_prompt else 0)

    @property
    def blocks(self) -> int:
        """Its private blocks in the pool."""
        return 0 if self.reader is None else self.reader.blocks

    @property
    def remaining(self) -> int:
        """Known tokens (prompt and generated) to compute.

        An unfinished prompt keeps its last token back, so that finishing it leaves something to compute.
        """
        known = len(self.prompt) + len(self.output) - (not self.complete)
        return max(0, known - self.computed)

    @property
    def decoding(self) -> bool:
        """The next pass computes just the token sampled last."""
        return bool(self.output) and self.remaining == 1

    @property
    def cells(self) -> int:
        """Tokens of KV it may use out of the questions' share: prompt + max_tokens."""
        new = self.spec.max_tokens
        return len(self.prompt) + new if new else 0

    @property
    def takes(self) -> int:
        """Its length in virtual time, see `scheduler.fair_queue`."""
        return virtual(self.cells, self.spec.weight)

    @property
    def restartable(self) -> bool:
        """It can release its reader: a prompt can be read again; a session's answer has not begun."""
        return self.spec.open_prompt is not None or (self.spec.tape is not None and not self.output)

    @property
    def prompt_reader(self) -> StreamingPrompt | None:
        """Its reader if it has an ``open_prompt``."""
        return None if self.spec.open_prompt is None else cast("StreamingPrompt | None", self.reader)

    @property
    def answer(self) -> list[int]:
        """Generated tokens without the stop token."""
        stopped = self.output and self.output[-1] in self.spec.stop_ids
        return self.output[:-1] if stopped else self.output

    @property
    def sampling(self) -> Sampling | None:
        """How to draw the next token, None for the best one. Preemption does not change it."""
        if not self.spec.temperature or not self.complete:
            return None
        if self._sampling is None:
            spec, seed = self.spec, prompt_seed(self.prompt)
            if spec.seed is not None:
                seed = answer_seed(seed, *spec.seed)
            self._sampling = Sampling(spec.temperature, seed, 0, spec.top_p, spec.top_k)
        return self._sampling.later(len(self.output))

    def chosen(self, texts: Sequence[str] | None) -> str | None:
        """The chosen one of ``texts``, one text for each choice; None for free text."""
        if not texts or self.spec.choices is None:
            return None
        return texts[self.spec.choices.index(self.output[0])]

    def first(self, event: LifecycleEvent) -> int | None:
        """Time of the first ``event``, ns; None if it never happened."""
        return next((at for what, at in self.events if what is event), None)

    # As of a `TapeAppend`, in tokens.

    @property
    def seq(self) -> int:
        """Submission order."""
        return self.id

    @property
    def away(self) -> bool:
        """It waits for the session's KV, which is lost or on its way to the pool."""
        return self.reader is None and self.spec.tape is not None and self.spec.tape.away

    def tokens_of(self, n: int) -> int:
        """Tokens of the next ``n`` units, which are tokens."""
        return n

    def units_within(self, tokens: int, most: int) -> int:
        """How many of the next ``most`` units fit into ``tokens`` tokens."""
        return max(0, min(tokens, most))

    def blocks_needed(self, n: int, block_size: int) -> int:
        """More blocks that the next ``n`` tokens need; also before there is a reader. Changes nothing."""
        return -(-n // block_size) if self.reader is None else self.reader.blocks_needed(n)

    def share(self, source: StreamingPrompt, n: int) -> None:
        """Read the first ``n`` tokens of ``source``, which are equal to the prompt's."""
        assert self.prompt_reader is not None
        self.prompt_reader.read_from(source, n)
        self.cached_tokens = self.prompt_reader.cached_tokens

    def open(self, n: int = 0) -> int:
        """Open the reader and look the rest up in the prefix cache. Raises whatever opening raises.

        There is no reader yet while the session's KV is outside the pool.
        """
        if self.reader is None and self.spec.tape is not None:
            try:
                self.reader = self.spec.tape.fork()
            except NotResident:
                return 0
        elif self.reader is None and self.spec.open_prompt is not None:
            self.reader = prompt = self.spec.open_prompt()
            prompt.update(self.prompt)
            self._prefix_stale = True
        assert self.reader is not None  # RequestSpec: one of the three is given
        if self._prefix_stale and self.prompt_reader is not None and not self.reader.swapped:
            self._prefix_stale = False
            self.prompt_reader.match()
        self.version, self.cached_tokens = self.reader.version, self.reader.cached_tokens
        return 0

    def allocate(self, n: int) -> bool:
        """Allocate the blocks of the next ``n`` tokens. False, with nothing changed, without room."""
        if self.reader is None:
            self.open()
        return self.reader is not None and self.reader.acquire(n)

    def defer(self) -> None:
        """Release the version if nothing was computed on it, so that a newer one is read later."""
        reader, waits = self.reader, self.state is State.QUEUED
        if waits and self.restartable and reader is not None and not reader.blocks and not reader.swapped:
            self.close()

    def chunk(self, n: int, drafts: tuple[int, ...] = ()) -> Chunk:
        """The next ``n`` tokens, with drafts after them, for the executor."""
        assert self.reader is not None  # opened by the allocation
        sample = n == self.remaining and self.complete and self.spec.max_tokens > 0
        tokens = self.next_tokens(n)
        if drafts:
            tokens = [*tokens, *drafts]
        after = range(1, len(drafts) + 1) if self.spec.grammar else ()
        return Chunk(
            self.reader,
            tokens,
            sample,
            self.choices_after(),
            self.sampling,
            len(drafts),
            self.spec.top_logprobs,
            tuple(self.choices_after(drafts[:n]) for n in after),
        )

    def choices_after(self, drafts: Sequence[int] = ()) -> tuple[int, ...] | None:
        """The token ids that the token after its output and ``drafts`` is chosen from; None: any."""
        if self.spec.grammar is None:
            return self.spec.choices
        known = [*self.output, *drafts]
        return self.spec.grammar(known, self.spec.max_tokens - len(known))

    def next_tokens(self, n: int) -> Sequence[int]:
        """The next ``n`` known tokens to compute."""
        start, prompt = self.computed, len(self.prompt)
        if start >= prompt:
            return self.output[start - prompt : start + n - prompt]
        head = self.prompt[start : start + n]
        if start + n <= prompt:
            return head
        return [*head, *self.output[: start + n - prompt]]

    # Transitions.

    def queue(self, number: int, now: int) -> None:
        """Get its number, in order of arrival, when it is queued."""
        self.id, self.last_chunk_ns = number, now
        self.events.append((LifecycleEvent.QUEUED, now))

    def start_at(self, start: int) -> None:
        """Get its place among the requests of its class, see `scheduler.fair_queue`."""
        self.start = start

    def finish_prompt(self, now: int) -> None:
        """Nothing follows the prompt any more."""
        self.complete, self.last_chunk_ns = True, now

    def admit(self, number: int, now: int) -> None:
        """Enter a batch, as the ``number``-th admission of all."""
        self.state, self.admitted = State.RUNNING, number
        self.events.append((LifecycleEvent.SCHEDULED, now))

    def replace(self, prompt: Sequence[int], now: int) -> None:
        """Replace the prompt; KV of the common prefix stays (*Stream2LLM* section 4.2)."""
        self.prompt, self.last_chunk_ns = prompt, now
        reader = self.prompt_reader
        if reader is None:
            return
        before = reader.length
        lost = reader.update(prompt)
        if before:
            self.survival += (1 - lost / before - self.survival) / 4
        self.total_tokens_invalidated += lost
        self._prefix_stale = True
        if reader.length >= len(prompt) > 0:
            reader.keep(len(prompt) - 1)

    def preempt(self, how: LifecycleEvent, number: int, now: int, by: int) -> None:
        """Leave the pool, as the ``number``-th preemption of all; KV not swapped out already is dropped."""
        assert self.reader is not None  # only admitted requests are preempted
        if how is LifecycleEvent.PREEMPTED_SWAP:
            self.swapped_tokens += self.private
        else:
            self.recomputed_tokens += self.private
            self.reader.reset()
            self._prefix_stale = True
        self.state, self.preempted = State.QUEUED, number
        self.preempted_by.append(by)
        self.events.append((how, now))

    def verify(self, drafted: int, accepted: int) -> None:
        """Count the verified drafts of its last chunk and drop the rejected ones from KV."""
        assert self.reader is not None  # it was in the batch
        self.reader.keep(self.reader.length - drafted + accepted)
        self.drafts = Drafts(self.drafts.verified + drafted, self.drafts.accepted + accepted)

    def accept(self, sampled: SampledToken) -> bool:
        """Add a sampled token; True when the answer is complete."""
        self.samples.append(sampled)
        self.output.append(sampled.token)
        spec = self.spec
        stops = spec.on_token is not None and spec.on_token(self)
        return (
            stops
            or spec.choices is not None
            or sampled.token in spec.stop_ids
            or len(self.output) >= spec.max_tokens
        )

    def remember(self) -> None:
        """Offer the prompt and the answer so far to the prefix cache, as far as they are in KV.

        A token that was just sampled is not in KV yet. Drafts behind the end of an answer are left out.
        """
        if self.prompt_reader is not None:
            self.prompt_reader.save(len(self.prompt) + len(self.output), self.spec.retention)

    def close(self) -> None:
        """Release the blocks and the context. Idempotent."""
        if self.reader is not None:
            self.reader.release()
            self.reader = None

    def end(self, state: State, now: int, error: Failure | None = None) -> None:
        """Reach a final state and release all memory; a prefill-only request leaves its KV to the reader."""
        self.computed_tokens = self.private
        if not (self.prefill_only and state is State.FINISHED):
            self.close()
        self.state, self.error = state, error
        self.events.append((LifecycleEvent.FINISHED, now))
