"""An exact, tiny stand-in for the engine: blocks are counted one by one and the "model" is a hash.

The next token is a hash of every visible token, so an answer depends on the exact history: a token computed
twice, left out, or read from the wrong version changes it. `one_by_one` is the oracle: the same answer
without any batching.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from engine.step import Chunk, SampledToken
from regions.cache_priority import PrefixRetention
from regions.offload.kv_store import NotResident
from regions.sliding import Retention
from regions.streaming_kv import StreamingPrompt
from scheduler.interfaces import PriorityClass
from scheduler.request import Request, RequestSpec, State

VOCABULARY = 97


def model(tokens: Sequence[int], choices: tuple[int, ...] | None = None) -> SampledToken:
    """Greedy row after `tokens`: each candidate's logit is a hash of it and the whole history."""
    history = b"".join(token.to_bytes(4, "big") for token in tokens)

    def logit(candidate: int) -> float:
        digest = blake2b(history + candidate.to_bytes(4, "big"), digest_size=6).digest()
        return int.from_bytes(digest, "big") / 2**40

    ranked = sorted(choices or range(VOCABULARY), key=logit, reverse=True)
    return SampledToken(ranked[0], logit(ranked[0]), logit(ranked[min(1, len(ranked) - 1)]))


def one_by_one(
    context: Sequence[int],
    prompt: Sequence[int],
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    choices: tuple[int, ...] | None = None,
) -> list[SampledToken]:
    """The tokens that a request must end with."""
    tokens, rows = [*context, *prompt], []
    while True:
        row = model(tokens, choices)
        rows.append(row)
        tokens.append(row.token)
        if choices or row.token in stop_ids or len(rows) >= max_tokens:
            return rows


class FakeMemory:
    """A pool of reference-counted blocks."""

    def __init__(self, total_blocks: int, block_size: int = 4) -> None:
        self.total_blocks, self.block_size = total_blocks, block_size
        self.leaving = 0
        self.references: dict[int, int] = {}
        self._unused = list(range(total_blocks))

    @property
    def free_blocks(self) -> int:
        return len(self._unused)

    def take(self, n: int) -> list[int] | None:
        if n > len(self._unused):
            return None
        blocks = [self._unused.pop() for _ in range(n)]
        self.references.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, blocks: Sequence[int]) -> list[int]:
        for block in blocks:
            self.references[block] += 1
        return list(blocks)

    def drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]
                self._unused.append(block)


