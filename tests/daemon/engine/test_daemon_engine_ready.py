"""What the engine tells the gateway of the ready position of each version."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from daemon import protocol
from daemon.ages import Times
from daemon.api.messages import ReplyMetadata
from daemon.config.schema import Config, RecoveryConfig
from daemon.engine.confidence_metrics import Confidence
from daemon.engine.prompt_builder import PromptBuilder
from daemon.engine.ready_events import ReadyEvents
from daemon.engine.request_runner import RequestRunner
from flash.early_exit import ReadyToken
from flash.question import PreparedQuestion, Question
from flash.registry import Registry
from ingest.plane import TapeRecord
from ingest.rollup import SummedBar
from metrics.store import MetricStore
from scheduler.interfaces import Limits
from scheduler.tapes import TapeItem
from tests.kit.scheduler.fakes import one_by_one
from tests.kit.scheduler.harness import Harness

HEADER, RECORD = (3, 1, 4), (5, 6)
YES, NO = 70, 71


class World:
    """One session; ``rebuilding``: whether its bars are read again after a restart."""

    def __init__(
        self,
        tokens: tuple[int, ...] = HEADER,
        recovery: RecoveryConfig | None = None,
        rebuilding: Callable[[str], bool] = lambda session: False,
    ) -> None:
        self.h, self.told = Harness(), list[protocol.ReadyLogits]()
        self.tape = self.h.tape("A")
        store = MetricStore.local({"session": ["A"], "source": [], "sink": []})
        built: Any = SimpleNamespace(
            tapes={"A": self.tape},
            loaded=SimpleNamespace(name="m", untrained=True),
            engine=SimpleNamespace(frame_limit=1000),
            prompt=SimpleNamespace(decode=str, text=str, terse=None, longest_token=9),
        )
        registry = Registry(lambda question: PreparedQuestion((9, 9), (YES, NO), frozenset()))
        registry.register("A", Question("up", "Up?", ("YES", "NO")))
        requests = RequestRunner(
            Config(recovery=recovery or RecoveryConfig()),
            built,
            self.h.scheduler,
            PromptBuilder(built, Limits(), store),
            Confidence(Config(), cast(Any, built.prompt), None, store),
            lambda event: None,
            rebuilding,
        )
        told = cast(Any, self.told.append)
        self.events = ReadyEvents(built, self.h.scheduler, registry, requests, tokens, told)

    def feed(self) -> None:
        record = TapeRecord(RECORD, 40, 45, 50, 50, 0, 0, 0, 0, SummedBar(40, 1, 1, 1, 1, 0))
        self.h.scheduler.append((self.tape, [TapeItem(RECORD, record)]))

    def play(self) -> list[protocol.ReadyLogits]:
        """All that is told, once everything has run."""
        self.feed()
        self.h.run()
        return self.told


def test_each_version_is_told_with_its_logit_gap_and_the_answers_that_may_exit() -> None:
    world = World()
    for version in (1, 2):
        (row,) = one_by_one(RECORD * version, HEADER, 1, frozenset(), None)
        metadata = ReplyMetadata(
            session="A",
            data_version=version,
            uncalibrated="ready_exit",
            logit_gap=0.0,
            untrained=True,
            model="m",
            flags=("untrained",),
        )
        assert world.play()[-1] == protocol.ReadyLogits(
            "A", version, row.token, row.gap, {"YES": YES, "NO": NO}, metadata, Times(40, 45, 50, closed=50)
        )
    assert len(world.told) == 2


def test_an_older_version_and_a_removed_session_are_not_told() -> None:
    """Rows may end behind the commit of a newer version."""
    world = World()
    world.play()
    world.play()
    told = [each.version for each in world.told]
    world.events.on_ready("A", ReadyToken(1, YES, 9.0))
    world.events.on_ready("removed", ReadyToken(2, YES, 9.0))
    assert [each.version for each in world.told] == told == [1, 2]


def test_without_a_ready_position_nothing_runs_and_nothing_is_told() -> None:
    world = World(())
    assert world.play() == []
    assert len(world.h.executor.batches) == 1, "that of the bar"


@pytest.mark.parametrize(
    ("while_rebuilding", "flags"), [("warm_up", [("warm_up", "untrained")]), ("refuse", [])]
)
def test_bars_that_are_read_again_after_a_restart_are_told_as_they_are_answered(
    while_rebuilding: Any, flags: list[tuple[str, ...]]
) -> None:
    world = World(recovery=RecoveryConfig(while_rebuilding=while_rebuilding), rebuilding=lambda session: True)
    assert [each.metadata.flags for each in world.play()] == flags
