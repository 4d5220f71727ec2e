"""Work on sessions that leave the pool and return while the scheduler serves, on the real engine."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.step import SampledToken
from regions.offload import snapshot_format, staging
from regions.offload.residency import Idleness, Residency
from regions.offload.snapshot_format import Identity
from regions.tape import Retention, Tape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.observer import RESTORE
from scheduler.rebuild import Rebuilder
from scheduler.request import Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem, TapeItems
from tests.engine.oracle import tiny
from tests.kit.scheduler.fakes import HeldClock
from tests.regions.aside import Aside
from tests.scheduler.refreshing import World as Refreshed
from tests.scheduler.refreshing import carry, exact

FROZEN = list(range(3, 14))
MODEL = tiny("llama", layers=2)
LIMITS = Limits(max_batch_tokens=40, chunk_min=8, chunk_max=40)
QUESTION = (5, 6, 7)
RECORDS = [[3 + (13 * i + 5 * j) % 90 for j in range(6)] for i in range(12)]
FLASH, SESSION, POOL, STREAM = PriorityClass


class World:
    """Three tapes of up to 36 tokens. With a ``directory`` they leave and return by steps."""

    def __init__(self, blocks: int, directory: Path | None = None) -> None:
        self.engine = Engine(MODEL, blocks=blocks, block_size=4, frame_limit=400)
        self.clock, self.aside = HeldClock(), Aside()
        self.scheduler = Scheduler(self.engine, self.engine.pool, LIMITS, self.clock)
        self.tapes = [self.engine.open_tape(name, FROZEN, Retention(36)) for name in "abc"]
        self.fed = [0, 0, 0]
        self.asked: list[tuple[int, Request]] = []
        self.kv: dict[tuple[str, int, int], bytes] = {}
        self.read = {(name, 0): 0 for name in "abc"}
        self.scheduler.subscribe(self.on_commit)
        self.directory = directory
        if directory is not None:
            idleness = Idleness(10, lambda: directory, retry_ns=10)
            self.residency = Residency(self.engine.pool, idleness, self.clock)
            self.residency.serve(self.aside, self.scheduler.run_between)
            identity = Identity.of(self.engine.pool, model="m", tokenizer="t", frozen=FROZEN)
            for tape in self.tapes:
                self.residency.attach(tape, identity)
            self.rebuilder = Rebuilder(self.scheduler, self.clock)

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """A version may have several new records."""
        self.read[tape.name, version] = self.read[tape.name, version - 1] + len(records)

    def feed(self, number: int) -> None:
        self.scheduler.append((self.tapes[number], [TapeItem(RECORDS[self.fed[number] % 12])]))
        self.fed[number] += 1

    def ask(self, number: int, cls: PriorityClass = SESSION) -> Request:
        tape = self.tapes[number]
        request = Request(RequestSpec(cls, tape.name, QUESTION, 2, lambda _: None, tape=tape))
        self.scheduler.submit(request)
        self.asked.append((number, request))
        return request

    def prompt(self, tokens: int) -> Request:
        made = RequestSpec(
            POOL,
            "",
            [90 - i for i in range(tokens)],
            2,
            lambda _: None,
            open_prompt=self.engine.open_prompt,
        )
        request = Request(made)
        self.scheduler.submit(request)
        return request

    def rest(self) -> None:
        self.clock.now += 20
        self.residency.spill_idle()

    def harm(self, number: int) -> None:
        """Cut the file of a session that is outside the pool."""
        assert self.directory is not None
        for file in self.directory.glob(f"{self.tapes[number].name}.kv"):
            if self.tapes[number].stored is not None:
                file.write_bytes(file.read_bytes()[:-7])

    def note(self) -> None:
        """The KV of each version is what it was when it was first seen."""
        for tape in self.tapes:
            if tape.movable:
                before = self.kv.setdefault(
                    (tape.name, tape.version, tape.kv.number), kv_of(self.engine, tape)
                )
                assert before == kv_of(self.engine, tape)

    def run(self) -> None:
        """Until nothing is left to do, with a step of a copy after every step here."""
        for _ in range(5000):
            worked, copied = self.scheduler.step(), self.aside.step()
            if not worked and not copied:
                return
        raise AssertionError("the scheduler does not come to rest")

    def close(self) -> None:
        self.scheduler.close()
        for tape in self.tapes:
            if self.directory is not None:
                self.residency.detach(tape)
            tape.release()
        self.aside.finish()
        if self.directory is not None:
            self.residency.poll()
            assert list(self.directory.iterdir()) == []
        self.engine.cache.reclaim(10**6)
        assert self.engine.pool.blocks.free_blocks == self.engine.pool.total_blocks


def kv_of(engine: Engine, tape: Tape) -> bytes:
    """The bytes of a window's KV, oldest token first."""
    parts = [[t[:, slot : slot + n] for slot, n in tape.live_ranges] for t in engine.pool.tensors]
    return b"".join(torch.cat(each, 1).contiguous().numpy().tobytes() for each in parts)


