"""A pool or host tier that does not fit in memory is refused before it is allocated, with what would fit."""

import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from daemon.cli.check import check_all
from daemon.config.schema import (
    UNTRAINED,
    Config,
    ModelConfig,
    NamedModel,
    PoolConfig,
    ProcessConfig,
    SessionConfig,
)
from daemon.engine import build as building
from daemon.engine.build import build, load_all, pool_bytes, sized_all
from daemon.engine.memory_budget import (
    SHARE,
    SharedMemory,
    check_memory,
    host_blocks,
    shown,
    unbounded_host_blocks,
)
from daemon.engine.spare_engine import spare_engine
from engine.pass_memory import pass_bytes
from engine.step import OutOfMemory
from feeds.connector import SettingError
from regions.kv_tensors import KVPool, LayerShape
from tests.engine.oracle import tiny

MODEL = tiny("llama", layers=2)
EACH = sum(t.numel() for layer in KVPool(list(MODEL.layers), 1).keys for t in [layer]) * 2 * 4
"""Bytes of a block, from tensors: float32 keys and values."""


def of(free: Mapping[str, int]) -> Any:
    return lambda device: free[device.type]


@given(blocks=st.integers(1, 1 << 70), free=st.integers(0, 1 << 50))
def test_what_is_refused_does_not_fit_and_what_is_named_does(blocks: int, free: int) -> None:
    settings = PoolConfig(blocks=blocks)
    if blocks * EACH <= free * SHARE:
        check_memory(settings, blocks, MODEL, of({"cpu": free}))
        return
    with pytest.raises(SettingError) as refused:
        check_memory(settings, blocks, MODEL, of({"cpu": free}))
    said = refused.value.message
    assert refused.value.key == "pool.blocks"
    assert f"{shown(blocks * EACH)} bytes" in said
    assert f"{shown(free)} bytes" in said
    named = re.search(r"at most ([\d,]+) fit", said)
    assert named
    most = int(named[1].replace(",", ""))
    assert most * EACH <= free * SHARE < (most + 1) * EACH
    if most:
        check_memory(PoolConfig(blocks=most), most, MODEL, of({"cpu": free}))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (10**18, "1.00e+18"),
        (10**20 - 1, "1.00e+20"),
        (7 * 10**400, "7.00e+400"),
    ],
)
def test_numbers_of_any_length_are_shown(number: int, text: str) -> None:
    assert shown(number) == text
    assert len(shown(number**20 if number else 10**5000)) < 60
    assert Decimal(shown(number).replace(",", "")) == pytest.approx(Decimal(number), rel=Decimal("0.01"))


def test_the_host_tier_shares_the_memory_of_a_pool_on_a_cpu() -> None:
    settings, room = PoolConfig(blocks=10, host_blocks=10), int(21 * EACH / SHARE)
    check_memory(settings, 10, MODEL, of({"cpu": room}))
    with pytest.raises(SettingError, match=r"at most [89] fit") as refused:
        check_memory(settings, 10, MODEL, of({"cpu": room - 2 * EACH}))
    assert refused.value.key == "pool.host_blocks"


def test_a_gpu_has_memory_of_its_own() -> None:
    model = replace(MODEL, device=torch.device("cuda", 0))
    settings, free = PoolConfig(blocks=100, host_blocks=100), int(101 * EACH / SHARE)
    check_memory(settings, 100, model, of({"cuda": free, "cpu": free}))
    for device, key, where in (
        ("cuda", "pool.blocks", "on the GPU"),
        ("cpu", "pool.host_blocks", "in memory"),
    ):
        little = {"cuda": free, "cpu": free} | {device: 50 * EACH}
        with pytest.raises(SettingError, match=where) as refused:
            check_memory(settings, 100, model, of(little))
        assert refused.value.key == key


def test_bytes_of_a_block_are_those_of_its_tensors() -> None:
    layers = [LayerShape(2, 8, 16), LayerShape(3, 8, 8)]
    for dtype in (torch.float32, torch.bfloat16):
        pool = KVPool(layers, 5, block_size=4, dtype=dtype)
        assert KVPool.block_bytes(layers, 4, dtype) * 5 == pool.bytes


CONFIG = Config(model=ModelConfig(path=UNTRAINED), sessions=(SessionConfig("aaa", "V:AAA"),), standing="none")


