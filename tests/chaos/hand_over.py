"""`python -m tests.chaos.hand_over 30 300`: how long sessions are silent when their partitions change hands.

A group's feed is one bar of each session every `PACE_S`, evenly spread, so the machine is not over its
capacity. Daemons join, are terminated and are killed, in turn. Beside them, a group of bare aiokafka
consumers reads the same records in the same moves: what a plain rebalance costs before anything is restored.
A silence is the time between two answers (of the bare group: records) of a session, less the usual time.
"""

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from statistics import median

from aiokafka.partitioner import DefaultPartitioner

from feeds.kafka_client import quiet_client_log
from tests.chaos.feed import as_of
from tests.chaos.members import Members, symbols_of
from tests.chaos.moves import Move
from tests.chaos.reading import read_to_end
from tests.kit import until_slowly
from tests.kit.kafka import KafkaServer

PACE_S = {30: 1.0, 300: 6.0}
"""From a session's bar to its next, by sessions."""
ROUNDS = 2
SETTLE_S = 8.0
"""From the end of a move to the next one."""

Times = Mapping[str, Mapping[int, int]]
"""By session and event time: when its answer came, wall clock ns."""


@dataclass(frozen=True)
class Silence:
    """Of a session in one move. ``moved``: its owner changed."""

    why: str
    moved: bool
    seconds: float


def silences(times: Times, moves: Sequence[Move], owners: Sequence[Mapping[str, object]]) -> list[Silence]:
    """The longest of each session in each move; ``owners``: before the first one, and after each."""
    ends = [each.began_ns for each in moves[1:]] + [sys.maxsize]
    made = []
    for session, by_time in times.items():
        steps = list(pairwise(at for _, at in sorted(by_time.items())))
        usual = median(after - before for before, after in steps)
        for move, end_ns, (old, new) in zip(moves, ends, pairwise(owners), strict=True):
            longest = max((b - a for a, b in steps if move.began_ns <= b < end_ns), default=0)
            moved = old[session] != new[session]
            made.append(Silence(move.why, moved, max(0.0, longest - usual) / 1e9))
    return made


def is_last(event: int) -> bool:
    """Whether a record of this time (ns) is the last one of its bar."""
    return (event - as_of(0)) % 10**9 == 0


class Spread:
    """The feed: each bar's records are sent evenly over `PACE_S`."""

    def __init__(self, members: Members, pace_s: float) -> None:
        self._members, self._pace_s = members, pace_s
        self.sent = 0
        """Bars that all sessions have."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        feeding = asyncio.create_task(self._feed())
        try:
            yield
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _feed(self) -> None:
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        sessions = list(self._members.sessions.items())
        while True:
            for number, (name, symbol) in enumerate(sessions):
                due = began + self._pace_s * (self.sent + number / len(sessions))
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self._members.send(self.sent, {name: symbol})
            self.sent += 1


@dataclass
class Bare:
    """The group beside it. Its members are in the same order."""

    topic: str
    bootstrap: str
    folder: Path
    members: list[subprocess.Popen[bytes]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def add(self, count: int = 1) -> None:
        for _ in range(count):
            self.files.append(self.folder / str(len(self.files)))
            self.files[-1].touch()
            arguments = [self.bootstrap, self.topic, f"bare-{self.topic}", str(self.files[-1])]
            command = [sys.executable, "-m", "tests.chaos.bare_member", *arguments]
            self.members.append(subprocess.Popen(command))

    def leave(self, number: signal.Signals) -> None:
        """The oldest one."""
        member = self.members.pop(0)
        member.send_signal(number)
        member.wait(30)

    def close(self) -> None:
        for each in self.members:
            each.kill()
            each.wait(30)

    def read(self) -> Iterator[tuple[Path, str, int, int]]:
        """Who read the last record of which symbol's which bar (event time), and when, ns."""
        for file in self.files:
            for line in file.read_text().splitlines():
                symbol, event, at = line.split()
                if is_last(int(event)):
                    yield file, symbol, int(event), int(at)

    def times(self) -> Times:
        """By symbol."""
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for _, symbol, event, at in self.read():
            found[symbol][event] = min(at, found[symbol].get(event, at))
        return found

    def owners(self) -> dict[str, object]:
        """Of each symbol, by its newest record."""
        newest: dict[str, tuple[int, Path]] = {}
        for file, symbol, _, at in self.read():
            newest[symbol] = max((at, file), newest.get(symbol, (0, file)))
        return {symbol: file for symbol, (_, file) in newest.items()}


