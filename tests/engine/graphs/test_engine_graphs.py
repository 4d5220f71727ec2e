"""Captured graphs: padding, static inputs and refilled metadata give the results of eager passes."""

import random
from collections.abc import Hashable

import pytest
import torch

from engine.attention.metadata import AttentionMetadata, PackedRows
from engine.attention.reference import ReferenceAttention
from engine.engine import Engine
from engine.graphs.runner import GraphRunner, Replay, capture_obstacle
from engine.model.loaded import ATTENTION
from engine.step import Chunk
from regions.ephemeral import Fork
from regions.tape import Retention
from tests.engine.oracle import tiny
from tests.kit import tolerance
from tests.kit.engine import tokens


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
    engine = Engine(model, blocks=60, attention=Prepared(), capture=again)
    assert engine.graphs is not None
    prompt = engine.open_prompt()
    question = tokens(random.Random(1), 300)
    assert ask(engine, [prompt], [question])
    assert engine.graphs.captures == 0
    prompt.release()


def test_only_so_many_captured_graphs_are_kept() -> None:
    model = tiny("llama", layers=1)
    engine = Engine(model, blocks=60, attention=Prepared())
    runner = GraphRunner(model, engine.pool, Prepared(), capture=again, max_graphs=2)
    rng = random.Random(2)
    for n in (1, 2, 4, 1, 1):
        prompt = engine.open_prompt()
        words = tokens(rng, n)
        assert prompt.acquire(n)
        plan = AttentionMetadata([PackedRows(0, n, prompt.next_slots(n))])
        runner.logits(plan, words, [n - 1])
        prompt.release()
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
