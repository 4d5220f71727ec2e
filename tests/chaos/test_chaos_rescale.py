"""A group grows from two daemons to five and shrinks to three, under load, and some of it goes wrong.

No record unanswered, no answer twice, the states of a run without moves, and every query answered. One seed
is one case: ``pytest tests/chaos -m long -k rescale-seed007`` runs it alone. How long each session was silent
at each hand-over is printed, and appended to the file that ``RESCALE_HAND_OVERS`` names;
``python -m tests.chaos.silences FILE`` sums it up. ``RESCALE_LOGS`` names a folder for the whole logs and
the answers of a case that fails.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import msgspec
import pytest

from feeds.kafka_client import quiet_client_log
from tests.chaos.checks import ahead, by_key, conflicts, different, gaps, key_of, repeats, unread
from tests.chaos.feed import TRADES, as_of
from tests.chaos.members import (
    AHEAD,
    AHEAD_OF_ALL,
    PACE_S,
    PARTITIONS,
    QUESTIONS,
    SETTLED_S,
    Asked,
    Members,
    symbols_of,
)
from tests.chaos.moves import FEW, LEFT, MANY, RUNS, HandOver, Rescale, draw, hand_overs, summary
from tests.chaos.reading import Published, offsets_in, read_to_end
from tests.kit import until, until_slowly
from tests.kit.daemon import committed
from tests.kit.kafka import KafkaServer
from tests.transactions.copying import hanging

pytestmark = pytest.mark.kafka
LONG, MANY_SESSIONS = 100, 300
AT_A_TIME = 5
"""Cases that daemons and topics serve before others take over: a topic is read whole after each."""


class Groups:
    """The group of the next case, and one daemon that reads the same feed and that nothing happens to."""

    def __init__(self, broker: KafkaServer, folder: Path, sessions: int, *, exactly_once: bool) -> None:
        self._broker, self._folder, self._sessions = broker, folder, symbols_of(sessions)
        self._exactly_once = exactly_once
        self._made: tuple[Members, Members] | None = None
        self._served = 0
        self.sent = 0
        """Bars that both have."""

    async def get(self) -> tuple[Members, Members]:
        if self._served >= AT_A_TIME:
            self.drop()
        if self._made is None:
            folder = self._folder / f"{self._served}"
            moving = Members(self._broker, folder / "a", self._sessions, exactly_once=self._exactly_once)
            still = Members(self._broker, folder / "b", self._sessions, exactly_once=False)
            self._made = moving, still
            await asyncio.gather(moving.create(), still.create())
            still.add()
            moving.add(FEW)
        self._served += 1
        return self._made

    def drop(self) -> None:
        """The next case gets others."""
        for each in self._made or ():
            each.close()
        self._made, self._served, self.sent = None, 0, 0


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaServer]:
    quiet_client_log()
    with KafkaServer() as running:
        yield running


@pytest.fixture(scope="module", params=[30], ids="{}sessions".format)
def groups(
    request: pytest.FixtureRequest, broker: KafkaServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Groups, Groups]]:
    folder = tmp_path_factory.mktemp("rescale")
    made = tuple(
        Groups(broker, folder / str(once), request.param, exactly_once=once) for once in (False, True)
    )
    yield made[0], made[1]
    for each in made:
        each.drop()


class Run:
    """One case: the feed and the clients go on while the group changes."""

    def __init__(self, groups: Groups, moving: Members, still: Members, seed: int) -> None:
        self._groups, self._moving, self._still = groups, moving, still
        self.asked, self._rng, self._ends = Asked(), Random(seed), False

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[None]:
        """Records come and clients ask within this block; at its end all is answered."""
        async with self._moving.clients(), self._still.clients():
            feeding = asyncio.create_task(self._feed())
            asking = asyncio.create_task(self._ask())
            try:
                yield
            finally:
                self._ends = True
                asking.cancel()
                ended = await asyncio.gather(feeding, asking, return_exceptions=True)
            assert [type(each) for each in ended] == [type(None), asyncio.CancelledError], ended
            for each in (self._moving, self._still):
                await each.answered(lambda: self._groups.sent - 2)

    async def _ask(self) -> None:
        """Once there is something to be asked."""
        reader = self._moving.reader
        assert reader is not None, "within `clients`"
        await until_slowly(lambda: reader.to() >= as_of(0), SETTLED_S, "the first answers")
        await self._moving.ask(self.asked, self._rng)

    async def _feed(self) -> None:
        groups, reader = self._groups, self._moving.reader
        assert reader is not None, "within `clients`"
        ahead = min(AHEAD, AHEAD_OF_ALL // len(self._moving.sessions))
        while not self._ends:
            await asyncio.gather(self._moving.send(groups.sent), self._still.send(groups.sent))
            groups.sent += 1
            await asyncio.sleep(PACE_S)
            old = as_of(groups.sent - ahead) if groups.sent > ahead else -1
            await until(lambda old=old: self._ends or reader.to() >= old, 600.0, "answers to what was sent")

    async def settled(self, count: int) -> None:
        """Wait until ``count`` daemons share the partitions, and all sessions are answered."""
        assert len(self._moving.daemons) == count
        await until_slowly(self._moving.all_hold, 240.0, f"{count} owners")
        await self._moving.answered(lambda: self._groups.sent)

    async def play(self, rescale: Rescale) -> None:
        moving = self._moving
        while len(moving.daemons) > FEW:
            await moving.leave(moving.daemons[0], kill=False)
        await self.settled(FEW)
        moving.begin("join", planned=True)
        moving.add(MANY - FEW)
        if rescale.phase == "growth":
            await self._strike(rescale)
        await self.settled(MANY)
        for number, leave in enumerate(rescale.leaves):
            leaving = asyncio.create_task(moving.leave(moving.daemons[-1], kill=leave == "kill"))
            await asyncio.sleep(0)
            if rescale.phase == "shrinking" and not number:
                await self._strike(rescale)
            await leaving
        await self.settled(LEFT)

    async def _strike(self, rescale: Rescale) -> None:
        await asyncio.sleep(rescale.delay_ms / 1000)
        moving = self._moving
        victim = moving.daemons[rescale.victim]
        match rescale.trouble:
            case "none":
                pass
            case "kill":
                await moving.leave(victim, kill=True)
                moving.add()
            case "hang":
                await moving.hang(victim, lambda: moving.answered(lambda: self._groups.sent))
            case "stop broker" | "kill broker":
                await moving.bounce_broker(kill=rescale.trouble == "kill broker")


def same_state(one: Published, other: Published) -> bool:
    """Whether both depend on the same bars: a window that was read again has forgotten older ones."""
    bases = one.answer.basis, other.answer.basis
    return None in bases or len({each.state_bars for each in bases if each is not None}) == 1


async def offsets_by_session(group: Members, until_ns: int, each_has: int) -> dict[str, list[int]]:
    """Where the records of a group's sessions are, before this event time."""
    written = await offsets_in(group.broker.bootstrap, group.trades, PARTITIONS, until_ns)
    found = {name: written[symbol] for name, symbol in group.sessions.items()}
    assert {len(offsets) for offsets in found.values()} == {each_has}, "the feed lost records"
    return found


