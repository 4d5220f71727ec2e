"""A window comes back: its KV from a snapshot, on disk or in memory, or prefilled again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.engine.contenders import TIE, Disagreement, Regions, Reply, engine_for, model_of
from bench.engine.scenario import Scenario, Size, make_scenario
from bench.figures import Figure, Goal, Setting, latency
from bench.run import SuiteRun
from engine.device import in_own_thread
from engine.engine import Engine
from engine.model.loaded import LoadedModel
from regions.offload.snapshot_format import Identity, Restoring, Snapshot, SnapshotHeader, write_snapshot
from regions.tape import Retention, Tape


@dataclass(frozen=True)
class RestorePlan:
    """``windows``: in bars, of about 16 tokens each."""

    windows: tuple[int, ...] = (32, 128, 256)
    repeats: int = 5


QUICK = RestorePlan((4,), repeats=1)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """The window of one session on the 80M model comes back in a new engine's pool. Ours reads a snapshot:
    the file is opened, checked against both of its checksums, and its KV copied to the pool. On disk it lies
    in the page cache, as after a process was killed; in memory it is a file without a name, as systemd's
    file-descriptor store keeps it. The reference prefills the window's tokens in passes of 55 bars. Both then
    answer the same question alike.
    """
    plan = run.sized(RestorePlan(), QUICK)
    return in_own_thread(lambda: iter(list(figures(plan, model_of(run)[0]))))


def figures(plan: RestorePlan, loaded: LoadedModel) -> Iterator[Figure]:
    """Of each window."""
    for bars in plan.windows:
        scenario = make_scenario(loaded, Size(bars, 0, 0))
        with TemporaryDirectory() as folder:
            disk, memory = Path(folder) / "session.kv", os.memfd_create("session")
            try:
                yield from _window(plan, loaded, scenario, disk, Path(f"/proc/{os.getpid()}/fd/{memory}"))
            finally:
                os.close(memory)


def _window(
    plan: RestorePlan, loaded: LoadedModel, scenario: Scenario, disk: Path, memory: Path
) -> Iterator[Figure]:
    kept = _engine(loaded, scenario)
    source, _ = _prefilled(kept, scenario)
    identity = Identity.of(kept.pool, model=loaded.name, tokenizer="bench", frozen=scenario.frozen)
    header = SnapshotHeader("bench", identity, kept.pool.block_size, source.tape.state, time.time_ns())
    written = time.perf_counter()
    write_snapshot(disk, header, kept.pool, source.tape.live_ranges)
    written = time.perf_counter() - written
    memory.write_bytes(disk.read_bytes())
    expected = source.ask(scenario.question)
    took: dict[str, list[int]] = {"prefill": [], "snapshot on disk": [], "snapshot in memory": []}
    for _ in range(plan.repeats):
        for name, path in (("snapshot on disk", disk), ("snapshot in memory", memory)):
            engine = _engine(loaded, scenario)
            regions = Regions(engine, scenario.frozen, Retention(scenario.tokens))
            started = time.perf_counter_ns()
            _restore(engine, regions.tape, path, identity)
            took[name].append(time.perf_counter_ns() - started)
            _compare(regions.ask(scenario.question), expected)
        again, seconds = _prefilled(_engine(loaded, scenario), scenario)
        took["prefill"].append(seconds)
        _compare(again.ask(scenario.question), expected)
    setting: Setting = {
        "bars": len(scenario.first),
        "tokens": source.tape.live_tokens,
        "MiB": round(disk.stat().st_size / 2**20, 1),
    }
    prefill = took.pop("prefill")
    for name, ours in took.items():
        goals = {0.5: Goal(0.1)}
        yield from latency(name, ours, setting, "", "prefilled again", prefill, at=(0.5,), goals=goals)
    yield Figure("writing it to disk", 1e3 * written, unit="ms", setting=setting)


def _engine(loaded: LoadedModel, scenario: Scenario) -> Engine:
    return engine_for(loaded, 2 * scenario.tokens)


def _prefilled(engine: Engine, scenario: Scenario) -> tuple[Regions, int]:
    """A window that was read, and the ns that took."""
    regions = Regions(engine, scenario.frozen, Retention(scenario.tokens))
    started = time.perf_counter_ns()
    regions.fill(scenario.first)
    return regions, time.perf_counter_ns() - started


def _restore(engine: Engine, tape: Tape, path: Path, identity: Identity) -> None:
    snapshot = Snapshot.open(path)
    snapshot.expect(identity)
    tape.resume(snapshot.header.state, Restoring(engine.pool, snapshot))
    if not tape.swap_in():
        raise RuntimeError("the pool is too small for the window")


def _compare(found: Reply, expected: Reply) -> None:
    if found.token != expected.token and min(found.gap, expected.gap) > TIE:
        raise Disagreement(f"the restored window answers {found.token}, the first one {expected.token}")
