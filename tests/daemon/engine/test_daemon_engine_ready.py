"""Asks that exit early, from the ready position of the newest version."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from daemon import protocol
from daemon.ages import Times
from daemon.api.generation import Finished, Generate, Turn
from daemon.api.messages import ReplyMetadata
from daemon.config.schema import Config, FlashConfig
from daemon.engine.confidence_metrics import Confidence
from daemon.engine.prompt_builder import PromptBuilder
from daemon.engine.request_runner import RequestRunner
from flash.question import PreparedQuestion
from flash.ready import ReadyPosition
from ingest.plane import TapeRecord
from ingest.rollup import SummedBar
from metrics.store import MetricStore
from scheduler.interfaces import Limits
from scheduler.tapes import TapeItem
from tests.kit.scheduler.fakes import one_by_one
from tests.kit.scheduler.harness import Harness

HEADER, RECORD = (3, 1, 4), (5, 6)
FAVOURITE = one_by_one(RECORD, HEADER, 1, frozenset(), None)[0]
OTHER = FAVOURITE.token + 1


def question(choices: tuple[str, ...] = ("YES", "NO"), early_exit: float | None = None) -> Generate:
    """An ask, as the gateway sends it."""
    turns = (Turn("user", "Up?"),)
    return Generate(
        id=7, session="A", turns=turns, choices=choices, max_tokens=8, exact=True, early_exit=early_exit
    )


ASK = question()


class World:
    """One session with one version; the first choice is what the model favours at the ready position."""

    def __init__(self, tau: float, favourite: int = FAVOURITE.token) -> None:
        self.h, self.replies = Harness(), list[protocol.EngineEvent]()
        self.tape = self.h.tape("A")
        tokens = (favourite, OTHER)
        built = SimpleNamespace(
            tapes={"A": self.tape},
            prepare=lambda question: PreparedQuestion(
                (9, 9), tokens if question.choices else None, frozenset()
            ),
            loaded=SimpleNamespace(name="m", untrained=True),
            engine=SimpleNamespace(frame_limit=1000),
            prompt=SimpleNamespace(decode=str, text=str, terse=None, longest_token=9),
        )
        ready = ReadyPosition(self.h.scheduler, HEADER)
        store = MetricStore.local({"session": ["A"], "source": [], "sink": []})
        confidence = Confidence(Config(), cast(Any, built.prompt), None, store)
        self.generations = RequestRunner(
            Config(flash=FlashConfig(early_exit=tau)),
            cast(Any, built),
            self.h.scheduler,
            PromptBuilder(cast(Any, built), Limits(), store),
            confidence,
            self.replies.append,
            lambda session: False,
            ready,
        )
        self.feed()
        self.h.run()

    def feed(self) -> None:
        record = TapeRecord(RECORD, 40, 45, 50, 50, 0, 0, 0, 0, SummedBar(40, 1, 1, 1, 1, 0))
        self.h.scheduler.append((self.tape, [TapeItem(RECORD, record)]))

    def ask(self, ask: Generate = ASK) -> Finished:
        """The reply, whether it came at once or after passes."""
        self.generations.generate((ask,))
        self.h.run()
        event = self.replies.pop()
        assert isinstance(event, Finished)
        assert event.times == Times(40, 45, 50, closed=50)
        assert not self.replies
        return event


def test_a_sure_choice_is_answered_at_once_and_says_what_it_is() -> None:
    world = World(FAVOURITE.gap / 2)
    batches = len(world.h.executor.batches)
    done = world.ask()
    assert (done.id, done.text, done.computed_tokens) == (7, "YES", 0)
    assert done.metadata == ReplyMetadata(
        session="A",
        data_version=1,
        choice="YES",
        logit_gap=FAVOURITE.gap,
        untrained=True,
        model="m",
        flags=("untrained", "ready_exit"),
    )
    assert len(world.h.executor.batches) == batches, "no forward pass"


@pytest.mark.parametrize(
    ("world", "ask"),
    [
        (World(0.0), ASK),
        (World(FAVOURITE.gap), ASK),
        (World(FAVOURITE.gap / 2, FAVOURITE.token + 2), ASK),
        (World(FAVOURITE.gap / 2), question(choices=())),
        (World(FAVOURITE.gap / 2), question(early_exit=0.0)),
        (World(FAVOURITE.gap / 2), question(early_exit=FAVOURITE.gap)),
    ],
    ids=["off", "not above tau", "no choice of the ask", "no choices", "turned off by the ask", "its tau"],
)
def test_every_other_ask_is_computed(world: World, ask: Generate) -> None:
    batches = len(world.h.executor.batches)
    assert world.ask(ask).metadata.flags == ("untrained",)
    assert len(world.h.executor.batches) > batches


def test_an_older_version_s_result_answers_no_ask() -> None:
    world = World(FAVOURITE.gap / 2)
    world.feed()
    world.h.scheduler.step()
    assert world.tape.version == 2
    reply = world.ask()
    assert (reply.metadata.data_version, reply.metadata.flags) == (2, ("untrained",))
