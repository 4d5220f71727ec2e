"""Idle sessions, tiers and audits, wired as in the daemon."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.config.schema import Config, PoolConfig
from daemon.engine.maintenance import AUDIT_NS, Maintenance, Tiers, identity_of, tiers_of
from daemon.engine.metrics import MemoryMetrics
from engine.engine import Engine
from engine.step import Chunk
from feeds.connector import SettingError
from feeds.durations import Duration
from metrics.store import MetricStore
from regions.kv_tensors import KVPool, LayerShape
from regions.tape import Retention, Tape
from tests.engine.oracle import tiny

FROZEN = list(range(3, 14))
LABELS: dict[str, list[str]] = {"session": ["a", "b"], "source": ["s"], "sink": ["k"]}


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def small_engine() -> Engine:
    model = tiny("llama", layers=1)
    backend = SimpleNamespace(to_str=lambda: "vocabulary")
    object.__setattr__(model, "tokenizer", SimpleNamespace(backend_tokenizer=backend))
    return Engine(model, blocks=60, block_size=4, frame_limit=200)


def tape_of(engine: Engine, tiers: Tiers, name: str) -> Tape:
    tape = engine.open_tape(name, FROZEN, Retention(64))
    if tiers.residency is not None:
        tiers.residency.attach(tape, identity_of(engine, FROZEN))
    return tape


def append(engine: Engine, tape: Tape, record: list[int]) -> None:
    tape.make_room([len(record)])
    assert tape.acquire(len(record))
    engine.execute([Chunk(tape, record, sample=False)])
    tape.commit([len(record)])


def keeper(
    engine: Engine, tapes: list[Tape], tiers: Tiers, store: MetricStore, clock: Clock
) -> Callable[[], float | None]:
    """One idle call, then the metrics as with a heartbeat."""
    keeping, report = (
        Maintenance(engine.pool, tapes, tiers, store, clock),
        MemoryMetrics([(engine, tiers)], store),
    )

    def call() -> float | None:
        due = keeping()
        report()
        return due

    return call


def value(store: MetricStore, name: str, **labels: str) -> float:
    return store.value(f"foretick_{name}", **labels)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_idle_sessions_are_offloaded_one_per_call_and_restored(tmp_path: Path, clock: Clock) -> None:
    """One to the host when the pool needs blocks, one to disk after the idle timeout; metrics count both."""
    engine, store = small_engine(), MetricStore.local(LABELS)
    settings = PoolConfig(host_blocks=6, idle_spill=Duration(10**9), spill_dir=str(tmp_path / "s"))
    tiers = tiers_of(Config(pool=settings), engine, 6, clock=clock)
    tapes = [tape_of(engine, tiers, name) for name in "ab"]
    keep = keeper(engine, tapes, tiers, store, clock)
    for tape in tapes:
        append(engine, tape, list(range(20, 40)))
    before = [ask(engine, tape) for tape in tapes]
    assert keep() == 1.0
    assert tiers.residency is not None
    tiers.residency.reclaim(1)
    assert [tape.resident for tape in tapes] == [False, True]
    clock.now = 10**9
    assert keep() == 0.0
    assert [tape.resident for tape in tapes] == [False, False]
    assert keep() is None
    (file,) = (tmp_path / "s").glob("*/*")
    assert file.name == "b.kv"
    assert value(store, "host_blocks", state="used") == 5
    assert value(store, "host_blocks", state="free") == 1
    assert tiers.residency.spills.total() == 2
    assert value(store, "prefix_tokens_total", event="saved") == len(FROZEN)
    assert value(store, "prefix_tokens_total", event="reused") == len(FROZEN)  # of the second session
    assert [ask(engine, tape) for tape in tapes] == before
    assert keep() == 1.0
    assert value(store, "host_blocks", state="used") == 0
    assert tiers.host is not None
    assert tiers.host.swapped_out == tiers.host.swapped_in == 1
    assert value(store, "restores_total", outcome="host") == 1
    assert value(store, "restores_total", outcome="disk") == 1
    assert tiers.residency.spills.total() == 2
    for tape in tapes:
        tape.release()


def test_a_lost_file_and_the_rebuilt_session_are_counted(tmp_path: Path, clock: Clock) -> None:
    engine, store = small_engine(), MetricStore.local(LABELS)
    settings = Config(pool=PoolConfig(idle_spill=Duration(10**9), spill_dir=str(tmp_path)))
    tiers = tiers_of(settings, engine, 0, clock=clock)
    tape = tape_of(engine, tiers, "a")
    keep = keeper(engine, [tape], tiers, store, clock)
    append(engine, tape, list(range(20, 40)))
    before = ask(engine, tape)
    clock.now = 10**9
    assert keep() == 0.0
    (file,) = tmp_path.glob("*/a.kv")
    file.unlink()
    assert not tape.acquire(1)
    fresh, window = tape.fresh_window(), tape.window
    assert fresh.acquire(len(window))
    engine.execute([Chunk(fresh, window, sample=False)])
    tape.adopt(fresh)
    assert ask(engine, tape) == before
    keep()
    assert value(store, "spill_failures_total") == 1
    assert value(store, "restores_total", outcome="rebuilt") == 1
    tape.release()


def ask(engine: Engine, tape: Tape) -> list[float]:
    """Logits after a question, rounded: the same before and after."""
    fork = tape.fork()
    assert fork.acquire(3)
    logits = engine.logits([Chunk(fork, [5, 6, 7])])[-1, :8]
    fork.release()
    return [round(float(x), 3) for x in logits]


def test_without_settings_there_are_no_tiers_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETICK_CACHE", str(tmp_path))
    engine = small_engine()
    assert tiers_of(Config(pool=PoolConfig(pressure_spill=False)), engine, 0) == Tiers()
    only_host = tiers_of(Config(), engine, 3)
    assert only_host.host is not None
    assert list(tmp_path.iterdir()) == []
    tiers_of(Config(pool=PoolConfig(idle_spill=Duration(1))), engine, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["sessions"]


@pytest.mark.parametrize("on", [True, False])
def test_a_full_pool_sends_sessions_to_disk_unless_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, on: bool
) -> None:
    """By default, to the cache directory, which is written only then. A metric counts it."""
    monkeypatch.setenv("FORETICK_CACHE", str(tmp_path))
    engine, store = small_engine(), MetricStore.local(LABELS)
    config = Config() if on else Config(pool=PoolConfig(pressure_spill=False))
    tiers = tiers_of(config, engine, 0, clock=clock)
    tape = tape_of(engine, tiers, "a")
    keep = keeper(engine, [tape], tiers, store, clock)
    append(engine, tape, list(range(20, 40)))
    before = ask(engine, tape)
    assert list(tmp_path.iterdir()) == []
    prompt = engine.open_prompt()
    assert prompt.acquire(4 * 54) == on
    assert tape.resident != on
    assert len(list(tmp_path.glob("sessions/*/a.kv"))) == on
    prompt.release()
    assert ask(engine, tape) == before
    assert keep() is None
    assert value(store, "spills_total", outcome="disk") == on
    tape.release()


def test_a_spill_directory_that_cannot_be_made_stops_only_the_spill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The default one: the daemon starts, and says it when the pool is full."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORETICK_CACHE", str(tmp_path / "file" / "x"))
    engine, store = small_engine(), MetricStore.local(LABELS)
    tiers = tiers_of(Config(), engine, 0, clock=clock)
    tape = tape_of(engine, tiers, "a")
    append(engine, tape, list(range(20, 40)))
    prompt = engine.open_prompt()
    assert not prompt.acquire(4 * 54)
    assert tape.resident
    assert "session a stays in the pool: a.kv could not be written: Not a directory" in caplog.text
    keeper(engine, [tape], tiers, store, clock)()
    assert value(store, "spill_failures_total") == 1
    prompt.release()
    tape.release()


def test_impossible_tiers_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of no given size is left out instead."""
    engine = small_engine()
    (tmp_path / "file").touch()
    for idle in (Duration(1), Duration(0)):
        spill = Config(pool=PoolConfig(idle_spill=idle, spill_dir=str(tmp_path / "file" / "x")))
        with pytest.raises(SettingError, match=r"pool\.spill_dir"):
            tiers_of(spill, engine, 0)

    def no_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't allocate memory")

    with pytest.raises(SettingError, match=r"pool\.host_blocks"):
        tiers_of(Config(pool=PoolConfig(host_blocks=3)), engine, 3, make_host=no_memory)
    assert tiers_of(Config(), engine, 3, make_host=no_memory).host is None
    assert "no host tier" in caplog.text


