"""Both phases under memory pressure: plans, victims, and guaranteed progress."""

from scheduler.allocation import allocate
from scheduler.interfaces import Limits, PriorityClass
from scheduler.planner import Entry, Plan, adaptive_chunk, cell_budget, plan
from scheduler.request import Request, State
from scheduler.tapes import TapeAppend, TapeItem
from tests.kit.scheduler.fakes import FakeMemory, FakeTape, one_by_one, request_of
from tests.kit.scheduler.harness import Harness, queues_of

FLASH, SESSION, POOL, STREAM = PriorityClass
WIDE = Limits(max_batch_tokens=4000, max_batch_requests=64)


def request(memory: FakeMemory, seq: int, prompt: int, new: int = 1, cls: PriorityClass = SESSION) -> Request:
    made = request_of(memory, (0,) * prompt, new, cls, FakeTape(memory, ""))
    made.id = seq
    return made


def decoding(memory: FakeMemory, seq: int, prompt: int, new: int = 1) -> Request:
    """A request whose prompt is in KV, with its first token."""
    made = request(memory, seq, prompt, new)
    made.open()
    made.allocate(prompt)
    made.reader.write(made.prompt)
    made.output.append(1)
    made.state = State.RUNNING
    assert made.decoding
    return made


def append(memory: FakeMemory, seq: int, *records: int) -> TapeAppend:
    work = TapeAppend(FakeTape(memory, f"T{seq}"))
    work.queue.extend(TapeItem((0,) * size, seq=seq) for size in records)
    return work


def test_chunks_adapt_to_the_number_of_prefills_within_their_clamp() -> None:
    """clamp(n_batch / N, 128, 1024) with n_batch = 4000 less one token for each running answer."""
    memory = FakeMemory(10_000)
    prefills = [request(memory, n, 5000) for n in range(40)]

    def chunk(*work: Request) -> int:
        queues = queues_of(work)
        return adaptive_chunk(queues.decodes, queues.prefills, WIDE)

    assert chunk(*prefills[:1]) == 1024
    assert chunk(*prefills[:8]) == 500
    assert chunk(*prefills) == 128
    decodes = [decoding(memory, 90 + n, 4) for n in range(8)]
    assert chunk(*prefills[:7], *decodes) == (4000 - 8) // 7


def test_admission_stops_at_the_cell_budget_and_closes_the_door() -> None:
    """64 cells: 30 + 30 fit, the next 30 do not, and the small one behind may not overtake."""
    memory = FakeMemory(32)
    assert cell_budget(memory, WIDE) == 64
    work = queues_of(
        [request(memory, n, 20, 10) for n in range(3)] + [request(memory, 3, 1), append(memory, 4, 2)]
    )
    assert [(entry.work.seq, entry.n) for entry in plan(work, memory, WIDE, after_question=True).entries] == [
        (0, 20),
        (1, 20),
        (4, 1),
    ]


def test_lower_classes_cells_do_not_keep_flash_out() -> None:
    memory = FakeMemory(32)
    running = decoding(memory, 1, 40, 24)
    flash = request(memory, 2, 8, 1, FLASH)
    entries = plan(queues_of([running, flash]), memory, WIDE).entries
    assert [entry.work for entry in entries] == [flash, running]


def test_above_the_high_water_mark_prefill_chunks_wait_and_decodes_go_on() -> None:
    """20 blocks, mark at 0.75: 5 blocks stay out of reach of prefills."""
    limits = Limits(max_batch_tokens=400, high_water=0.75, cell_budget_fraction=1.0)
    memory = FakeMemory(20)
    work = queues_of([decoding(memory, 1, 8, 4), request(memory, 2, 40)])
    # 18 free, one for the decode, 5 in reserve: 12 blocks of 4 hold the whole prefill of 40.
    for taken, planned in ((0, [(1, 1), (2, 40)]), (10, [(1, 1), (2, 8)]), (3, [(1, 1)])):
        memory.take(taken)
        assert [(entry.work.seq, entry.n) for entry in plan(work, memory, limits).entries] == planned


def test_records_are_whole_and_bounded_by_tokens_and_blocks() -> None:
    memory = FakeMemory(4)
    limits = Limits(max_batch_tokens=20)
    assert plan(queues_of([append(memory, 1, 8, 8, 8)]), memory, limits).entries[0].n == 2
    assert plan(queues_of([append(memory, 1, 12, 8, 8)]), memory, limits).entries[0].n == 1
    memory.take(4)
    assert plan(queues_of([append(memory, 1, 8, 8)]), memory, limits).entries[0].n == 1, (
        "eviction may make room"
    )


def running_on(memory: FakeMemory, seq: int, tokens: int, cls: PriorityClass = SESSION) -> Request:
    """A request in the middle of its prefill that holds its blocks."""
    made = request(memory, seq, 2 * tokens, 4, cls)
    made.open()
    made.allocate(tokens)
    made.reader.write(made.next_tokens(tokens))
    made.state = State.RUNNING
    return made


