"""A daemon joins and takes partitions over warm, another one hands its own over as it stops, under load."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from math import log
from pathlib import Path

import pytest
from msgspec.structs import replace

from daemon.api.client import AsyncQueryClient
from daemon.api.messages import Answers, AnswersReply, Reply
from daemon.audit.completeness import Audit
from daemon.config.schema import Config, FlashConfig, ModelConfig, QuestionConfig
from daemon.gateway.gateway import Gateway
from engine.model.revision import CALIBRATION, revision_of
from feeds.market_data import Answer
from flash.confidence import COVERAGE, AdaptiveCoverage, Calibration, QuestionCalibration, write_calibration
from flash.learnt_calibration import LEAST
from flash.question import PAPER_SIX
from tests.e2e.test_e2e_group import Group, grouped
from tests.kit import SECOND, START, tolerance, trade, until
from tests.kit.daemon import SYMBOLS
from tests.kit.fixtures import RealKafka
from tests.kit.models import terse_directory

pytestmark = pytest.mark.kafka


class DynamicGroup(Group):
    """Members without a name: one that stops leaves the group."""

    def config(self, member: str, **query: object) -> Config:
        found = super().config(member, **query)
        source = replace(found.source, kafka=replace(found.source.kafka, instance=""))
        return replace(found, source=source)

    @asynccontextmanager
    async def market(self) -> AsyncIterator[None]:
        """Trades a second of event time after the other."""

        async def play() -> None:
            while True:
                await self.trade(1)
                await asyncio.sleep(0.1)

        playing = asyncio.create_task(play())
        try:
            yield
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    def silence(self, session: str) -> float:
        """Longest time between two versions' answers, s."""
        times = sorted({answer.published_at for answer in self.published if answer.session == session})
        return max((after - before for before, after in pairwise(times)), default=0) / SECOND


@pytest.fixture(params=["at_least_once", "exactly_once"])
async def group(
    request: pytest.FixtureRequest, real_kafka: RealKafka, tmp_path: Path
) -> AsyncIterator[DynamicGroup]:
    async with grouped(DynamicGroup(real_kafka, tmp_path, request.param)) as made:
        yield made


@asynccontextmanager
async def asking(*daemons: Gateway) -> AsyncIterator[Callable[[], int]]:
    """Each daemon is asked about each session, over and over; yields the number of replies. None may fail."""
    names = [session.name for session in daemons[0].config.sessions]
    replies: list[Reply] = []

    async def ask(daemon: Gateway) -> None:
        assert daemon.query is not None
        async with AsyncQueryClient(daemon.query.endpoint) as client:
            while True:
                for name in names:
                    replies.append(await client.request(Answers(len(replies) + 1, name)))
                await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(ask(each)) for each in daemons]
    try:
        yield lambda: len(replies)
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended
    assert [each for each in replies if not isinstance(each, AnswersReply)] == []


@pytest.mark.sampled(1)
@pytest.mark.timeout(400)
async def test_partitions_move_warm_when_a_daemon_joins_and_when_one_stops(
    group: DynamicGroup,
) -> None:
    first = await group.join("one")
    await group.trade(5)
    await group.answered()
    names = [session.name for session in first.config.sessions]
    async with group.market():
        async with asking(first):
            second = await group.join("two")
            await group.shared()
        async with asking(first, second) as asked:
            assert second.store.value("foretick_hand_overs_total", kind="planned") == 1
            assert second.store.value("foretick_hand_overs_total", kind="unplanned") == 0
            theirs = next(name for name in names if second.input.owner(name) is None)
            assert second.store.value("foretick_snapshots_restored_total", session=theirs) >= 1
            before = asked()
            await until(lambda: asked() > before + 40, 60.0, "replies")
        async with asking(second):
            await first.stop()
            await until(lambda: all(second.input.reads(name) for name in names))
            assert second.store.value("foretick_hand_overs_total", kind="planned") == 2
    await group.trade(3)
    await group.answered()
    audit = Audit(whole=True)
    for answer in group.published:
        audit.take(answer)
    for name in names:  # a figure to look at, which depends on the machine
        print(f"{group.delivery} {name}: silent for {group.silence(name):.2f} s at most")
    assert {each.session for each in audit.result()} == set(names)
    for each in audit.result():
        assert each.holds(exactly_once=group.delivery == "exactly_once"), each


