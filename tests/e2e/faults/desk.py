"""A daemon that reads and writes a mock broker, the market that it reads, and its disks."""

import asyncio
import contextlib
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

from feeds.mock_broker import MockBroker
from tests.e2e.faults.watched import Watched
from tests.kit import SECOND, trade
from tests.kit.daemon import Daemon, Topics, kafka_toml
from tests.kit.programs import unavailable

TRADED = ("V:AAA", "V:BBB", "V:PA")
HELD_BACK = "md.held-back.v1"
"""A topic that the daemon reads, and that has nothing but what a backlog brings."""
MORE = """
[[models]]
name = "chat"
path = "untrained"

[[sessions]]
name = "words"
symbol = "V:BBB"
model = "chat"
retention_tokens = 5000

[[sessions]]
match = "V:P*"
max_sessions = 1
price_decimals = 2
"""


class Market:
    """Trades of the present, ten a second and symbol, while the block lasts.

    ``quiet``: symbols that do not trade.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._numbers = {symbol: count(1) for symbol in (*TRADED, "V:PB", "V:IDLE")}
        self._walk, self._cents = random.Random(7), 10_000
        self.quiet: set[str] = set()
        self.swing = 4
        """Longest step of a price, cents."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Market"]:
        task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def send(
        self,
        symbol: str = "V:AAA",
        n: int = 1,
        *,
        event_s: float = 0,
        receipt_s: float = 0,
        skip: int = 0,
        **more: object,
    ) -> None:
        """Trades whose event and receipt are this far from now (s), after leaving out ``skip`` numbers."""
        numbers = self._numbers[symbol]
        for _ in range(skip):
            next(numbers)
        now = time.time_ns()
        more = {"ts_recv": now + int(receipt_s * SECOND), **more}
        moments = [now + int(event_s * SECOND) + i - n for i in range(n)]
        self._cents = max(5_000, self._cents + self._walk.randint(-self.swing, self.swing))
        price = f"{self._cents / 100:.2f}"
        await self._topics.produce(
            [(symbol, trade(symbol, each, price, **more, seq=next(numbers))) for each in moments]
        )

    async def _run(self) -> None:
        while True:
            # a broker that is down holds its records back, and nothing else
            with contextlib.suppress(TimeoutError):
                await asyncio.gather(*(self.send(each) for each in TRADED if each not in self.quiet))
            await asyncio.sleep(0.1)


class Volume:
    """A disk of its own, in memory."""

    MIB = 64

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        self._mount("-t", "tmpfs", "-o", f"size={self.MIB}m", "none")

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.path / "full").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    def empty(self) -> None:
        (self.path / "full").unlink(missing_ok=True)

    def freeze(self) -> None:
        """Nothing can be written."""
        self._mount("-o", "remount,ro")

    def thaw(self) -> None:
        self._mount("-o", "remount,rw")

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=False)

    def _mount(self, *options: str) -> None:
        deadline = time.monotonic() + 20
        while True:
            done = subprocess.run(
                ["mount", *options, str(self.path)], capture_output=True, text=True, check=False
            )
            if not done.returncode:
                return
            if "busy" not in done.stderr or time.monotonic() > deadline:  # a file is being written
                unavailable(f"the right to mount is missing: {done.stderr}")
            time.sleep(0.02)


class Desk(Watched):
    """The daemon, its broker, its market and its disks."""

    def __init__(
        self, daemon: Daemon, broker: MockBroker, topics: Topics, market: Market, text: str, disks: "Disks"
    ) -> None:
        super().__init__(daemon)
        self.broker, self.topics, self.market = broker, topics, market
        self.text, self.disks = text, disks

    def reload(self, text: str) -> None:
        self.daemon.configure(text)
        self.daemon.signal(signal.SIGHUP)

    def engine(self) -> int:
        found = self.daemon.engine()
        assert found is not None
        return found


class Disks:
    """Where snapshots and idle sessions go."""

    def __init__(self, folder: Path) -> None:
        self.snapshots, self.idle = Volume(folder / "snapshots"), Volume(folder / "idle")

    def close(self) -> None:
        self.snapshots.close()
        self.idle.close()


@contextlib.asynccontextmanager
async def desk(folder: Path) -> AsyncIterator[Desk]:
    """All of it, warm."""
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(MockBroker())
        disks = Disks(folder)
        stack.callback(disks.close)
        for topic in ("md.trades.v1", HELD_BACK, "answers.v1", "dlq.v1"):
            broker.create_topic(topic)
        more = {
            "source": 'sequence = "symbol"',
            "bars": 'interval = "1s"',
            "recovery": f'interval = "1s"\ndirectory = "{disks.snapshots.path}/s"\nmax_bytes = {32 << 20}',
            "pool": f'idle_spill = "2s"\nspill_dir = "{disks.idle.path}"',
            "log": 'level = "info"',
        }
        sessions = {"aaa": "V:AAA", "bbb": "V:BBB", "idle": "V:IDLE"}
        text = kafka_toml(broker.bootstrap, more=more, sessions=sessions) + MORE
        text = text.replace('topics = ["md.trades.v1"]', f'topics = ["md.trades.v1", "{HELD_BACK}"]')
        few = {"FORETICK_HTTP__KEPT_EVENTS": "64"}  # so that a listener soon has too many
        daemon = stack.enter_context(Daemon(folder / "daemon", text, few, spare=True))
        async with (
            Topics(broker.bootstrap, "md.trades.v1", "answers.v1") as topics,
            AsyncExitStack() as later,
        ):
            await daemon.ready(600)
            market = await later.enter_async_context(Market(topics).open())
            await market.send("V:IDLE", 5)
            # until the gaps of each symbol are known, and the spare engine waits
            await asyncio.sleep(30)
            made = Desk(daemon, broker, topics, market, text, disks)
            await made.healthy()
            yield made
