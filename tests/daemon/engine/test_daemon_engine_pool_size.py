"""The pool is as large as the open sessions need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from daemon.config.checks import cross_check
from daemon.config.schema import Config, ModelConfig, PoolConfig
from daemon.engine.build import build, opened_at_start, window_of
from daemon.engine.pool_size import PoolLimit, PoolSizes
from engine.engine import Engine
from feeds.connector import SettingError
from ingest.compact import WIDEST_LINE
from ingest.tokens import compact_line
from tests.engine.oracle import tiny
from tests.kit import inproc_config, log_source

NAMES = [f"V:S{number}" for number in range(10)]


def sized(config: Config, *, follows: bool = True, capacity: int = 0) -> tuple[Engine, PoolSizes, PoolLimit]:
    sizes = PoolSizes(config, 100)
    engine = Engine(tiny("llama", layers=2), blocks=capacity or sizes.all(()))
    limit = PoolLimit(engine, sizes, lambda blocks: 8 * blocks, follows=follows, largest=sizes.largest(()))
    return engine, sizes, limit


def test_the_pool_follows_the_sessions_that_are_open() -> None:
    config = inproc_config(NAMES)
    engine, sizes, limit = sized(config)
    each = {sizes.of(session, compact=False) for session in config.sessions}
    assert len(each) == 1
    (own,) = each
    assert engine.pool.total_blocks == sizes.shared
    for count, session in enumerate(config.sessions, 1):
        assert limit.has_room(session, compact=False)
        limit.open(session, compact=False)
        limit.open(session, compact=False)  # as after a close that failed
        assert engine.pool.total_blocks == sizes.shared + count * own
        assert engine.cache.budget == 8 * engine.pool.total_blocks
    assert engine.pool.total_blocks == engine.pool.capacity
    assert limit.at_a_time == len(NAMES)
    for count, session in enumerate(config.sessions, 1):
        limit.close(session.name)
        limit.close(session.name)
        assert engine.pool.total_blocks == sizes.shared + (len(NAMES) - count) * own


def test_a_pool_of_a_size_that_was_asked_for_stays_as_it_is() -> None:
    config = inproc_config(NAMES)
    engine, _, limit = sized(config, follows=False, capacity=500)
    for session in config.sessions:
        limit.open(session, compact=False)
    assert engine.pool.total_blocks == 500


def test_sessions_beyond_the_capacity_share_what_there_is() -> None:
    config = inproc_config(NAMES)
    engine, sizes, limit = sized(config, capacity=PoolSizes(config, 100).shared + 1)
    assert not limit.has_room(config.sessions[0], compact=False)
    limit.open(config.sessions[0], compact=False)
    assert engine.pool.total_blocks == sizes.shared + 1


def test_an_engine_whose_sessions_come_by_partition_opens_none_and_is_small() -> None:
    """Whatever cannot be opened is said at the start all the same."""
    config = replace(inproc_config(NAMES), source=log_source())
    built = build(config, {})
    assert (len(built.tapes), len(built.lines), opened_at_start(config).sessions) == (0, 0, ())
    whole = build(inproc_config(NAMES), {})
    assert len(whole.tapes) == len(NAMES)
    assert built.engine.pool.total_blocks < whole.engine.pool.total_blocks / 4
    assert built.engine.pool.capacity == whole.engine.pool.capacity


def test_a_pool_need_not_hold_all_sessions_of_a_group() -> None:
    """But each of them."""
    alone = inproc_config(NAMES[:1])
    (refused,) = cross_check(replace(alone, pool=PoolConfig(blocks=1)))
    least = int(refused.message.split(" are needed")[0].split()[-1]) // 16 + 1
    fits = PoolConfig(blocks=least)
    assert not cross_check(replace(alone, pool=fits))
    assert cross_check(replace(inproc_config(NAMES), pool=fits))
    of_a_group = replace(inproc_config(NAMES), source=log_source(), pool=fits)
    assert not cross_check(of_a_group)
    assert cross_check(replace(of_a_group, pool=PoolConfig(blocks=least - 2)))


def test_a_session_of_the_tape_model_takes_the_memory_of_its_window() -> None:
    """Its lines are of one length, and it keeps 64 bars: however full the tape, there is room for it."""
    config = inproc_config(model=ModelConfig(), pool=PoolConfig())
    (session,) = config.sessions
    built = build(config, {})
    tokens = window_of(built.prompt)
    window = tokens(session)
    line = len(built.prompt.encode(compact_line([0] * 5)))
    assert window == 64 * line < session.retention_tokens
    assert tokens(structs.replace(session, retention_records=10)) == 10 * line
    assert tokens(structs.replace(session, retention_tokens=7)) == 7
    assert built.engine.pool.capacity < 1000
    tape = built.tapes[session.name]
    readers = []
    for _ in range(8):  # each time a whole window at once, which readers of the version before still read
        built.engine.append(tape, [built.prompt.encode(WIDEST_LINE)] * 64)
        readers.append(tape.fork())
        for old in readers[:-2]:
            old.release()
        readers = readers[-2:]
    assert tape.live_tokens == window


def test_a_pool_that_holds_the_windows_of_the_tape_model_is_large_enough() -> None:
    config = inproc_config(model=ModelConfig(), pool=PoolConfig(blocks=240))
    assert not cross_check(config)
    assert build(config, {}).engine.pool.capacity == 240
    with pytest.raises(SettingError, match="add blocks"):
        build(structs.replace(config, pool=PoolConfig(blocks=40)), {})


def test_a_window_that_grows_while_it_is_open_is_set_aside() -> None:
    config = inproc_config(NAMES[:2])
    _, sizes, limit = sized(config)
    for session in config.sessions:
        limit.open(session, compact=False)
    grown = replace(config.sessions[0], retention_tokens=2 * config.sessions[0].retention_tokens)
    assert not limit.has_room(grown, compact=False)
    shrunk = replace(config.sessions[0], retention_tokens=config.sessions[0].retention_tokens // 2)
    assert limit.has_room(shrunk, compact=False), "its own place is free then"
    limit.open(shrunk, compact=False)
    assert limit.has_room(config.sessions[0], compact=False)
    assert sizes.of(shrunk, compact=False) < sizes.of(config.sessions[0], compact=False)


@given(retained=st.lists(st.integers(1, 9000), max_size=6), blocks=st.integers(0, 9000))
def test_sessions_that_fit_are_those_whose_blocks_do_in_the_order_of_the_file(
    retained: list[int], blocks: int
) -> None:
    config = inproc_config(NAMES[: len(retained)])
    sessions = [
        replace(session, retention_tokens=tokens)
        for session, tokens in zip(config.sessions, retained, strict=True)
    ]
    sizes = PoolSizes(structs.replace(config, sessions=tuple(sessions)), 100)
    each = [sizes.of(session, compact=False) for session in sessions]
    needs = [sizes.shared + sum(each[:n]) for n in range(len(each) + 1)]
    expected = max((n for n, need in enumerate(needs) if need <= blocks), default=0)
    assert sizes.fitting(blocks, ()) == expected