class FakeReader:
    def __init__(
        self, memory: FakeMemory, context: Sequence[int] = (), version: int = 0, pinned: Sequence[int] = ()
    ) -> None:
        self.memory, self.context, self.version = memory, tuple(context), version
        self.pinned = memory.share(pinned)
        self.private: list[int] = []
        self.kv: list[int] = []
        self.host: FakeTier | None = None
        self.released = False

    @property
    def cached_tokens(self) -> int:
        return len(self.context)

    @property
    def length(self) -> int:
        return len(self.kv)

    @property
    def blocks(self) -> int:
        return len(self.private)

    @property
    def swapped(self) -> bool:
        return self.host is not None

    def blocks_needed(self, n: int) -> int:
        return max(0, -(-(self.length + n) // self.memory.block_size) - len(self.private))

    def acquire(self, n: int) -> bool:
        assert not self.released
        blocks = self.memory.take(self.blocks_needed(n))
        if blocks is None:
            return False
        self.private += blocks
        if self.host is not None:
            self.host.drop(self)
        return True

    def release(self) -> None:
        self.reset()
        self.memory.drop(self.pinned)
        self.pinned, self.released = [], True

    def reset(self) -> None:
        self.keep(0)

    def keep(self, n: int) -> None:
        assert n <= self.length
        self.kv = self.kv[:n]
        if self.host is not None:
            self.host.trim(self)
            return
        kept = -(-n // self.memory.block_size)
        self.memory.drop(self.private[kept:])
        self.private = self.private[:kept]

    def write(self, tokens: Sequence[int]) -> tuple[int, ...]:
        assert not self.released
        assert self.host is None, "on the host"
        assert self.length + len(tokens) <= len(self.private) * self.memory.block_size, "no blocks taken"
        self.kv += tokens
        return (*self.context, *self.kv)


class FakeTier:
    """A number of blocks of host memory."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.stored: dict[FakeReader, int] = {}

    def swap_out(self, reader: FakeReader) -> bool:
        needed = len(reader.private)
        if sum(self.stored.values()) + needed > self.blocks:
            return False
        self.stored[reader], reader.host = needed, self
        reader.memory.drop(reader.private)
        reader.private = []
        return True

    def trim(self, reader: FakeReader) -> None:
        self.stored[reader] = -(-reader.length // reader.memory.block_size)
        if not reader.length:
            self.drop(reader)

    def drop(self, reader: FakeReader) -> None:
        del self.stored[reader]
        reader.host = None


class FakePrompt(FakeReader):
    """A prompt of its own; `saved_prompts` stands for the prefix cache."""

    def __init__(self, memory: FakeMemory, saved_prompts: list[tuple[int, ...]] | None = None) -> None:
        super().__init__(memory)
        self.saved_prompts = saved_prompts
        self.prompt: list[int] = []
        self.gained = 0

    @property
    def cached_tokens(self) -> int:
        return self.gained

    def update(self, tokens: Sequence[int]) -> int:
        before, common = self.length, 0
        while common < min(before, len(tokens)) and self.kv[common] == tokens[common]:
            common += 1
        self.prompt = list(tokens)
        self.keep(common)
        return before - common

    def match(self) -> int:
        return 0

    def read_from(self, source: StreamingPrompt, n: int) -> None:
        assert isinstance(source, FakePrompt)
        assert source.kv[:n] == self.prompt[:n]
        assert n < len(self.prompt)
        self.memory.drop(self.private)
        self.private = self.memory.share(source.private[: -(-n // self.memory.block_size)])
        self.gained, self.kv = n, source.kv[:n]

    def save(self, most: int, retention: PrefixRetention) -> None:
        if self.saved_prompts is not None:
            self.saved_prompts.append(tuple(self.kv[:most]))

    def keep(self, n: int) -> None:
        super().keep(n)
        self.gained = min(self.gained, n)


class FakeTape:
    """Tokens in consecutive slots of a list of blocks; eviction frees the blocks it empties at the head."""

    def __init__(self, memory: FakeMemory, name: str, retention: int = 40, span_ns: int = 0) -> None:
        self.memory, self.name = memory, name
        self.retention = Retention(retention, span_ns=span_ns)
        self.version = 0
        self.records: list[list[int]] = []
        self.times: list[int] = []
        self.blocks: list[int] = []
        self.head = 0
        self.written: list[int] | None = None
        self.history: dict[int, tuple[int, ...]] = {0: ()}
        self.fail_commit = False
        self.staleness_ns = 0
        self.lost = self.leaving = False
        self.unreadable = False
        """Stored outside the pool; that it is lost shows when it is first needed."""

    @property
    def tokens(self) -> list[int]:
        return [token for record in self.records for token in record]

    @property
    def away(self) -> bool:
        return self.lost

    @property
    def live_tokens(self) -> int:
        return len(self.tokens)

    @property
    def live_records(self) -> int:
        return len(self.records)

    def fork(self) -> FakeReader:
        self._find()
        if self.lost:
            raise NotResident(f"session {self.name} lost its stored KV")
        # what is committed, also after room was made for an append that is not
        return FakeReader(self.memory, self.history[self.version], self.version, self.blocks)

    def blocks_needed(self, n: int) -> int:
        return max(0, -(-(self.head + self.live_tokens + n) // self.memory.block_size) - len(self.blocks))

    def make_room(self, lengths: Sequence[int], times: Sequence[int]) -> int:
        n_tokens, newest_ns, evicted = sum(lengths), max(times), 0
        while self.records and (
            self.live_tokens + n_tokens > self.retention.tokens
            or (self.retention.span_ns and self.times[0] < newest_ns - self.retention.span_ns)
        ):
            evicted += len(self.records[0])
            self.head += len(self.records.pop(0))
            self.times.pop(0)
        size = self.memory.block_size
        self.memory.drop(self.blocks[: self.head // size])
        self.blocks, self.head = self.blocks[self.head // size :], self.head % size
        return evicted

    @property
    def window(self) -> list[int]:
        return self.tokens

    def lose(self, *, found: bool = True) -> None:
        """Lose its KV for good."""
        self.memory.drop(self.blocks)
        self.blocks, self.head, self.lost, self.unreadable = [], 0, found, not found

    def fresh_window(self) -> FakeReader:
        return FakeReader(self.memory)

    def adopt(self, fresh: FakeReader) -> None:
        assert self.lost
        assert fresh.kv == self.window
        self.blocks, fresh.private, self.lost = fresh.private, [], False

    def acquire(self, n: int) -> bool:
        blocks = None if self.lost else self.memory.take(self.blocks_needed(n))
        if blocks is None:
            return False
        if self.unreadable:  # as the real tape, which takes blocks before it reads into them
            self.memory.drop(blocks)
            self._find()
            return False
        self.blocks += blocks
        return True

    def _find(self) -> None:
        self.lost, self.unreadable = self.lost or self.unreadable, False

    def write(self, tokens: Sequence[int]) -> tuple[int, ...]:
        assert not self.lost
        assert self.head + self.live_tokens + len(tokens) <= len(self.blocks) * self.memory.block_size
        self.written = list(tokens)
        return (*self.tokens, *tokens)

    def commit(self, record_lengths: Sequence[int], times: Sequence[int]) -> int:
        if self.fail_commit:
            raise RuntimeError("commit refused")
        assert sum(record_lengths) == len(self.written)
        for length in record_lengths:
            self.records.append(self.written[:length])
            self.written = self.written[length:]
        self.times += times
        self.written = None
        self.version += 1
        self.history[self.version] = tuple(self.tokens)
        return self.version


class FakeExecutor:
    """Runs the hash model, checks the contract, and keeps every batch for inspection."""

    def __init__(self, max_tokens: int = 10**9, max_rows: int = 10**9) -> None:
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.batches: list[list[Chunk]] = []
        self.fail_next = 0
        self.nan_after: tuple[int, ...] | None = None
        self.before: Callable[[], object] = lambda: None

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        self.before()
        assert batch, "an empty batch"
        assert len({id(chunk.target) for chunk in batch}) == len(batch) <= self.max_rows
        assert all(chunk.tokens for chunk in batch)
        assert sum(len(chunk.tokens) for chunk in batch) <= self.max_tokens
        self.batches.append(list(batch))
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("device lost")
        return [self._run(chunk) for chunk in batch]

    def _run(self, chunk: Chunk) -> SampledToken | None:
        visible = chunk.target.write(chunk.tokens)
        if not chunk.sample:
            return None
        if chunk.drafts:
            return self._verify(visible, chunk)
        if self.nan_after is not None and visible[-len(self.nan_after) :] == self.nan_after:
            return SampledToken(0, float("nan"), float("nan"), error="the logits are not finite")
        return model(visible, chunk.choices)

    def _verify(self, visible: tuple[int, ...], chunk: Chunk) -> SampledToken:
        """The model's own rows over the drafts, up to the first that is wrong."""
        rows: list[SampledToken] = []
        known = len(visible) - chunk.drafts
        for draft, choices in zip((*visible[known:], None), chunk.row_choices, strict=True):
            rows.append(model(visible[: known + len(rows)], choices))
            if rows[-1].token != draft:
                break
        return replace(rows[-1], accepted=tuple(rows[:-1]))

    def trace(self) -> list[list[tuple[tuple[int, ...], bool]]]:
        """The batches without object identities, to compare two runs."""
        return [[(tuple(chunk.tokens), chunk.sample) for chunk in batch] for batch in self.batches]


class HeldClock:
    """A clock that only the test advances, ns."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class FakeClock(HeldClock):
    """Advances by one nanosecond at each call."""

    def __call__(self) -> int:
        self.now += 1
        return self.now


def request_of(
    memory: FakeMemory,
    prompt: Sequence[int],
    max_tokens: int = 1,
    cls: PriorityClass = PriorityClass.SESSION,
    tape: FakeTape | None = None,
    *,
    on_done: Callable[[Request], object] = lambda ended: None,
    **spec: Any,
) -> Request:
    """A request on a tape's newest version. Without a tape POOL reads a prompt of its own, others nothing."""
    if "reader" not in spec and "open_prompt" not in spec:
        if tape is None and cls is PriorityClass.POOL:
            spec["open_prompt"] = lambda: FakePrompt(memory)
        else:
            spec["tape"] = tape or FakeTape(memory, "")
    session = spec.pop("session", tape.name if tape else "")
    return Request(RequestSpec(cls, session, prompt, max_tokens, on_done, **spec))


class Answers:
    """Makes requests, and checks their answers against the context that each one read."""

    def __init__(self, memory: FakeMemory) -> None:
        self.memory = memory
        self.done: list[Request] = []
        self.contexts: dict[int, tuple[int, ...]] = {}
        """What the reader of each ended request saw, by request."""

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        cls: PriorityClass,
        tape: FakeTape,
        on_done: Callable[[Request], object] = lambda ended: None,
        **spec: Any,
    ) -> Request:
        """See `request_of`."""

        def done(ended: Request) -> None:
            self.contexts[ended.id] = tape.history[ended.version]
            self.done.append(ended)
            on_done(ended)

        return request_of(self.memory, prompt, max_tokens, cls, tape, on_done=done, **spec)

    def check(self, request: Request) -> None:
        """The answer is the one-by-one answer on the context it read."""
        assert request.state is State.FINISHED, (request.id, request.error)
        spec, context = request.spec, self.contexts[request.id]
        expected = one_by_one(context, request.prompt, spec.max_tokens, spec.stop_ids, spec.choices)
        assert [replace(sample, accepted=()) for sample in request.samples] == expected
        assert request.output == [row.token for row in expected]
