"""A group's daemons on topics of their own, fed one bar at a time, and what can be done to them."""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from feeds.kafka_sink import KafkaSink
from flash.question import PAPER_SIX
from regions.offload.residency import Idleness
from tests.chaos import schedule
from tests.chaos.feed import SYMBOLS, as_of, bar
from tests.chaos.reading import Tail
from tests.chaos.schedule import Event, Moment
from tests.kit import until, until_slowly
from tests.kit.daemon import Daemon, gone, kafka_toml
from tests.kit.kafka import KafkaCluster, KafkaServer, create_topics
from tests.kit.kafka_proxy import Api, Fault, KafkaProxy

NAMES = frozenset(question.name for question in PAPER_SIX)
PARTITIONS = 2
_MODEL = Path(__file__).resolve().parents[2] / "engine/model/foretick-tape/config.json"
WINDOW_BARS: int = json.loads(_MODEL.read_text())["foretick"]["window_bars"]
ANSWERED_S = 150.0
"""Longest wait for a bar's answers: a daemon starts, a session times out, a broker comes back meanwhile."""
STOP_S = 60.0
FAILED_S = 20.0
"""A session that was used falls idle, and fails to be written, much sooner."""
RETRIED_S = FAILED_S + Idleness().retry_ns / 1e9
"""At the latest so long after an earlier failure."""
LATE_S = 11.0
"""Of a request: longer than a client waits for its reply, and than a member of the group may be silent."""
SLOW_S = 0.2
"""Of every request in a bad network."""
DROPPED = (Api.PRODUCE, Api.OFFSET_COMMIT)
"""A bad network loses one of each, which the client misses after ten seconds."""
EXPIRY_S = 30.0
"""After so long without a transaction the broker forgets a transactional id."""
BROKER = {
    "transactional.id.expiration.ms": int(EXPIRY_S * 1000),
    "transaction.remove.expired.transaction.cleanup.interval.ms": 1000,
}


class Disk:
    """A directory of 64 MiB that can be full: a tmpfs, or without the right to mount one, a limit."""

    LIMIT = 4096

    def __init__(self, folder: Path) -> None:
        self.path = folder
        folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)]
        self.mounted = not subprocess.run(mount, capture_output=True, check=False).returncode

    def fill(self, engine: int) -> None:
        """Nothing more can be written: by anybody, or where it is no tmpfs, by ``engine``.

        Files of sessions that were used leave room: then it is to be filled again.
        """
        if not self.mounted:
            resource.prlimit(engine, resource.RLIMIT_FSIZE, (self.LIMIT, resource.RLIM_INFINITY))
            return
        with contextlib.suppress(OSError), (self.path / "full").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self, engine: int) -> None:
        if not self.mounted:
            resource.prlimit(engine, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        (self.path / "full").unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=False)  # an engine may still be ending
        shutil.rmtree(self.path, ignore_errors=True)