def owners_of(members: Members) -> dict[str, object]:
    """Of each session."""
    every = list(range(members.partitions))
    by_partition = {
        int(partition): daemon
        for daemon in members.daemons
        for partition in re.findall(
            r'^foretick_consumer_lag_records{partition="[^"]*/(\d+)"', daemon.get("/metrics")[1], re.M
        )
    }
    return {
        name: by_partition.get(DefaultPartitioner()(symbol.encode(), every, every))
        for name, symbol in members.sessions.items()
    }


@dataclass
class Played:
    """The moves, and the owners before the first one and after each, of both groups."""

    moves: list[Move] = field(default_factory=list)
    owners: list[dict[str, object]] = field(default_factory=list)
    of_bare: list[dict[str, object]] = field(default_factory=list)


async def play(members: Members, bare: Bare, feed: Spread) -> Played:
    """All moves; daemons and consumers that change are started and ended together."""
    played = Played()

    async def settled() -> None:
        await until_slowly(members.all_hold, 240.0, "owners")
        await asyncio.sleep(SETTLE_S)
        behind = feed.sent
        await members.answered(lambda: behind)
        played.owners.append(await asyncio.to_thread(owners_of, members))
        played.of_bare.append(await asyncio.to_thread(bare.owners))

    await settled()
    for _ in range(ROUNDS):
        for kill in (False, True):
            members.begin("join", planned=True)
            members.add()
            bare.add()
            await settled()
            leaving = asyncio.create_task(members.leave(members.daemons[0], kill=kill))
            await asyncio.sleep(0)
            await asyncio.to_thread(bare.leave, signal.SIGKILL if kill else signal.SIGTERM)
            await leaving
            await settled()
    played.moves = members.moves
    return played


async def measure(broker: KafkaServer, folder: Path, sessions: int, *, snapshots: bool) -> None:
    """Measure one group and print its rows."""
    symbols = symbols_of(sessions)
    members = Members(broker, folder / "daemons", symbols, exactly_once=False, snapshots=snapshots)
    await members.create()
    (folder / "bare").mkdir(parents=True)
    bare = Bare(members.trades, broker.bootstrap, folder / "bare")
    try:
        async with members.clients():
            feed = Spread(members, PACE_S[sessions])
            async with feed.running():
                members.add(2)
                bare.add(2)
                await until_slowly(lambda: feed.sent > 3, 120.0, "bars")
                await until_slowly(members.all_hold, 240.0, "owners")
                played = await play(members, bare, feed)
    finally:
        members.close()
        bare.close()
    times: dict[str, dict[int, int]] = defaultdict(dict)
    for each in await read_to_end(broker.bootstrap, members.answers):
        times[each.answer.session].setdefault(each.answer.as_of, each.answer.published_at)
    ours = silences(times, played.moves, played.owners)
    theirs = silences(bare.times(), played.moves, played.of_bare)
    origin = "snapshots" if snapshots else "the log"
    for why, moved in product(("join", "terminate", "kill"), (True, False)):
        print(f"{sessions} sessions, from {origin}, {why}, those that {'moved' if moved else 'stayed'}:")
        for name, found in (("foretick", ours), ("bare", theirs)):
            seconds = [each.seconds for each in found if (each.why, each.moved) == (why, moved)]
            print(f"  {name}: {summary(seconds)}", flush=True)


def summary(seconds: Iterable[float]) -> str:
    """How many, P50, P99 and the worst."""
    ordered = sorted(seconds)
    if not ordered:
        return "none"
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99, 1.0)]
    return f"n {len(ordered)}, P50 {at[0]:.2f} s, P99 {at[1]:.2f} s, worst {at[2]:.2f} s"


async def main(counts: Sequence[int]) -> None:
    quiet_client_log()
    with KafkaServer() as broker, tempfile.TemporaryDirectory() as folder:
        for sessions in counts:
            for snapshots in (True, False):
                await measure(broker, Path(folder, f"{sessions}{snapshots}"), sessions, snapshots=snapshots)


if __name__ == "__main__":
    asyncio.run(main([int(each) for each in sys.argv[1:]]))