@pytest.fixture(scope="module")
def answers() -> dict[tuple[int, int], list[SampledToken]]:
    """What a pool with room for everything answers, by tape and records."""
    world, found = World(400), {}
    for version in range(1, 30):
        for number in range(3):
            world.feed(number)
            world.run()
            request = world.ask(number)
            world.run()
            found[number, version] = request.samples
    world.close()
    return found


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (staging, snapshot_format):
        monkeypatch.setattr(module, "CHUNK", 256)


def test_a_question_waits_for_its_session_and_others_do_not(tmp_path: Path) -> None:
    world = World(150, tmp_path)
    for number in range(3):
        world.feed(number)
    world.run()
    world.note()
    world.rest()
    world.aside.finish()
    world.scheduler.step()
    assert [tape.resident for tape in world.tapes] == [False, True, True]
    waiting, other = world.ask(0), world.ask(1)
    world.feed(0)
    for _ in range(6):
        world.scheduler.step()
    assert (waiting.state, other.state) == (State.QUEUED, State.FINISHED)
    assert world.tapes[0].arriving
    world.clock.now += 5
    world.run()
    assert waiting.state is State.FINISHED
    assert waiting.waits[RESTORE] > 0
    assert RESTORE not in other.waits
    assert world.tapes[0].version == 2
    world.note()
    world.close()


def test_what_needs_blocks_of_a_session_waits_until_it_has_left_and_does_not_fail(tmp_path: Path) -> None:
    """The pool holds three windows and little else; the least recently used one goes for a prompt."""
    world = World(38, tmp_path)
    for _ in range(6):
        for number in range(3):
            world.feed(number)
    world.run()
    prompt = world.prompt(60)
    for _ in range(3):
        world.scheduler.step()
    assert not prompt.output
    assert world.engine.pool.leaving > 0
    assert not world.scheduler.step(), "nothing spins until the copy is done"
    world.run()
    assert prompt.state is State.FINISHED
    assert sum(tape.resident for tape in world.tapes) < 3
    asked = [world.ask(number) for number in range(3)]
    world.run()
    assert all(each.state is State.FINISHED for each in asked)
    world.close()


def test_a_full_disk_fails_what_has_no_room_and_loses_no_session(tmp_path: Path) -> None:
    """As without a disk; afterwards all answer."""
    world = World(38, tmp_path)
    for _ in range(6):
        for number in range(3):
            world.feed(number)
    world.run()
    world.note()
    made = world.directory = tmp_path / "gone"
    world.residency._idleness = Idleness(10, lambda: made, retry_ns=10**12)
    prompt = world.prompt(60)
    world.run()
    assert prompt.error is not None
    assert prompt.error.code == "no_memory"
    assert world.residency.failures == 1
    assert all(tape.resident and not tape.leaving for tape in world.tapes)
    world.note()
    made.mkdir()
    world.close()


