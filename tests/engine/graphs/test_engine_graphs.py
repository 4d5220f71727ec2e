"""Captured graphs: padding, static inputs and refilled metadata give the results of eager passes."""

import random
import time
from collections.abc import Hashable

import pytest
import torch

from daemon.engine.assembly import capture_one
from engine.attention.metadata import AttentionMetadata, PackedRows
from engine.attention.reference import ReferenceAttention
from engine.engine import Engine
from engine.graphs.runner import MAX_ROWS, CapturePlan, GraphRunner, Replay, capture_obstacle
from engine.model.loaded import ATTENTION
from engine.step import Chunk
from regions.ephemeral import Fork
from regions.tape import Retention
from scheduler.interfaces import Limits, PriorityClass
from scheduler.request import Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.worker import Worker
from tests.engine.oracle import tiny
from tests.kit import tolerance
from tests.kit.engine import tokens
from tests.kit.scheduler.harness import eventually


class Prepared(ReferenceAttention):
    """The reference as a backend that is given the metadata before each pass."""

    def prepare(self, plan: AttentionMetadata) -> Hashable:
        return ()


def again(run: Replay) -> Replay:
    """A capture that runs the pass again: all but the metadata must then come from static tensors."""
    return run


def ask(engine: Engine, forks: list[Fork], questions: list[list[int]]) -> list[tuple[int, float]]:
    for fork, question in zip(forks, questions, strict=True):
        assert fork.acquire(len(question))
    chosen = engine.execute([Chunk(f, q) for f, q in zip(forks, questions, strict=True)])
    return [(c.token, c.top1) for c in chosen if c is not None]


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_captured_passes_give_what_eager_passes_give(architecture: str) -> None:
    """Questions and their answers' next tokens, over an evicting tape, at sizes that share graphs."""
    model = tiny(architecture, layers=2)
    engines = [
        Engine(model, blocks=80, block_size=4, frame_limit=90, attention=Prepared(), capture=record)
        for record in (None, again)
    ]
    rng = random.Random(3)
    frozen = tokens(rng, 9)
    tapes = [engine.open_tape("t", frozen, Retention(40)) for engine in engines]
    for _ in range(9):
        record = tokens(rng, 11)
        questions = [tokens(rng, rng.randrange(3, 9)) for _ in range(rng.randrange(1, 4))]
        answers = []
        for engine, tape in zip(engines, tapes, strict=True):
            engine.append(tape, [record])
            forks = [tape.fork() for _ in questions]
            first = ask(engine, forks, questions)
            answers.append(first + ask(engine, forks, [[token] for token, _ in first]))
            for fork in forks:
                fork.release()
        for (eager, eager_logit), (replayed, replayed_logit) in zip(*answers, strict=True):
            assert eager == replayed
            assert eager_logit == tolerance.near(replayed_logit, tolerance.of_model(model, replayed_logit))
    graphs = engines[1].graphs
    assert graphs is not None
    assert graphs.captures < 12
    assert graphs.replays > graphs.captures
    for tape in tapes:
        tape.release()


def test_a_large_batch_is_not_captured() -> None:
    model = tiny("llama", layers=1)
    engine = Engine(model, blocks=80, attention=Prepared(), capture=again)
    assert engine.graphs is not None
    prompt = engine.open_prompt()
    question = tokens(random.Random(1), MAX_ROWS + 1)
    assert ask(engine, [prompt], [question])
    assert engine.graphs.captures == 0
    prompt.release()


def run_rows(runner: GraphRunner, engine: Engine, words: list[int]) -> torch.Tensor:
    """The last row's logits of a prompt of its own, in one pass."""
    prompt = engine.open_prompt()
    assert prompt.acquire(len(words))
    metadata = AttentionMetadata([PackedRows(0, len(words), prompt.next_slots(len(words)))])
    try:
        return runner.logits(metadata, words, [len(words) - 1]).clone()
    finally:
        prompt.release()


def test_buckets_reach_to_1024_rows() -> None:
    model = tiny("llama", layers=1)
    engine = Engine(model, blocks=80, attention=Prepared())
    runner = GraphRunner(model, engine.pool, Prepared(), capture=again)
    rng = random.Random(5)
    for n in (600, 1000, MAX_ROWS):
        run_rows(runner, engine, tokens(rng, n))
    assert (MAX_ROWS, runner.captures, runner.replays) == (1024, 1, 2)
    assert [CapturePlan(n).max_graphs for n in (1, 2, 256, 300, 1024)] == [5, 10, 45, 50, 55]


def test_a_deferred_capture_comes_when_it_is_told_to_and_changes_nothing_that_was_written() -> None:
    """Passes run eagerly until then. One that a capture runs writes the slot of padding alone."""
    model = tiny("llama", layers=2)
    engine = Engine(model, blocks=60, attention=Prepared())
    kv = [*engine.pool.keys, *engine.pool.values]

    def runs_it(run: Replay) -> Replay:
        before = [each.clone() for each in kv]
        run()
        changed = [
            (one != other).any(-1).any(0).nonzero().flatten() for one, other in zip(before, kv, strict=True)
        ]
        assert {int(slot) for slots in changed for slot in slots} <= {runner._padding}
        return run

    runner = GraphRunner(model, engine.pool, Prepared(), capture=runs_it, plan=CapturePlan(deferred=True))
    rng = random.Random(6)
    words = [tokens(rng, n) for n in (4, 9, 3)]
    eager = [run_rows(runner, engine, each) for each in words]
    assert (runner.captures, runner.replays, runner.waiting) == (0, 0, 2)
    runner.capture_next()
    assert (runner.captures, runner.waiting) == (1, 1)
    runner.capture_next()
    runner.capture_next()  # there is nothing left
    assert (runner.captures, runner.waiting) == (2, 0)
    for each, logits in zip(words, eager, strict=True):
        assert torch.equal(run_rows(runner, engine, each), logits)
    assert runner.replays == 3