def damage(snapshots: Path, bars: int) -> int:
    """Leave behind what a disk may have after a loss of power; returns how many files are torn.

    Of one session each: the newest file is empty; both are cut; the newest is the older one. After so many
    ``bars`` that some have left the windows, the older one of the two stays whole: a window carries traces of
    evicted bars, which reading the log again does not restore.
    """
    (snapshots / ".aaa.0.snapshot.1.tmp").write_bytes(b"FTICKKV\n")  # began, and never got its name
    files = {
        name: sorted(snapshots.glob(f"{name}.*.snapshot"), key=lambda each: each.stat().st_mtime_ns)
        for name in SYMBOLS
    }
    empty, cut, older = files.values()
    cut = cut if bars < WINDOW_BARS else cut[-1:]
    for path in empty[-1:]:
        os.truncate(path, 0)
    for path in cut:
        os.truncate(path, path.stat().st_size // 2)
    if len(older) > 1:
        older[0].replace(older[1])
    # an earlier loss may have left an empty one, if one file was written since
    return sum(not path.stat().st_size for path in empty) + len(cut)


class Rig:
    """One daemon of a consumer group; a second one joins while the first is a zombie.

    It outlives event loops: `clients` opens the broker's clients for one. ``exactly_once``: answers and
    offsets go out in transactions; a daemon that is fenced ends, and another is started. ``spare``: with
    spare engines. ``proxy``: what its daemons reach the broker by.
    """

    MORE_SOURCE = MORE_RECOVERY = ""

    def __init__(
        self,
        broker: KafkaServer | KafkaCluster,
        folder: Path,
        *,
        exactly_once: bool = False,
        spare: bool = False,
        proxy: KafkaProxy | None = None,
    ) -> None:
        self._proxy = proxy
        self.broker, self.exactly_once, self._spare = broker, exactly_once, spare
        self.suffix = f".{uuid.uuid4().hex[:8]}"
        self.trades, self.answers = f"md.trades.v1{self.suffix}", f"answers.v1{self.suffix}"
        self.group = f"foretick{self.suffix}"
        self.next = 0
        """The bar that is produced next; those before it but the last are closed."""
        self.exits: list[int] = []
        """Statuses of daemons that ended by themselves, and were started again."""
        self._folder = folder
        self._count = self._member = 0
        self._disk = Disk(folder / "disk")
        self._snapshots = self._disk.path / "snapshots"
        self._daemon: Daemon | None = None
        self._tail: Tail | None = None
        self._sink: KafkaSink | None = None

    @property
    def transactional_id(self) -> str:
        return f"foretick{self.suffix}-{self._member}"

    @property
    def daemon(self) -> Daemon:
        assert self._daemon is not None, "it was started"
        return self._daemon

    async def start(self) -> None:
        """Create the topics and start the first daemon."""
        topics = {self.trades: PARTITIONS, self.answers: 1, f"dlq.v1{self.suffix}": 1}
        await create_topics(self.broker.bootstrap, topics, self.broker.replicas)
        self._daemon = self._new()
        await self.daemon.ready()

    def close(self) -> None:
        """Kill what runs."""
        if self._daemon is not None:
            self._daemon.__exit__(None, None, None)
        self._disk.close()

    @contextlib.asynccontextmanager
    async def clients(self) -> AsyncIterator[Self]:
        """Produce and read answers within this block."""
        bootstrap = self.broker.bootstrap
        self._sink, self._tail = KafkaSink("test-trades", bootstrap), Tail(bootstrap, self.answers)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._sink.stop)
            stack.push_async_callback(self._tail.stop)
            await asyncio.gather(self._sink.start(), self._tail.start())
            yield self

    async def step(self, event: Event | None = None) -> None:
        """Produce a bar, which closes the one before, and wait for that one's answers; ``event`` strikes."""
        strike = _Strike(event)
        await strike.at("settled", self)
        n = self.next
        await self._produce(n)
        self.next += 1
        await strike.at("sent", self)
        if n and event is not None and event.moment == "answering":
            await self._until_answered(n - 1, 1)
        await strike.at("answering", self)
        if n:
            await self._until_answered(n - 1, len(SYMBOLS) * len(NAMES))

    async def outage(self, bars: int) -> None:
        """The daemon is killed, and started again after so many bars."""
        engine = await self._engine()
        await self._end(engine, self.daemon.pid)
        for _ in range(bars):
            await self._produce(self.next)
            self.next += 1
        self._replace()
        await self._until_answered(self.next - 2, len(SYMBOLS) * len(NAMES))

    async def strike(self, fault: schedule.Fault) -> None:
        """Let something go wrong, and see to it that it is over one day, as an operator would."""
        match fault:
            case "kill gateway":
                await self._kill(self.daemon.pid)
            case "kill engine":
                # one that dies while it loads ends the daemon; until it starts, the last one may seem ready
                engine = await self._engine()
                await self._ready()
                os.kill(engine, signal.SIGKILL)
            case "kill both":
                await self._kill(await self._engine(), self.daemon.pid)
            case "terminate":
                await self._terminate()
            case "stop broker" | "kill broker":
                assert isinstance(self.broker, KafkaServer), "the only one"
                end = self.broker.stop if fault == "stop broker" else self.broker.kill
                await asyncio.to_thread(end)
                await asyncio.to_thread(self.broker.start)
            case "power loss":
                await self._power_loss()
            case "fill disk":
                await self._fill_disk()
            case "bad network":
                await self._bad_network()
            case "delay commit":
                await self._delay_commit()
            case "zombie":
                await self._zombie()
            case "idle past expiry":
                await asyncio.sleep(EXPIRY_S + 3.0)
            case "kill standby":
                raise AssertionError("there is none")

    async def _kill(self, *pids: int) -> None:
        """Kill processes, the gateway among them, and start a daemon again."""
        await self._end(*pids)
        self._replace()

    async def _end(self, *pids: int) -> None:
        """Kill processes, the gateway among them, and wait until its engine is gone, too."""
        engine = self.daemon.engine()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self.daemon.wait, STOP_S)
        if engine is not None:
            await until(lambda: gone(engine), STOP_S, "the engine's end after its gateway's")

    def _replace(self) -> None:
        """The daemon has ended."""
        self._daemon = self._new()

    async def _power_loss(self) -> None:
        """All processes are gone at once, and some files are damaged; then all start again."""
        assert isinstance(self.broker, KafkaServer), "the only one"
        await self._engine()
        daemons = self._daemons()
        engines = [engine for each in daemons if (engine := each.engine()) is not None]
        for pid in engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for each in daemons:
            each.signal(signal.SIGKILL)
        self.broker.kill()
        for each in daemons:
            await asyncio.to_thread(each.wait, STOP_S)
        for engine in engines:
            await until(lambda engine=engine: gone(engine), STOP_S, "the end of an engine that was killed")
        torn = damage(self._snapshots, self.next)
        starting = asyncio.create_task(asyncio.to_thread(self.broker.start))
        self._start_again()
        await starting
        await self._up()
        refused = _metric(self.daemon, "foretick_snapshots_refused_total", reason="torn")
        # of two, the one that answers first may write new files before the other one looks
        assert refused == torn or len(daemons) > 1, f"{torn} files are torn, {refused:g} are refused"

    async def _up(self) -> None:
        """Wait until all daemons do their part."""
        await self._ready()

    def _daemons(self) -> list[Daemon]:
        return [self.daemon]

    def _start_again(self) -> None:
        """All daemons have ended."""
        self._daemon = self._new()

    async def _bad_network(self) -> None:
        """For two bars every request is late, some come twice, and some are lost."""
        lost = [Fault(api, "drop") for api in DROPPED]
        # a producer that initialises twice fences itself
        twice = [Fault(api, "duplicate", times=3) for api in Api if api is not Api.INIT_PRODUCER_ID]
        slow = [Fault(api, "delay", SLOW_S, times=10**6) for api in Api]
        async with self._faulted(lost + twice + slow) as applied:
            await self._bar()
            await self._bar()
            met = {each.partition(" ")[2] for each in applied()}
            assert met == {"drop", "duplicate", "delay"}, applied()

    async def _delay_commit(self) -> None:
        """What ends a transaction, or stores offsets, comes when nobody waits for it any more."""
        api = Api.END_TXN if self.exactly_once else Api.OFFSET_COMMIT

        def unknown() -> float:
            return self.daemon.metric("foretick_transactions_total", outcome="unknown")

        async with self._faulted([Fault(api, "delay", LATE_S)]) as applied:
            daemon, before = self.daemon, unknown()
            await self._bar()
            await until(applied, ANSWERED_S, f"a late {api.name}")
            await self._bar()
            unnoticed = self.exactly_once and self.daemon is daemon and unknown() == before
            assert not unnoticed, "the daemon looked up what became of it"

    @contextlib.asynccontextmanager
    async def _faulted(self, faults: list[Fault]) -> AsyncIterator[Callable[[], Counter[str]]]:
        """Within this block requests meet these faults; it gives what was met, and ends with none held."""
        proxy = self._proxy
        assert proxy is not None, "it has one"
        await self._ready()
        before = proxy.applied.copy()
        proxy.faults = faults
        try:
            yield lambda: proxy.applied - before
        finally:
            proxy.faults = []
        await until(lambda: not proxy.late, 2 * LATE_S, "no request held")

    async def _terminate(self) -> None:
        status = await asyncio.to_thread(self.daemon.terminate, STOP_S)
        log = self.daemon.log
        untouched = status == -signal.SIGTERM and not log  # it had only begun to start
        # one that was idle past expiry since the last seed ends by itself
        fenced = status == 1 and "ended: Fenced: " in log
        assert status == 0 or untouched or fenced, f"SIGTERM: status {status}\n{log[-3000:]}"
        self._replace()

    async def _fill_disk(self) -> None:
        """Neither sessions that fall idle nor snapshots for a restart can be written; later they can."""
        await self._ready()
        engine = await self._engine()

        def failures() -> tuple[float, float]:
            unwritten = _metric(self.daemon, "foretick_snapshot_write_failures_total", reason="disk")
            return self.daemon.metric("foretick_spill_failures_total"), unwritten

        before = failures()

        def failed() -> bool:
            self._disk.fill(engine)
            return all(map(float.__gt__, failures(), before))

        try:
            for last in (False, False, True):
                self._disk.fill(engine)
                await self._bar()
                with contextlib.nullcontext() if last else contextlib.suppress(TimeoutError):
                    # on a busy machine all of them may be written again before the room they left is filled
                    seconds = RETRIED_S if last else FAILED_S
                    await until_slowly(failed, seconds, f"failures to write, more than {before}")
                    break
        finally:
            self._disk.free(engine)
        written = "foretick_snapshots_written_total"
        few = _metric(self.daemon, written)
        await until_slowly(lambda: _metric(self.daemon, written) > few, what="a snapshot")

    async def _zombie(self) -> None:
        """A daemon hangs until another one has its partitions, then goes on; one of the two is ended."""
        await self._ready()
        self._member += 1
        hung, other = self.daemon, self._new()
        pids = [hung.pid, await self._engine()]
        await other.ready()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            self._daemon = other
            await self._bar()
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        await self._bar()
        status = await asyncio.to_thread(hung.terminate, STOP_S)
        assert status == 0 or self.exactly_once, f"the zombie ended with {status}\n{hung.log[-3000:]}"

    async def _bar(self) -> None:
        """Another bar: not before the one that closed last is answered, for only the newest one would be."""
        await self._until_answered(self.next - 2, len(SYMBOLS) * len(NAMES))
        await self._produce(self.next)
        self.next += 1
        await self._until_answered(self.next - 2, len(SYMBOLS) * len(NAMES))

    async def _engine(self) -> int:
        """Process id of the engine; waits for one. A daemon that has ended is started again."""
        found: list[int] = []

        def there() -> bool:
            self._revive()
            found[:] = filter(None, [self.daemon.engine()])
            return bool(found)

        await until_slowly(there, what="an engine")
        return found[0]

    async def _ready(self) -> None:
        """Wait until the daemon is ready. One that has ended is started again."""

        def there() -> bool:
            self._revive()
            return self.daemon.get("/readyz")[0] == 200

        await until_slowly(there, what="readiness")

    def _revive(self) -> None:
        """Start what ended by itself again."""
        if (status := self.daemon.poll()) is not None:
            print(f"ended with {status}:\n{self.daemon.log[-3000:]}")
            self.exits.append(status)
            self._replace()

    def _new(self) -> Daemon:
        self._count += 1
        folder = self._folder / f"daemon{self._count}"
        return Daemon(folder, self._config(), spare=self._spare).__enter__()

    def _config(self) -> str:
        transactions = f'delivery = "exactly_once"\ntransactional_id = "{self.transactional_id}"'
        more = {
            "pool": f'idle_spill = "300ms"\nspill_dir = "{self._disk.path}"',
            "source.kafka": self.MORE_SOURCE,
            "sink.kafka": transactions if self.exactly_once else "",
            "recovery": f'directory = "{self._snapshots}"\ninterval = "1s"\n{self.MORE_RECOVERY}',
        }
        brokers = self.broker.bootstrap if self._proxy is None else f"127.0.0.1:{self._proxy.port}"
        return kafka_toml(brokers, self.suffix, SYMBOLS, more)

    async def _produce(self, n: int) -> None:
        assert self._sink is not None, "only within `clients`"
        sent = [self._sink.publish(self.trades, key.encode(), value, {}) for key, value in bar(n)]
        await asyncio.wait_for(asyncio.gather(*sent), ANSWERED_S)

    async def _until_answered(self, n: int, count: int) -> None:
        """Wait for ``count`` different answers as of bar ``n``; a daemon that ends is started again."""
        if n < 0:
            return
        tail, at = self._tail, as_of(n)
        assert tail is not None, "only within `clients`"

        def found() -> set[tuple[str, str]]:
            answers = [each.answer for each in list(tail.found.values())[-400:]]
            return {(a.session, a.question) for a in answers if a.as_of == at}

        def there() -> bool:
            self._revive()
            return len(found()) >= count

        try:
            await until(there, ANSWERED_S, f"{count} answers as of bar {n}")
        except TimeoutError as error:
            error.add_note(f"answered: {sorted(found())}, read to offset {max(tail.found, default=None)}")
            error.add_note(f"the daemon: {await asyncio.to_thread(self._state)}")
            raise

    def _state(self) -> str:
        """What the daemon says of itself: readiness, and the metrics of sessions and partitions."""
        told = self.daemon.get("/metrics")[1].splitlines()
        about = ("session=", "partition=", "engine", "commits")
        series = [each for each in told if each[:1] != "#" and any(word in each for word in about)]
        kept = [each for each in series if "_bucket{" not in each and not each.endswith(" 0.0")]
        return "\n".join([self.daemon.get("/readyz")[1], *kept])