def test_callbacks_wait_for_a_session_or_come_at_once_where_it_has_no_room(tmp_path: Path) -> None:
    world = World(45, tmp_path)
    for _ in range(6):
        world.feed(0)
    world.run()
    world.rest()
    world.aside.finish()
    world.scheduler.step()
    came: list[bool] = []
    first = world.tapes[0]

    def call() -> None:
        came.append(first.resident)

    world.scheduler.when_resident(first, call)
    for _ in range(3):
        world.scheduler.step()
    assert came == []
    world.run()
    assert came == [True]
    world.clock.now += 20
    world.rest()
    world.aside.finish()
    world.scheduler.step()
    taken = world.engine.pool.take(world.engine.pool.free_blocks)
    world.scheduler.when_resident(first, call)
    world.run()
    assert came == [True, False]
    world.scheduler.when_resident(first, call)
    world.scheduler.close()
    assert came == [True, False, False]
    assert taken is not None
    world.engine.pool.blocks.release(taken)
    world.close()


@pytest.mark.parametrize("semantics", ["exact", "carry"])
def test_a_refreshed_window_waits_for_a_session_that_left_meanwhile(tmp_path: Path, semantics: str) -> None:
    """To be compared with it, and adopted; nothing fails."""
    world = Refreshed(exact(every=3) if semantics == "exact" else carry(every_s=1))
    residency, aside = Residency(world.engine.pool, Idleness(10, lambda: tmp_path), world.clock), Aside()
    residency.serve(aside, world.steps.run_between)
    residency.attach(world.tape, Identity.of(world.engine.pool, model="m", tokenizer="t", frozen=FROZEN))
    world.feed_one_by_one(10)
    world.clock.now += 2 * 10**9
    while world.refresher.settled(world.tape):
        world.feed()
        world.step(1)
    assert world.tape.resident
    world.clock.now += 20
    assert residency.spill_idle()
    aside.finish()
    world.run()
    assert world.tape.arriving, "it is wanted back"
    assert not world.refresher.settled(world.tape)
    aside.finish()
    world.run()
    assert world.tape.resident
    assert world.refresher.settled(world.tape)
    assert world.total("refresh_failures") == 0
    assert world.total("refreshes") == (semantics == "exact")
    assert world.total("divergence_samples") == len(world.questions)
    residency.detach(world.tape)
    world.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_answers_are_those_of_a_pool_with_room_whatever_moves_meanwhile(
    tmp_path_factory: pytest.TempPathFactory,
    answers: dict[tuple[int, int], list[SampledToken]],
    data: st.DataObject,
) -> None:
    """Records, questions, prompts, idle sessions, cut files and steps in any order; KV bit by bit."""
    world = World(data.draw(st.sampled_from([48, 60, 150])), tmp_path_factory.mktemp("spilled"))
    acts: dict[str, Callable[[int], object]] = {
        "feed": world.feed,
        "ask": world.ask,
        "flash": lambda number: world.ask(number, FLASH),
        "step": lambda _: world.scheduler.step(),
        "copy": lambda _: [world.aside.step() for _ in range(7)],
        "rest": lambda _: world.rest(),
        "harm": world.harm,
        "prompt": lambda number: prompts.append(world.prompt(10 + 20 * number)),
    }
    prompts = deque[Request]()
    for number in range(3):
        world.feed(number)
    world.run()
    for _ in range(data.draw(st.integers(5, 50))):
        acts[data.draw(st.sampled_from([*acts, "step", "step", "copy"]))](data.draw(st.integers(0, 2)))
        world.engine.pool.check_integrity()
        world.note()
    world.run()
    world.note()
    records = [world.read[tape.name, tape.version] for tape in world.tapes]
    assert records == world.fed, "no record is lost"
    for number, request in world.asked:
        assert request.state is State.FINISHED
        expected = answers[number, world.read[request.session, request.version]]
        assert [each.token for each in request.samples] == [each.token for each in expected]
        gaps = [each.gap for each in request.samples]
        assert gaps == pytest.approx([each.gap for each in expected], rel=1e-3, abs=1e-4)
    assert all(prompt.state is State.FINISHED for prompt in prompts)
    world.close()
