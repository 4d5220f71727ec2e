"""The tapes' share of a pass: what requests leave to them, by plan and under a flood in virtual time."""

import random
from collections import deque
from dataclasses import replace
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from regions.tape import Tape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.planner import plan
from scheduler.request import Request
from scheduler.tapes import TapeAppend, TapeItems, Work
from tests.kit.scheduler.fakes import FakeTape
from tests.kit.scheduler.harness import queues_of
from tests.kit.scheduler.worlds import COSTS, FakeWorld, Run, records

FLASH, SESSION, POOL, STREAM = PriorityClass

limits = st.builds(
    Limits,
    max_batch_tokens=st.integers(24, 60),
    max_batch_requests=st.integers(3, 12),
    chunk_min=st.integers(2, 6),
    chunk_max=st.integers(6, 30),
    stream_share=st.floats(0.1, 0.9),
)
tapes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=12), min_size=1, max_size=4)
prompts = st.lists(st.integers(1, 40), max_size=10)


Wanted = list[tuple[PriorityClass, int]]


def planned(
    limits: Limits, waiting: list[list[int]], wanted: Wanted, *, after_question: bool = False
) -> dict[PriorityClass, int]:
    """Tokens of each class in the first batch, of records of such sizes and prompts of such lengths."""
    over = FakeWorld(limits, blocks=2000)
    work: list[Work] = []
    for n, sizes in enumerate(waiting):
        queue = deque(records(*sizes))
        for item in queue:
            item.queue(1000 + n, 0)
        work.append(TapeAppend(FakeTape(over.memory, str(n), 100), queue))
    for n, (cls, length) in enumerate(wanted, 1):
        request = over.request(cls, range(length), 2, "" if cls is POOL else "A")
        request.id = n
        work.append(request)
    found = plan(queues_of(work), over.memory, limits, after_question=after_question)
    tokens = dict.fromkeys(PriorityClass, 0)
    for entry in found.entries:
        tokens[entry.work.cls] += entry.tokens
    assert sum(tokens.values()) <= limits.max_batch_tokens
    assert sum(bool(entry.n) for entry in found.entries) <= limits.max_batch_requests
    return tokens


@given(limits, tapes, prompts)
def test_prompts_leave_the_tapes_their_share(
    limits: Limits, waiting: list[list[int]], prompts: list[int]
) -> None:
    """All that waits, or the share less what whole records leave of it, as far as rows allow."""
    tokens = planned(limits, waiting, [(POOL, n) for n in prompts])
    rows = int(limits.stream_share * limits.max_batch_requests)
    if rows < len(waiting):
        assert tokens[STREAM] > 0 or not rows
        return
    share = min(sum(map(sum, waiting)), int(limits.stream_share * limits.max_batch_tokens))
    assert tokens[STREAM] > share - max(map(max, waiting))
    assert tokens[STREAM] > 0


@given(limits, tapes, prompts)
def test_without_bars_requests_get_all(limits: Limits, waiting: list[list[int]], prompts: list[int]) -> None:
    wanted = [(POOL, n) for n in prompts]
    shared = planned(limits, [], wanted)
    alone = replace(limits, stream_share=0.0)
    assert shared == planned(alone, [], wanted)
    # nor do they lose more than the tapes get, and what whole records leave over; where rows are short, the
    # row of a tape was a request's
    beside = planned(limits, waiting, wanted)
    rows = len(waiting) if len(waiting) + len(prompts) > limits.max_batch_requests else 0
    most = max(beside[STREAM], 0) + max(map(max, waiting)) + rows * max(prompts, default=0)
    assert shared[POOL] - beside[POOL] <= most


@given(
    limits,
    tapes,
    st.lists(st.tuples(st.sampled_from([FLASH, SESSION, POOL]), st.integers(1, 40)), max_size=8),
)
def test_questions_go_first_as_before(limits: Limits, waiting: list[list[int]], wanted: Wanted) -> None:
    """FLASH gets as much as without a share, and SESSION, in its first batch, too; later all but a chunk."""
    limits = replace(limits, max_batch_requests=32)
    alone = replace(limits, stream_share=0.0)
    for after_question in (False, True):
        shared = planned(limits, waiting, wanted, after_question=after_question)
        before = planned(alone, waiting, wanted, after_question=after_question)
        assert shared[FLASH] == before[FLASH]
        kept = max(limits.chunk_min, max(map(max, waiting))) if after_question else 0
        assert shared[SESSION] >= before[SESSION] - kept


@settings(max_examples=20)
@given(st.floats(0.2, 0.6), st.integers(0, 10**6))
def test_a_flood_of_prompts_never_starves_a_tape(share: float, seed: int) -> None:
    """Two tapes take half of the share, without a deadline, beside prompts that fill every pass.

    Each bar is committed within a few passes, though prompts wait all the time.
    """
    rng = random.Random(seed)
    tokens = 40
    limits = Limits(
        max_batch_tokens=tokens, max_batch_requests=24, chunk_min=4, chunk_max=tokens, stream_share=share
    )
    run = Run(FakeWorld(limits, blocks=3000))
    pass_ns = COSTS.batch_ns([(0, tokens)])
    waited: list[int] = []
    queued: dict[str, deque[int]] = {"A": deque(), "B": deque()}

    def feed(name: str) -> None:
        sizes = [rng.randint(1, 3) for _ in range(2)]
        queued[name].extend([run.world.executor.now] * 2)
        run.feed(name, sizes)

    def committed(tape: Tape, version: int, items: TapeItems) -> None:
        waited.extend(run.world.executor.now - queued[tape.name].popleft() for _ in items)

    requests: list[Request] = []

    def flood(n: int) -> None:
        requests.append(run.world.request(POOL, [rng.randrange(3) for _ in range(30)], 2, salt=str(n)))
        run.scheduler.submit(requests[-1])

    run.scheduler.subscribe(committed)
    for n in range(40):
        for name in "AB":
            run.world.executor.at(4 * n * pass_ns + rng.randrange(4 * pass_ns), partial(feed, name))
    for n in range(160):
        run.world.executor.at(n * pass_ns // 2, partial(flood, n))
    run.run()
    assert len(waited) == 160
    assert max(waited) <= 4 * pass_ns
    for request in requests:
        run.world.answers.check(request)
