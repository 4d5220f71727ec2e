"""A spare engine waits only where its memory is there beside the pool, and one sentence says why."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.config.schema import Config, PoolConfig, ProcessConfig, SessionConfig
from daemon.engine.build import Loaded, pool_bytes
from daemon.engine.memory_budget import SHARE, shown_bytes
from daemon.engine.spare_engine import spare_engine
from engine.model.chat_format import PromptFormat
from engine.model.embedded import build_tokenizer
from regions.kv_tensors import KVPool
from tests.engine.oracle import tiny

MODEL = tiny("llama", layers=2)
LOADED: tuple[Loaded, ...] = ((MODEL, PromptFormat.of(build_tokenizer(), "", {}, frozenset())),)
EACH = KVPool.block_bytes(MODEL.layers, 16, MODEL.dtype)
SESSIONS = (SessionConfig("aaa", "V:AAA"),)
Setting = bool | None


def config(setting: Setting, mode: Literal["two", "inproc"] = "two", blocks: int = 4000) -> Config:
    return Config(
        sessions=SESSIONS,
        standing="none",
        pool=PoolConfig(blocks=blocks, host_blocks=500),
        process=ProcessConfig(mode=mode, spare_engine=setting),
    )


def test_the_pools_bytes_are_those_of_its_blocks_and_of_the_host_tier() -> None:
    assert pool_bytes(config(None), LOADED) == 4500 * EACH


@given(own=st.integers(0, 1 << 36), room=st.integers(5000 * EACH, 1 << 38))
def test_it_waits_where_a_second_engine_fits_beside_the_pool(own: int, room: int) -> None:
    fits = own + 4500 * EACH <= SHARE * room
    found = {
        setting: spare_engine(config(setting), LOADED, own=lambda: own, available=lambda: room)
        for setting in (None, True, False)
    }
    assert found[None].wanted == fits
    assert found[True].wanted
    assert not found[False].wanted
    for setting in (None, True):
        assert found[setting].forks == found[setting].wanted
        assert all(shown_bytes(each) in found[setting].why for each in (own, room, 4500 * EACH))
        assert ("does not fit" in found[setting].why) != fits
    assert "process.spare_engine = false" in found[False].why


def test_without_a_model_of_its_own_another_process_is_started() -> None:
    """As on a GPU, whose memory the model would take twice; only libraries count."""
    found = spare_engine(config(None), (), own=lambda: 100, available=lambda: 200)
    assert found.wanted
    assert not found.forks
    assert not spare_engine(config(None), (), own=lambda: 100, available=lambda: 100).wanted


@pytest.mark.parametrize("setting", [None, True])
def test_there_is_none_beside_an_engine_that_cannot_be_built(setting: Setting) -> None:
    found = spare_engine(config(setting, blocks=1 << 50), LOADED)
    assert not found.wanted
    assert not found.forks


def test_an_engine_in_the_gateways_process_has_none() -> None:
    assert not spare_engine(config(True, "inproc"), LOADED).wanted