@pytest.mark.parametrize(
    ("pool", "key"),
    [
        (PoolConfig(blocks=1 << 40), "pool.blocks"),
        (PoolConfig(blocks=10**400), "pool.blocks"),
        (PoolConfig(host_blocks=1 << 62), "pool.host_blocks"),
    ],
    ids=["large", "absurd", "host"],
)
def test_an_engine_that_does_not_fit_is_not_built(pool: PoolConfig, key: str) -> None:
    with pytest.raises(SettingError, match=r"bytes.* are available") as refused:
        build(structs.replace(CONFIG, pool=pool), {})
    assert refused.value.key == key


def test_a_pool_sized_from_absurd_sessions_says_so() -> None:
    session = SessionConfig("bbb", "V:BBB", retention_tokens=1 << 45)
    with pytest.raises(SettingError, match="sizes the pool") as refused:
        build(structs.replace(CONFIG, sessions=(*CONFIG.sessions, session)), {})
    assert "room for 0 of 2 sessions" in refused.value.message


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_another_process_took_meanwhile_is_a_message_too(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(building, "Engine", refuse)
    with pytest.raises(SettingError, match="9000"):
        build(structs.replace(CONFIG, pool=PoolConfig(blocks=9000)), {})


def test_other_errors_of_an_engine_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(building, "Engine", refuse)
    with pytest.raises(RuntimeError, match="a defect"):
        build(CONFIG, {})


@given(
    blocks=st.integers(1, 1 << 20),
    budget=st.sampled_from([0.1, 0.5, 1.0]),
    each=st.integers(1, 1 << 22),
    left=st.integers(-(1 << 40), 1 << 40),
)
def test_the_default_host_tier_is_a_share_of_what_is_left_and_holds_what_requests_may(
    blocks: int, budget: float, each: int, left: int
) -> None:
    found = host_blocks(PoolConfig(), blocks, budget, each, left)
    most = unbounded_host_blocks(blocks, budget)
    assert blocks * budget <= most < blocks * budget + 1
    assert 0 <= found <= most
    assert found * each * 8 <= max(0, left)
    assert found == most or (found + 1) * each * 8 > left - 8
    assert host_blocks(PoolConfig(host_blocks=7), blocks, budget, each, left) == 7


def small_machine(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(building, "SharedMemory", lambda: SharedMemory(lambda device: free))
    monkeypatch.setattr(building, "own_bytes", lambda: 400 << 20)


def test_in_two_gib_the_default_daemon_has_pool_spare_and_host_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """1400 MiB are available: the machine's, or what the limit of a container leaves."""
    small_machine(monkeypatch, 1400 << 20)
    config = structs.replace(CONFIG, process=ProcessConfig(mode="two"))
    loaded = load_all(config)
    each = KVPool.block_bytes(loaded[0][0].layers, 16, loaded[0][0].dtype)
    (room,) = sized_all(config, loaded)
    assert room.host_blocks * each <= (1400 - 70 - 500) / 8 * 2**20
    assert 0 < room.host_blocks <= -(-room.blocks // 2)
    assert pool_bytes(config, loaded) == (room.blocks + room.host_blocks) * each
    own = 400 << 20
    assert spare_engine(config, loaded, own=lambda: own, available=lambda: 1400 << 20).wanted


def test_the_default_host_tier_never_costs_a_spare_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there is: it takes of what the pool and the spare leave."""
    config = structs.replace(CONFIG, process=ProcessConfig(mode="two"))
    without = structs.replace(config, pool=PoolConfig(host_blocks=0))
    loaded, seen = load_all(config), set()
    for mib in range(420, 900, 20):
        small_machine(monkeypatch, mib << 20)
        own, free = 400 << 20, mib << 20
        wanted = [
            spare_engine(each, loaded, own=lambda own=own: own, available=lambda free=free: free).wanted
            for each in (config, without)
        ]
        assert wanted[0] == wanted[1]
        seen.add(wanted[0])
    assert seen == {True, False}


def test_default_host_tiers_leave_room_for_the_pools_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    second = NamedModel(name="b", path=UNTRAINED)
    config = structs.replace(CONFIG, models=(second,), process=ProcessConfig(mode="inproc"))
    loaded = load_all(config)
    small_machine(monkeypatch, 1 << 40)
    rooms = sized_all(config, loaded)
    sizes = [KVPool.block_bytes(each.layers, 16, each.dtype) for each, _ in loaded]
    pools = sum(room.blocks * each for room, each in zip(rooms, sizes, strict=True))
    assert [room.host_blocks for room in rooms] == [-(-room.blocks // 2) for room in rooms]
    small_machine(monkeypatch, int(pools / SHARE) + 4096)
    tight = sized_all(config, loaded)
    assert [room.blocks for room in tight] == [room.blocks for room in rooms]
    assert [room.host_blocks for room in tight] == [0, 0]


PEAK = 3 << 20
"""Of passes on the fake device."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loaded models on a GPU with so much free memory."""
    monkeypatch.setattr(building, "pass_bytes", lambda loaded, rows, block_size: PEAK)
    (loaded, prompt), *_ = load_all(CONFIG)

    def found(free: int) -> list[Any]:
        memory = {"cuda": free, "cpu": 1 << 40}
        monkeypatch.setattr(building, "SharedMemory", lambda: SharedMemory(of(memory)))
        return [(replace(loaded, device=torch.device("cuda", 0)), prompt)]

    return found


def with_memory(memory: float, **keys: Any) -> Config:
    return structs.replace(CONFIG, pool=PoolConfig(memory=memory, **keys))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(share=st.floats(0.2, SHARE), free=st.integers(1 << 28, 1 << 36))
def test_a_share_is_of_what_weights_and_passes_leave(gpu: Any, share: float, free: int) -> None:
    models = gpu(free)
    each = KVPool.block_bytes(models[0][0].layers, 16, models[0][0].dtype)
    (room,) = sized_all(with_memory(share), models)
    assert room.blocks == int(share * (free - PEAK)) // each


def test_bytes_are_the_pools_if_passes_have_room_beside_it(gpu: Any) -> None:
    models, free = gpu(1 << 30), 1 << 30
    each = KVPool.block_bytes(models[0][0].layers, 16, models[0][0].dtype)
    (room,) = sized_all(with_memory(200e6), models)
    assert room.blocks == int(200e6) // each
    most = int(SHARE * (free - PEAK))
    (room,) = sized_all(with_memory(most), models)
    assert room.blocks == most // each
    for memory in (most + 1, 0.96):
        with pytest.raises(
            SettingError, match=f"set at most {most:,}, or a share of at most 0.95"
        ) as refused:
            sized_all(with_memory(memory), models)
        assert refused.value.key == "pool.memory"


@pytest.mark.parametrize(
    ("memory", "free", "why"),
    [
        (100.0, 1 << 30, "are less than a block of 16 tokens"),
        (0.85, PEAK, "are less than a block"),
        (0.85, PEAK + (1 << 20), "give it more memory"),
        (1 << 20, 1 << 30, "are needed"),
    ],
)
def test_memory_without_room_for_a_session_is_refused(gpu: Any, memory: float, free: int, why: str) -> None:
    with pytest.raises(SettingError, match=why) as refused:
        sized_all(with_memory(memory), gpu(free))
    assert refused.value.key == "pool.memory"


def test_weights_that_leave_no_memory_for_a_pass_are_an_error_of_the_batch(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs_out(loaded: Any, rows: int, block_size: int) -> int:
        raise OutOfMemory("CUDA out of memory")

    monkeypatch.setattr(building, "pass_bytes", runs_out)
    with pytest.raises(SettingError, match="no memory for") as refused:
        sized_all(with_memory(0.5), gpu(1 << 30))
    assert refused.value.key == "scheduler.max_batch_tokens"


def test_on_a_cpu_host_tier_and_spare_engine_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    small_machine(monkeypatch, 2 << 30)
    loaded = load_all(CONFIG)
    each = KVPool.block_bytes(loaded[0][0].layers, 16, loaded[0][0].dtype)
    taken = pass_bytes(loaded[0][0], CONFIG.scheduler.max_batch_tokens, 16)
    for process, more in ((ProcessConfig(mode="inproc"), 0), (ProcessConfig(mode="two"), 500 << 20)):
        config = structs.replace(with_memory(0.5, host_blocks=1000), process=process)
        (room,) = sized_all(config, loaded)
        assert room.blocks == int(0.5 * ((2 << 30) - taken - more - 1000 * each)) // each


def test_check_says_the_blocks_that_follow_and_the_pool_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    small_machine(monkeypatch, 1 << 30)
    config = structs.replace(with_memory(64e6), process=ProcessConfig(mode="inproc"))
    built = build(config, {})
    each = KVPool.block_bytes(built.loaded.layers, 16, built.loaded.dtype)
    blocks = int(64e6) // each
    assert (built.engine.pool.capacity, built.engine.pool.total_blocks) == (blocks, blocks)
    found = {each.key: each.message for each in check_all(config)}
    assert found["pool.memory"] == f"{blocks} blocks, {blocks * each / 2**20:.0f} MiB"
    assert "pool.blocks" not in found
    (wrong,) = [each for each in check_all(with_memory(1000)) if each.key == "pool.memory"]
    assert not wrong.ok