def test_several_flash_requests_may_count_on_blocks_of_lower_ranks() -> None:
    memory = FakeMemory(8)
    running = [running_on(memory, 1, 16), running_on(memory, 2, 16)]
    flashes = [request(memory, 3, 15, 1, FLASH), request(memory, 4, 15, 1, FLASH)]
    limits = Limits(cell_budget_fraction=1.0, max_batch_tokens=100, high_water=1.0)
    assert memory.free_blocks == 0
    entries = plan(queues_of([*running, flashes[0]]), memory, limits).entries
    # The second running request's blocks are spoken for; the first goes on only with what is left: nothing.
    assert [(entry.work.seq, entry.n) for entry in entries] == [(3, 15)]
    entries = plan(queues_of([*running, *flashes]), memory, limits).entries
    assert [(entry.work.seq, entry.n) for entry in entries] == [(3, 15), (4, 15)]


def test_a_deferred_request_pins_nothing() -> None:
    """It was expected to fit, but the pool shrank: its reader is closed, and it will read a newer version."""
    memory = FakeMemory(4)
    first, second = request(memory, 1, 8), request(memory, 2, 12)
    planned = Plan((Entry(first, 8), Entry(second, 12)))
    got = allocate(planned, queues_of([first, second]), memory, lambda victim, by: None)
    assert [entry.work for entry in got.entries] == [first]
    assert second.reader is None
    assert second.state is State.QUEUED


def test_pinned_versions_are_given_up_before_the_top_request_fails() -> None:
    """A queued request pins an old version that fills the pool; it reads a newer one later instead."""
    h = Harness(blocks=6, limits=Limits(max_batch_tokens=64, cell_budget_fraction=1.0))
    tape = h.tape(retention=8)
    h.feed(tape, range(8))
    h.run()
    pinning = h.ask((1, 2), max_tokens=1, tape=tape, cls=POOL)
    pinning.open()  # as if opened and preempted before
    assert pinning.version == 1
    tape.make_room([8], [0])  # the window moves on; two blocks are now kept by the pin alone
    assert h.memory.free_blocks == 4
    big = h.ask(range(20), max_tokens=1)
    h.run()
    h.check(big)
    assert big.recomputed_tokens == 0
    assert pinning.state is State.FINISHED


def test_a_version_that_can_be_read_again_is_released_before_one_that_cannot() -> None:
    h = Harness(blocks=8, limits=Limits(max_batch_tokens=64, cell_budget_fraction=1.0))
    one, other = h.tape("one", retention=8), h.tape("other", retention=8)
    for tape in (one, other):
        h.feed(tape, range(8))
    h.run()
    restartable = h.ask((1, 2), max_tokens=1, tape=one, cls=POOL)
    restartable.open()  # as if preempted before
    bound = h.ask((1, 2), max_tokens=1, tape=other, cls=POOL, forked=True)
    for tape in (one, other):
        tape.make_room([8], [0])
    big = h.ask(range(23), max_tokens=1)
    h.run()
    for ended in (big, bound, restartable):
        h.check(ended)


def test_an_answer_bound_to_a_version_fails_only_when_nothing_else_helps() -> None:
    h = Harness(blocks=6, limits=Limits(max_batch_tokens=64, cell_budget_fraction=1.0))
    tape = h.tape(retention=8)
    h.feed(tape, range(8))
    h.run()
    bound = h.ask((1, 2), max_tokens=1, tape=tape, cls=POOL, forked=True)
    tape.make_room([8], [0])
    big = h.ask(range(20), max_tokens=1)
    h.run()
    h.check(big)
    assert (bound.state, bound.error.code) == (State.FAILED, "no_memory")


def test_a_request_that_cannot_fit_next_to_the_tapes_fails_with_the_figures_and_blocks_no_other() -> None:
    h = Harness(blocks=6, limits=Limits(max_batch_tokens=64, cell_budget_fraction=1.0))
    tape = h.tape(retention=16)
    h.feed(tape, range(16))
    h.run()
    big, small = h.ask(range(9), tape=tape), h.ask(range(3), tape=tape)
    h.run()
    assert big.error.code == "no_memory"
    assert "0 of 6 blocks (4 tokens each) free" in big.error.message
    h.check(small)
    assert small.samples == one_by_one(range(16), range(3), 1)


def test_a_tape_that_cannot_grow_drops_its_records_and_says_so() -> None:
    h = Harness(blocks=2)
    tape = h.tape(retention=100)
    h.feed(tape, range(8))
    h.feed(tape, range(4))
    h.run()
    assert tape.live_tokens == 8
    [(_, records, failure)] = h.log.drops
    assert failure.code == "no_memory"
    assert [list(record.tokens) for record in records] == [[0, 1, 2, 3]]
