"""The maintained order equals a new sort after any changes."""

from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from itertools import count, islice

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.step import SampledToken
from scheduler.interfaces import PriorityClass
from scheduler.policies import NAMES, Ordering
from scheduler.prefix_queue import waiting_order
from scheduler.queues import Queues
from scheduler.request import LifecycleEvent, Request, State
from scheduler.tapes import TapeAppend, TapeItem, Work
from tests.kit.scheduler.fakes import FakeMemory, FakeTape, request_of
from tests.kit.scheduler.worlds import SavedPromptsIndex

FLASH, SESSION, POOL, STREAM = PriorityClass
K = 3
orderings = [Ordering(name, K) for name in NAMES if name != "klpm-adaptive"]  # its k is learnt
tokens = st.lists(st.integers(0, 2), max_size=12)
which = st.integers(0, 10**6)
classes = st.sampled_from([FLASH, SESSION, POOL, POOL])


def has_work(work: Work) -> bool:
    return isinstance(work, TapeAppend) or work.remaining > 0


def priority(work: Work) -> tuple[int, ...]:
    """Classes and freshness objectives (docs/scheduling.md); the later of each runs in the background."""
    if isinstance(work, TapeAppend):
        return (1, 0) if work.due else (4, 0)
    return {FLASH: 0, SESSION: 2, POOL: 3}[work.cls], int(work.background)