async def found_wrong(moving: Members, still: Members, sent: int) -> tuple[list[str], list[Published]]:
    """What is wrong after ``sent`` bars, of which the last is open; and all answers of the moving group."""
    bootstrap, names = moving.broker.bootstrap, list(QUESTIONS)
    newest = as_of(sent - 2)
    offsets, of_still = [
        await offsets_by_session(group, newest + 1, TRADES * (sent - 1)) for group in (moving, still)
    ]
    open_for_ever = await asyncio.to_thread(hanging, moving.broker) if moving.exactly_once else []
    stored = await committed(bootstrap, moving.group, moving.trades, PARTITIONS)
    found = await read_to_end(bootstrap, moving.answers)
    reference = await read_to_end(bootstrap, still.answers)
    undisturbed = {key: each[0] for key, each in by_key(reference).items()}
    both = [each for each in found if key_of(each.answer) in undisturbed]
    last = {key_of(each.answer) for each in both}
    alike = [each for each in both if same_state(each, undisturbed[key_of(each.answer)])]
    problems = [
        *unread(reference, names, of_still),
        *repeats(reference, allowed=False),
        *unread(found, names, offsets),
        *repeats(found, allowed=not moving.exactly_once),
        *ahead(found, stored, names),
        *gaps(found),
        *conflicts(found),
        *different(alike, undisturbed),
        *(f"no last state: {s}, {q}" for s in offsets for q in names if (s, q, newest) not in last),
        *(f"a transaction hangs: {each}" for each in open_for_ever),
    ]
    return problems, found


def note(rescale: Rescale, made: list[HandOver]) -> None:
    """Append to the file that is asked for, a line each."""
    if path := os.environ.get("RESCALE_HAND_OVERS"):
        with Path(path).open("ab") as file:
            for each in made:
                file.write(msgspec.json.encode(each) + b"\n")


def keep_logs(moving: Members, rescale: Rescale) -> None:
    """Write the whole logs of daemons into the folder that is asked for."""
    if folder := os.environ.get("RESCALE_LOGS"):
        for number, each in enumerate([*moving.daemons, *moving.left]):
            Path(folder, f"seed{rescale.seed:03}-{number}.log").write_text(each.log)


def keep_answers(found: list[Published], rescale: Rescale) -> None:
    """Write all answers of a case beside them."""
    if folder := os.environ.get("RESCALE_LOGS"):
        Path(folder, f"seed{rescale.seed:03}-answers.jsonl").write_bytes(
            msgspec.json.Encoder().encode_lines(found)
        )


async def run(groups: tuple[Groups, Groups], rescale: Rescale) -> None:
    print(rescale)  # of a case that fails, or with -s
    mine = groups[rescale.exactly_once]
    moving, still = await mine.get()
    try:
        before, playing = len(moving.moves), Run(mine, moving, still, rescale.seed)
        async with playing.under_load():
            await playing.play(rescale)
        asked = playing.asked
        print(f"{asked.queries} queries, slowest {asked.slowest_s:.1f} s; failed: {dict(asked.refused)}")
        problems, found = await found_wrong(moving, still, mine.sent)
        made = hand_overs(found, moving.moves[before:])
        print(summary(made))
        note(rescale, made)
        if problems:
            keep_answers(found, rescale)
        assert not problems, "\n".join([str(rescale), *problems[:20]])
        assert not asked.unanswered
        fenced = [each for each in moving.exits if moving.exactly_once and "fenced" in each.lower()]
        assert moving.exits == fenced, "a daemon ended by itself:\n" + "\n".join(moving.exits)
    except BaseException as error:
        for each in moving.daemons:
            error.add_note(f"log of a daemon:\n{each.log[-3000:]}")
        keep_logs(moving, rescale)
        mine.drop()
        raise


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(RUNS), ids="rescale-seed{:03}".format)
async def test_a_group_that_grows_and_shrinks_loses_nothing(groups: tuple[Groups, Groups], seed: int) -> None:
    await run(groups, draw(seed))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(RUNS, RUNS + LONG), ids="rescale-seed{:03}".format)
@pytest.mark.parametrize("groups", [30, MANY_SESSIONS], ids="{}sessions".format, indirect=True)
async def test_groups_that_grow_and_shrink_lose_nothing(groups: tuple[Groups, Groups], seed: int) -> None:
    await run(groups, draw(seed))