def test_a_fragmented_window_is_compacted(clock: Clock) -> None:
    engine, store = small_engine(), MetricStore.local(LABELS)
    tape = tape_of(engine, Tiers(), "a")
    append(engine, tape, list(range(20, 28)))
    last = tape.extents[-1]
    blocked = engine.pool.blocks.take(1, behind=(last.slot + last.length) // 4)
    append(engine, tape, list(range(30, 38)))
    assert tape.runs == 2
    assert blocked is not None
    engine.pool.blocks.release(blocked)
    before = ask(engine, tape)
    keep = keeper(engine, [tape], Tiers(), store, clock)
    assert keep() == 0.0
    assert tape.runs == 1
    assert ask(engine, tape) == before
    assert keep() is None
    tape.release()


def test_memory_that_a_lower_limit_retires_later_is_given_back(clock: Clock) -> None:
    """By the next call, as the blocks above the limit are released."""
    pool = KVPool([LayerShape(2, 64, 64)], 8)
    maintenance = Maintenance(pool, [], Tiers(), MetricStore.local({}), clock)
    runs = pool.take(8)
    assert runs
    pool.keys[0].fill_(1.0)
    pool.resize(1)
    pool.blocks.release(runs)
    maintenance()
    assert not pool.blocks.retired
    assert float(pool.keys[0][0, 0, 0]) == 1.0
    assert float(pool.keys[0][1, -1, 0]) == 0.0


def test_inconsistent_block_metadata_is_reported_and_harmless(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted and logged at most once a minute; the worker continues."""
    engine, store = small_engine(), MetricStore.local(LABELS)
    keep = keeper(engine, [], Tiers(), store, clock)
    lost = engine.pool.take(1)
    assert lost is not None
    assert keep() is None
    assert keep() is None
    assert value(store, "integrity_failures_total") == 1
    assert "1 references and 0 owners" in caplog.text
    clock.now = AUDIT_NS
    keep()
    assert value(store, "integrity_failures_total") == 2
    engine.pool.blocks.release(lost)
    clock.now = 3 * AUDIT_NS
    keep()
    assert value(store, "integrity_failures_total") == 2


def test_the_identity_is_that_of_model_and_tokenizer() -> None:
    engine = small_engine()
    mine = identity_of(engine, FROZEN)
    assert mine.model == "tiny-llama@"
    assert mine.dtype == "float32"
    assert mine != identity_of(engine, FROZEN[1:])
    other = SimpleNamespace(get_vocab=lambda: {"a": 1})
    object.__setattr__(engine.model, "tokenizer", other)
    assert identity_of(engine, FROZEN) != mine