class Pair(Rig):
    """Two daemons, of which one answers and the other stands by for it.

    Whichever ends is followed by one that stands by.
    """

    MORE_SOURCE, MORE_RECOVERY = 'session_timeout = "6s"', "standby = true"

    @property
    def transactional_id(self) -> str:
        return f"foretick{self.suffix}"

    async def start(self) -> None:
        await super().start()
        self._other = self._new()
        await self._settle()

    def close(self) -> None:
        super().close()
        self._other.__exit__(None, None, None)

    async def strike(self, fault: schedule.Fault) -> None:
        """As `Rig.strike`, to the one that answers; a kill strikes while nobody stands by, too."""
        if fault == "kill standby":
            await self._settle()
            self._other.signal(signal.SIGKILL)
            await asyncio.to_thread(self._other.wait, STOP_S)
            self._other = self._new()
            return
        if fault in ("kill gateway", "kill both", "kill broker"):
            await asyncio.to_thread(self._settled)
        else:
            await self._settle()
        await super().strike(fault)

    async def _settle(self) -> None:
        """Wait until one answers and one stands by."""
        try:
            await until_slowly(self._settled, what="one that answers and one that stands by")
        except TimeoutError as error:
            for each in self._daemons():
                error.add_note(f"{each.get('/readyz')}, its log:\n{each.log[-4000:]}")
            raise

    def _settled(self) -> bool:
        """Look which one answers; whether the other one stands by."""
        self._revive()
        both = self.daemon, self._other
        states = [json.loads(each.get("/readyz")[1] or "{}").get("status") for each in both]
        if states[1] == "ready":
            self._other, self._daemon = both
        return set(states) == {"ready", "standby"}

    def _replace(self) -> None:
        self._daemon, self._other = self._other, self._new()

    def _daemons(self) -> list[Daemon]:
        return [self.daemon, self._other]

    def _start_again(self) -> None:
        self._daemon, self._other = self._new(), self._new()

    async def _up(self) -> None:
        await self._settle()

    def _revive(self) -> None:
        super()._revive()
        if (status := self._other.poll()) is not None:
            self.exits.append(status)
            self._other = self._new()

    async def _zombie(self) -> None:
        """The one that answers hangs until the other one does; then it goes on, and ends or stands by."""
        hung, pids = self.daemon, [self.daemon.pid, await self._engine()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            self._daemon, self._other = self._other, hung
            await self._bar()
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        await self._bar()


def _metric(daemon: Daemon, name: str, **labels: str) -> float:
    """As `Daemon.metric`, of a counter that may not have begun."""
    with contextlib.suppress(AssertionError):
        return daemon.metric(name, **labels)
    return 0.0


class _Strike:
    """Lets an event strike at its moment."""

    def __init__(self, event: Event | None) -> None:
        self._event = event

    async def at(self, moment: Moment, rig: Rig) -> None:
        if self._event is not None and self._event.moment == moment:
            await asyncio.sleep(self._event.delay_ms / 1000)
            await rig.strike(self._event.fault)


@contextlib.contextmanager
def closing(rig: Rig) -> Iterator[Rig]:
    try:
        yield rig
    finally:
        rig.close()