FITTED = QuestionCalibration(
    name="trend",
    text="Is the last close above or below the close ten bars before it?",
    choices=["UP", "DOWN"],
    temperature=2.0,
    scores=[n / 200 for n in range(1, 200)],
    labels=2000,
    mean_gap=1.0,
)
TREND, VOLUME = (
    QuestionConfig(each.name, each.text, each.choices or ())
    for each in PAPER_SIX
    if each.name in (FITTED.name, "volume")
)


class LabelledGroup(DynamicGroup):
    """Every bar is answered; ``trend`` has a calibration, ``volume`` has none."""

    def __init__(self, kafka: RealKafka, folder: Path, *, shares: bool) -> None:
        """``shares``: all daemons keep their snapshots in one directory."""
        super().__init__(kafka, folder / "snapshots")
        self.shares, self.model = shares, terse_directory(folder / "model")
        made = Calibration(model=revision_of(self.model), lines="compact", data={}, questions=[FITTED])
        write_calibration(self.model / CALIBRATION, made)

    def config(self, member: str, **query: object) -> Config:
        found = super().config(member, **query)
        recovery = found.recovery
        if not self.shares:
            recovery = replace(recovery, directory=f"{recovery.directory}-{member}")
        return replace(
            found,
            model=ModelConfig(path=str(self.model)),
            recovery=recovery,
            standing="none",
            questions=(TREND, VOLUME),
            flash=FlashConfig(every_bar=True),
        )

    async def trade(self, seconds: int) -> None:
        """Of ``aaa``, and first of both; returns when all bars of ``aaa`` that they close are answered."""
        for _ in range(seconds):
            n, self.seconds = self.seconds, self.seconds + 1
            for key in SYMBOLS.values() if n < 3 else (SYMBOLS["aaa"],):
                payload = trade(key, START + n * SECOND, f"{100 + n * n % 7 / 10:.2f}", f"{1 + n * 5 % 11}")
                await self.sink_of_market.publish(f"{self.name}.ticks", key.encode(), payload, {})
        questions = TREND.name, VOLUME.name
        await until(lambda: {len(self.of(each)) for each in questions} == {self.seconds - 1}, 240.0)

    def of(self, question: str) -> list[Answer]:
        """Its answers of ``aaa``, in order."""
        return [each for each in self.published if (each.session, each.question) == ("aaa", question)]


async def label(daemon: Gateway, *answers: Answer, right: str) -> float:
    """Tell a daemon what was ``right`` of all these; the coverage that it asks for from then on."""
    assert daemon.query is not None
    async with AsyncQueryClient(daemon.query.endpoint) as client:
        for answer in answers:
            reply = await client.label(answer.session, answer.question, answer.data_version, right)
    return reply.coverage


def temperature(answer: Answer) -> float:
    """By which its probability follows from its gap: of two choices, without curves."""
    assert answer.probability is not None
    return answer.logit_gap / log(answer.probability / (1 - answer.probability))


@pytest.mark.parametrize("shares", [True, False], ids=["one directory", "a directory each"])
@pytest.mark.timeout(400)
async def test_labels_outlast_a_hand_over_where_snapshots_are_shared(
    real_kafka: RealKafka, tmp_path: Path, shares: bool
) -> None:
    """Adapted coverage, and what was learnt of a question without a calibration."""
    async with grouped(LabelledGroup(real_kafka, tmp_path, shares=shares)) as group:
        first = await group.join("one")
        await group.trade(LEAST + 2)
        volume = group.of("volume")
        await label(first, *volume[0:LEAST:2], right="YES")
        await label(first, *volume[1:LEAST:2], right="NO")
        adapted = await label(first, *group.of("trend")[:30], right="UP")
        written = first.store.value("foretick_snapshots_written_total", session="aaa")
        await group.trade(2)
        learnt = group.of("volume")[-1]
        await until(lambda: first.store.value("foretick_snapshots_written_total", session="aaa") > written)

        second = await group.join("two")
        await group.shared()
        await first.stop()
        await until(lambda: second.input.reads("aaa") and second.input.reads("bbb"))
        await group.trade(2)
        trend, newest = group.of("trend")[-1], group.of("volume")[-1]
        shown = second.store.value("foretick_adapted_coverage", session="aaa")
        labelled = await label(second, trend, right=trend.choice or "")
    assert adapted != COVERAGE
    asked = adapted if shares else COVERAGE
    assert labelled == AdaptiveCoverage(COVERAGE, asked=asked).after(covered=True).asked
    assert shown == (adapted if shares else 0)
    assert learnt.probability is not None
    if shares:
        assert temperature(newest) == tolerance.near(temperature(learnt), 1e-6)
    else:
        assert (newest.probability, newest.uncalibrated) == (None, "not_calibrated")
