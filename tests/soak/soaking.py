"""A daemon under load, restarted and reconfigured meanwhile, and a record of what it holds."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from feeds.kafka_sink import KafkaSink
from feeds.mock_broker import MockBroker
from tests.kit import SECOND, START, trade, until_slowly
from tests.kit.daemon import Daemon, kafka_toml
from tests.soak.resources import MIB, Held, held, shared_memory, slope

SESSIONS = [f"s{n}" for n in range(10)]
TOPICS = ("md.trades.v1", "answers.v1", "dlq.v1")
SPEED = 6.0
"""Bars of a second for each second: an hour's load in ten minutes."""
SAMPLE_S = 0.5
WARM = 1 / 3
"""Share of a process's life before its memory is judged: caches fill."""
IDLE_S = 2.0


@dataclass
class Life:
    """What one process held, by time (s)."""

    samples: list[tuple[float, Held]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it was sampled."""
        return self.samples[-1][0] - self.samples[0][0]

    @property
    def warm(self) -> list[tuple[float, Held]]:
        """Samples of its life after its beginning."""
        return self.samples[int(len(self.samples) * WARM) :]

    def growth(self) -> float:
        """Growth of its memory once warm, MiB an hour of load."""
        return slope([(at, each.memory) for at, each in self.warm]) * 3600 / SPEED / MIB

    def gain(self) -> float:
        """What it gained in all once warm, MiB."""
        sizes = [each.memory for _, each in self.warm]
        return (sizes[-1] - sizes[0]) / MIB


@dataclass
class Soak:
    """One run. ``bars``: of each session, over all its daemon's lives."""

    folder: Path
    broker: MockBroker
    bars: int = 0
    lives: dict[tuple[str, int], Life] = field(default_factory=dict)
    """By role (gateway or engine) and process id."""
    daemons: list[Daemon] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.temporary, self.spilled = self.folder / "tmp", self.folder / "spilled"
        self.snapshots = self.folder / "snapshots"
        for made in (self.temporary, self.spilled):
            made.mkdir()
        for topic in TOPICS:
            self.broker.create_topic(topic)

    @property
    def daemon(self) -> Daemon:
        return self.daemons[-1]

    async def start(self) -> None:
        environment = {"TMPDIR": str(self.temporary)}
        folder = self.folder / f"daemon{len(self.daemons)}"
        self.daemons.append(Daemon(folder, self._config(SESSIONS), environment, spare=True).__enter__())
        await self.daemon.ready()

    def close(self) -> None:
        for daemon in self.daemons:
            daemon.__exit__(None, None, None)

    async def load(self, seconds: float) -> None:
        """Feed bars at the speed, as long as this takes; waits for no answer."""
        sink = KafkaSink("test-trades", self.broker.bootstrap)
        await sink.start()
        sampling = asyncio.create_task(self._sample())
        try:
            began = time.monotonic()
            for n in count(1):
                if (due := began + n / SPEED) > began + seconds:
                    break
                await asyncio.gather(*(sink.publish(TOPICS[0], key, value, {}) for key, value in self._bar()))
                self.bars += 1
                await asyncio.sleep(max(0.0, due - time.monotonic()))
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            await sink.stop()

    async def kill_engine(self) -> None:
        """The gateway starts another one."""
        before = self.daemon.engine()
        assert before is not None, "there is an engine"
        os.kill(before, signal.SIGKILL)
        await until_slowly(lambda: self.daemon.engine() not in (None, before), what="another engine")
        await self.daemon.ready()

    async def kill_gateway(self) -> None:
        """Its engine ends, too; a service manager would start it again."""
        os.kill(self.daemon.pid, signal.SIGKILL)
        await asyncio.to_thread(self.daemon.wait, 20)
        await self.start()

    async def change_sessions(self, names: Sequence[str]) -> None:
        """Read the configuration again, with these sessions."""
        done = "foretick_config_reloads_total"
        before = self.daemon.metric(done)
        self.daemon.configure(self._config(names))
        self.daemon.signal(signal.SIGHUP)
        await until_slowly(lambda: self.daemon.metric(done) > before, what="the configuration read again")
        assert self.daemon.metric(done, outcome="refused") == 0, self.daemon.log[-2000:]

    async def files_go(self, session: str) -> None:
        """The files of a session that was removed go with it."""
        await until_slowly(lambda: session not in self._filed(), what=f"no file of {session}")

    async def have_snapshots(self) -> None:
        """Every session has one, to go on from."""
        await until_slowly(lambda: set(SESSIONS) <= self._snapshotted(), what="snapshots")

    async def fall_idle(self) -> None:
        """The KV of every session that has any goes to disk."""
        await until_slowly(lambda: len(list(self.spilled.glob("*/*.kv"))) >= len(SESSIONS) - 1, what="files")

    def now(self) -> dict[str, Held]:
        """What gateway and engine hold now."""
        engine = self.daemon.engine()
        assert engine is not None, "there is an engine"
        return {"gateway": held(self.daemon.pid), "engine": held(engine)}

    def left(self) -> list[str]:
        """Shared memory and temporary files of all daemons, and files of sessions that there are none of.

        To be asked after a clean end: what a killed daemon left goes when the next one starts.
        """
        pids = [daemon.pid for daemon in self.daemons] + [pid for _, pid in self.lives]
        files = [str(path.relative_to(self.folder)) for path in self.temporary.glob("*foretick*")]
        kept = (".snapshot", ".gaps", ".past")
        unfinished = [path.name for path in self.snapshots.iterdir() if path.suffix not in kept]
        return [*shared_memory(pids), *files, *unfinished, *sorted(self._filed() - set(SESSIONS))]

    def _filed(self) -> set[str]:
        """Sessions that have a file, spilled or to restart from."""
        return {path.stem for path in self.spilled.glob("*/*")} | self._snapshotted()

    def _snapshotted(self) -> set[str]:
        return {path.name.partition(".")[0] for path in self.snapshots.glob("[!.]*.snapshot")}

    def report(self) -> str:
        """A line for each process that lived for long enough."""
        lines = [f"{self.bars} bars of {len(SESSIONS)} sessions"]
        for (role, pid), life in self.lives.items():
            first, last = life.samples[0], life.samples[-1]
            lines.append(
                f"{role} {pid}: {life.seconds:.0f} s, {first[1].memory / MIB:.1f} to "
                f"{last[1].memory / MIB:.1f} MiB, {life.growth():+.1f} MiB/h of load, "
                f"{last[1].threads} threads, {last[1].descriptors.total()} descriptors"
                if len(life.samples) > 3
                else f"{role} {pid}: too short a life"
            )
        return "\n".join(lines)

    def _bar(self) -> list[tuple[bytes, bytes]]:
        n = self.bars
        return [
            (name.encode(), trade(f"V:{name}", START + n * SECOND + i * 1000, f"{100 + n % 9 + i}.25"))
            for i in range(3)
            for name in SESSIONS
        ]

    async def _sample(self) -> None:
        while True:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pids = {"gateway": self.daemon.pid, "engine": self.daemon.engine()}
                for role, pid in pids.items():
                    if pid is not None:
                        life = self.lives.setdefault((role, pid), Life())
                        life.samples.append((time.monotonic(), held(pid)))
            await asyncio.sleep(SAMPLE_S)

    def _config(self, names: Sequence[str]) -> str:
        more = {
            "model": "remembered_answers = 2000",  # so that it is full when memory is judged
            "pool": f'blocks = 2048\nidle_spill = "{IDLE_S:g}s"\nspill_dir = "{self.spilled}"',
            "recovery": f'interval = "1s"\ndirectory = "{self.snapshots}"',
            "log": 'level = "warning"',
        }
        return kafka_toml(self.broker.bootstrap, "", {name: f"V:{name}" for name in names}, more)