class Model(RuleBasedStateMachine):
    """Work that changes at random, in the queues and in a plain list."""

    @initialize(ordering=st.sampled_from([*orderings, Ordering("klpm", K), Ordering("klpm", K)]))
    def start(self, ordering: Ordering) -> None:
        self.ordering = ordering
        self.saved_prompts: list[tuple[int, ...]] = [(0, 1, 2), (1, 1, 1, 1)]
        self.index = SavedPromptsIndex(self.saved_prompts)
        order, _ = waiting_order(ordering, self.index, None)
        self.queues = Queues(ordering.key, order)
        self.memory = FakeMemory(10_000)
        self.requests: list[Request] = []
        self.appends: list[TapeAppend] = []
        self.numbers, self.admissions, self.preemptions = count(1), count(1), count(1)
        self.taken = 0
        """Choices of the waiting order so far."""

    def changed(self, request: Request, *, prompt: bool = False) -> None:
        self.queues.update(request, prompt=prompt)

    def some(self, n: int, *states: State) -> Request | None:
        fitting = [request for request in self.requests if request.state in states]
        return fitting[n % len(fitting)] if fitting else None

    @rule(
        cls=st.sampled_from([FLASH, SESSION, POOL, POOL]),
        prompt=tokens,
        complete=st.booleans(),
        new=st.integers(0, 3),
        background=st.booleans(),
    )
    def submit(
        self, cls: PriorityClass, prompt: list[int], complete: bool, new: int, background: bool
    ) -> None:
        complete = complete or cls is not POOL
        request = request_of(
            self.memory,
            prompt or [1] * complete,
            new if complete else max(1, new),
            cls,
            complete=complete,
            background=background and complete and not new,
        )
        request.id = next(self.numbers)
        request.last_chunk_ns = request.id
        self.requests.append(request)
        self.queues.requests[request.id] = request
        self.changed(request)

    @rule(prompts=st.lists(tokens, min_size=2, max_size=5))
    def crowd(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self.submit(POOL, prompt, True, 2, False)

    @rule(n=which, chunk=st.integers(1, 12))
    def compute(self, n: int, chunk: int) -> None:
        """Admitted if need be, it computes a chunk; at its end a token comes out."""
        request = self.some(n, State.QUEUED, State.RUNNING)
        if request is None or not request.remaining:
            return
        self.taken += request.state is State.QUEUED and request in self.never_admitted()
        if request.state is State.QUEUED:
            request.state, request.admitted = State.RUNNING, next(self.admissions)
            self.changed(request)
        request.open()
        reader = request.reader
        todo = request.next_tokens(min(chunk, request.remaining))
        assert reader.acquire(len(todo))
        reader.write(todo)
        if not request.remaining and request.complete:
            if len(request.output) >= request.spec.max_tokens:
                self._end(request)
                return
            request.accept(SampledToken(1, 1.0, 0.0))
        self.changed(request)

    @rule(n=which)
    def preempt(self, n: int) -> None:
        request = self.some(n, State.RUNNING)
        if request is not None:
            request.preempt(LifecycleEvent.PREEMPTED_RECOMPUTE, next(self.preemptions), 0, 0)
            self.changed(request)

    @rule(n=which, prompt=tokens, finish=st.booleans())
    def stream(self, n: int, prompt: list[int], finish: bool) -> None:
        open_ones = [request for request in self.requests if not request.complete]
        if not open_ones:
            return
        request = open_ones[n % len(open_ones)]
        request.replace(prompt or [1], next(self.numbers))
        request.complete = finish
        self.changed(request, prompt=True)

    @rule(n=which)
    def end(self, n: int) -> None:
        request = self.some(n, State.QUEUED, State.RUNNING)
        if request is not None:
            self._end(request)

    def _end(self, request: Request) -> None:
        del self.queues.requests[request.id]
        self.requests.remove(request)
        self.queues.remove(request)
        self.queues.remove(request)  # idempotent
        request.end(State.FINISHED, 0)

    @rule(prompt=tokens)
    def save(self, prompt: list[int]) -> None:
        self.saved_prompts.append(tuple(prompt))

    @rule(n=st.integers(0, 3), due=st.booleans())
    def append(self, n: int, due: bool) -> None:
        item = TapeItem([1], seq=next(self.numbers))
        if n < len(self.appends):
            append = self.appends[n]
            append.queue.append(item)
            append.due |= due
        else:
            append = TapeAppend(FakeTape(self.memory, str(n)), deque([item]))
            self.appends.append(append)
        self.queues.update(append)

    @precondition(lambda self: self.appends)
    @rule(n=which)
    def commit(self, n: int) -> None:
        append = self.appends[n % len(self.appends)]
        append.take(1)
        if append.queue:
            self.queues.update(append)
        else:
            self.appends.remove(append)
            self.queues.remove(append)

    # The queues as the list says.

    def never_admitted(self) -> list[Request]:
        """Requests ordered by prefix: they wait and were never preempted."""
        if not self.ordering.by_prefix:
            return []
        return [
            request
            for request in self.requests
            if request.cls is POOL
            and request.state is State.QUEUED
            and request.remaining
            and not request.background
            and not request.preempted
        ]

    def waiting_order_by_hand(self) -> list[Request]:
        """Algorithm 1, choice by choice."""
        left, order = self.never_admitted(), list[Request]()
        k = K if self.ordering.name == "klpm" else None

        def match(request: Request) -> int:
            return self.index._match(request.prompt)

        while left:
            by_age = k is not None and (self.taken + len(order)) % k == 0
            order.append(min(left, key=lambda request: (0 if by_age else -match(request), request.id)))
            left.remove(order[-1])
        return order

    def expected(self) -> list[Work]:
        position = {request: at for at, request in enumerate(self.waiting_order_by_hand())}

        def key(work: Work) -> tuple[object, ...]:
            if isinstance(work, TapeAppend):
                return (*priority(work), 0, (work.deadline or 0) if work.due else 0, work.seq)
            if work in position:
                return (*priority(work), 1, (3, position[work]))
            return (*priority(work), int(not work.decoding), self.key(work))

        works: list[Work] = [*self.requests, *self.appends]
        return sorted(filter(has_work, works), key=key)

    def key(self, request: Request) -> tuple[int, ...]:
        return self.ordering.key(request) if request.cls is POOL else (request.id,)

    @invariant()
    def the_walk_is_the_sorted_list(self) -> None:
        assert list(self.queues.walk()) == self.expected()

    @invariant()
    def a_closed_walk_leaves_out_exactly_the_waiting(self) -> None:
        order = self.expected()
        for opened in {0, len(order) // 2}:
            door = [True]
            steps: Iterator[Work] = self.queues.walk(partial(bool, door))
            before = list(islice(steps, opened))
            door.clear()
            # One that waits and was already reached is not given out after the door closed.
            assert before == order[:opened]
            assert list(steps) == [
                work for work in order[opened:] if isinstance(work, TapeAppend) or work.state is State.RUNNING
            ]

    @invariant()
    def the_counters_are_recounted(self) -> None:
        running = [request for request in self.requests if request.state is State.RUNNING]
        decodes = [r for r in self.requests if r.output and r.remaining == 1]
        prefills = [r for r in self.requests if r.remaining and r not in decodes and not r.background]
        assert (self.queues.decodes, self.queues.prefills) == (len(decodes), len(prefills))
        assert self.queues.cells == sum(
            len(r.prompt) + r.spec.max_tokens for r in running if not r.prefill_only
        )
        live = Counter([r.cls for r in self.requests] + [STREAM] * len(self.appends))
        assert {cls: n for cls, n in self.queues.live.items() if n} == dict(live)
        queued = [r.cls for r in self.requests if r.state is State.QUEUED and r.remaining]
        waiting = Counter(queued + [STREAM] * len(self.appends))
        assert {cls: n for cls, n in self.queues.waiting.items() if n} == dict(waiting)
        assert self.queues.sorted_appends() == sorted(self.appends, key=self.queues.key)

    @invariant()
    def what_stands_below_is_recounted(self) -> None:
        running = sorted((r for r in self.requests if r.state is State.RUNNING), key=self.queues.key)
        assert list(self.queues.running.values()) == running
        works: list[Work] = [*self.requests, *self.appends]
        for work in works:
            key = self.queues.key(work)
            behind = [r for r in running if self.queues.key(r) > key]
            ahead = [r for r in running if self.queues.key(r) < key]
            unfinished = isinstance(work, Request) and not work.complete
            starved = [] if unfinished else [r for r in ahead if not r.complete and not r.remaining]
            victims = behind[::-1] + starved[::-1]
            assert list(self.queues.victims(work)) == victims
            blocks, cells = sum(r.blocks for r in victims), sum(r.cells for r in victims)
            for needed in (0, blocks // 2, blocks):
                assert needed <= self.queues.victims_blocks(work, needed) <= blocks
            assert self.queues.victims_blocks(work, blocks + 1) == blocks
            assert self.queues.victims_have(work, cells) == bool(victims)
            assert not self.queues.victims_have(work, cells + 1)
            assert self.queues.any_blocks_before(work) == any(r.blocks for r in ahead)


TestQueues = Model.TestCase
TestQueues.settings = settings(max_examples=40, stateful_step_count=30)
