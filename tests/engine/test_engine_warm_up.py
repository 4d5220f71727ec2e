"""Before an engine serves on a GPU, the passes that it will run have run. The capture is a fake one."""

import random

import pytest

from daemon.config.schema import PoolConfig
from daemon.engine import build
from engine.engine import Engine
from engine.graphs.runner import CapturePlan
from engine.model.loaded import LoadedModel
from engine.step import OutOfMemory
from engine.warm_up import warm_up
from feeds.connector import SettingError
from regions.tape import Retention
from tests.engine.graphs.test_engine_graphs import Prepared, again
from tests.engine.oracle import tiny
from tests.kit.config import inproc_config
from tests.kit.engine import tokens


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny("llama", layers=1)


def opened(model: LoadedModel, *, captured: bool, blocks: int = 80) -> Engine:
    plan = CapturePlan(16, deferred=True)
    capture = again if captured else None
    return Engine(model, blocks=blocks, block_size=4, attention=Prepared(), capture=capture, captures=plan)


def answers(engine: Engine) -> list[list[int]]:
    rng, found = random.Random(4), []
    tape = engine.open_tape("t", tokens(rng, 3), Retention(40))
    for n in (1, 3, 7, 12):
        engine.append(tape, [tokens(rng, 9)])
        found.append(engine.answer(tape, tokens(rng, n), max_tokens=4))
    tape.release()
    return found


def test_what_is_asked_then_was_captured_and_is_answered_as_without(model: LoadedModel) -> None:
    engine = opened(model, captured=True)
    free, graphs = engine.pool.free_blocks, engine.graphs
    assert graphs is not None
    told: list[str] = []
    warm_up(engine, 16, 40, told.append)
    passes = [f"running passes, {n} of 10" for n in range(1, 11)]
    captures = [f"capturing passes, {n} of 9" for n in range(1, 10)]
    assert told == ["compiling kernels", *passes, *captures]
    captured, replays = graphs.captures, graphs.replays
    assert engine.pool.free_blocks == free
    assert captured == 9  # 1, 2 ... 16 rows, of which one is sampled, or all
    assert answers(engine) == answers(opened(model, captured=False))
    assert (graphs.captures, graphs.waiting) == (captured, 0)
    assert graphs.replays > replays


def test_a_pool_without_room_for_them_is_left_as_it_was(model: LoadedModel) -> None:
    engine = opened(model, captured=True, blocks=6)
    warm_up(engine, 16, 40)
    assert engine.pool.free_blocks == 5  # one is the padding's


@pytest.mark.parametrize(
    ("pool", "key"), [(PoolConfig(), "pool.blocks"), (PoolConfig(memory=0.5), "pool.memory")]
)
def test_passes_that_the_pool_leaves_no_memory_are_an_error_of_its_key(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, pool: PoolConfig, key: str
) -> None:
    def execute(batch: object) -> None:
        raise OutOfMemory("CUDA out of memory")

    engine = opened(model, captured=False)
    monkeypatch.setattr(engine, "execute", execute)
    with pytest.raises(SettingError, match="leave no memory") as caught:
        build.warmed(engine, inproc_config(pool=pool), lambda doing: None)
    assert caught.value.key == key
    assert engine.pool.free_blocks == 80