def test_a_bucket_that_cannot_be_captured_is_refused_alone_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Passes of that size run eagerly, with the same results; one without memory is tried again."""
    tried: list[str] = []

    def record(run: Replay) -> Replay:
        tried.append("tried")
        if len(tried) == 1:
            raise KeyError("whatever a capture raises")
        if len(tried) == 2:
            raise torch.OutOfMemoryError("no room")
        return run

    model = tiny("llama", layers=1)
    engine = Engine(model, blocks=60, attention=Prepared())
    runner = GraphRunner(model, engine.pool, Prepared(), capture=record, plan=CapturePlan(deferred=True))
    rng = random.Random(7)
    refused, other = tokens(rng, 6), tokens(rng, 3)
    first = run_rows(runner, engine, refused), run_rows(runner, engine, other)
    while runner.waiting:
        runner.capture_next()
    assert runner.outcomes == {"refused": 1, "no_memory": 1}
    for _ in range(2):
        for words, logits in zip((refused, other), first, strict=True):
            assert torch.equal(run_rows(runner, engine, words), logits)
        while runner.waiting:
            runner.capture_next()
    assert runner.outcomes == {"refused": 1, "no_memory": 1, "captured": 1}
    assert (len(tried), runner.replays) == (3, 1)
    assert caplog.text.count("are not captured") == 1


def test_no_bucket_is_captured_while_a_question_waits() -> None:
    """The worker captures what it has run once all questions are answered, and replays it then."""
    model = tiny("llama", layers=1)
    plan = CapturePlan(deferred=True)
    engine = Engine(model, blocks=200, attention=Prepared(), capture=again, captures=plan)
    graphs = engine.graphs
    assert graphs is not None
    scheduler = Scheduler(engine, engine.pool, Limits(), time.monotonic_ns)
    done: list[Request] = []
    waited: list[int] = []

    def ask(n: int) -> None:
        scheduler.submit(
            Request(
                RequestSpec(
                    cls=PriorityClass.SESSION,
                    session="s",
                    prompt=tokens(random.Random(n), 2 + n % 9),
                    max_tokens=3,
                    on_done=done.append,
                    open_prompt=engine.open_prompt,
                )
            )
        )

    def spare() -> bool:
        waited.append(30 - len(done))
        return capture_one([graphs])

    for n in range(30):
        ask(n)
    worker = Worker(scheduler, spare_work=spare)
    worker.start()
    assert eventually(lambda: len(done) == 30 and not graphs.waiting and worker.idle)
    assert waited
    assert not any(waited)
    captures, replays = graphs.captures, graphs.replays
    assert (captures > 0, replays) == (True, 0)
    ask(3)
    assert eventually(lambda: len(done) == 31)
    assert worker.stop(5.0)
    assert {each.state for each in done} == {State.FINISHED}


def test_only_so_many_captured_graphs_are_kept() -> None:
    model = tiny("llama", layers=1)
    engine = Engine(model, blocks=60, attention=Prepared())
    runner = GraphRunner(model, engine.pool, Prepared(), capture=again, max_graphs=2)
    rng = random.Random(2)
    for n in (1, 2, 4, 1, 1):
        run_rows(runner, engine, tokens(rng, n))
    assert (runner.captures, runner.replays) == (4, 1)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma2"])
def test_models_that_read_nothing_on_the_host_can_be_captured(architecture: str) -> None:
    assert capture_obstacle(tiny(architecture, layers=2).model, ATTENTION) is None


def test_what_cannot_be_captured_says_why() -> None:
    """Rotary tables that follow the longest position are read on the host."""
    model = tiny("llama", layers=2).model

    def reads(*args: object, **kwargs: object) -> None:
        if int(torch.zeros(1, dtype=torch.long).max()):
            raise AssertionError

    model.model.norm.register_forward_pre_hook(reads)
    obstacle = capture_obstacle(model, ATTENTION)
    assert obstacle is not None
    assert "DataDependent" in obstacle

    def fails(*args: object, **kwargs: object) -> None:
        raise NotImplementedError

    model.model.norm.register_forward_pre_hook(fails, prepend=True)
    assert capture_obstacle(model, ATTENTION) == "NotImplementedError: "


def test_a_capture_that_runs_out_of_memory_is_tried_again_later() -> None:
    """The pass itself succeeded. One that can never be captured runs as it is, and others are captured."""
    failures: list[RuntimeError] = [torch.OutOfMemoryError("no room")]

    def record(run: Replay) -> Replay:
        if failures:
            raise failures.pop()
        return run

    model = tiny("llama", layers=1)
    engine = Engine(model, blocks=60, attention=Prepared(), capture=record)
    graphs = engine.graphs
    assert graphs is not None
    for n, expected in ((4, (0, 0)), (4, (1, 0)), (4, (1, 1))):
        prompt = engine.open_prompt()
        assert ask(engine, [prompt], [tokens(random.Random(n), n)])
        prompt.release()
        assert (graphs.captures, graphs.replays) == expected
    failures.append(RuntimeError("operation not permitted when stream is capturing"))
    for _ in range(2):
        prompt = engine.open_prompt()
        assert ask(engine, [prompt], [tokens(random.Random(1), 9)])
        prompt.release()
    assert not failures
    assert (graphs.captures, graphs.replays) == (1, 1)
    for _ in range(2):
        prompt = engine.open_prompt()
        assert ask(engine, [prompt], [tokens(random.Random(1), 17)])
        prompt.release()
    assert (graphs.captures, graphs.replays) == (2, 2)
