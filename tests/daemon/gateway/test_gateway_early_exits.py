"""Asks that exit early in the gateway, from the ready position of their session's newest version."""

import time
from functools import partial

import msgspec
import pytest

from daemon import protocol
from daemon.ages import Times
from daemon.api.messages import Ask, AskReply, QueryError, ReplyMetadata
from daemon.config.schema import ModelConfig
from daemon.gateway.answer_cache import tier_of
from daemon.tenants import LOCAL, Client
from flash.question import PAPER_SIX
from tests.kit import START
from tests.kit.gateway import GenerationsRig

HERE = Client(LOCAL, "")
YES, NO, UP = 5, 6, 7
FAST = {"YES": YES, "NO": NO, "UP": UP}
TAU = 2.0
NEWEST = Times(START + 4, 0, 0)
ASK = partial(Ask, id=7, session="aaa", question="Is it quiet?", choices=("NO", "YES"))
QUESTION = PAPER_SIX[1]


def ready(version: int = 4, token: int = YES, gap: float = 2.5, **more: object) -> protocol.ReadyLogits:
    """As the engine tells it."""
    metadata = ReplyMetadata(
        session="aaa", data_version=version, logit_gap=0.0, untrained=True, model="m", flags=("untrained",)
    )
    told = protocol.ReadyLogits("aaa", version, token, gap, FAST, metadata, NEWEST)
    return msgspec.structs.replace(told, **more)


class Rig(GenerationsRig):
    """A session at version 4, read by a model of words."""

    def __init__(self, tau: float = TAU, told: protocol.ReadyLogits | None = None) -> None:
        super().__init__("aaa", "bbb", early_exit=tau)
        for state in self.sessions.states.values():
            state.model = ModelConfig(path="a model of words")
        self.commit(4)
        self.generations.exits.on_ready(told or ready())

    def commit(self, version: int, times: Times = NEWEST) -> None:
        inputs = protocol.VersionInputs()
        self.sessions.committed(protocol.Committed("aaa", version, 1, 40, 1, times, inputs))

    def exited(self, ask: Ask) -> AskReply | None:
        """The reply at once, if there is one."""
        found = self.generations.ask(ask, HERE)
        return None if callable(found) else found


def test_a_sure_choice_is_answered_at_once_and_the_engine_hears_nothing_of_it() -> None:
    rig = Rig()
    found = rig.exited(ASK())
    assert found is not None
    assert (found.id, found.text, found.choice, found.logit_gap, found.data_version) == (
        7,
        "YES",
        "YES",
        2.5,
        4,
    )
    assert (found.flags, found.model, found.untrained) == (("untrained", "ready_exit"), "m", True)
    assert (found.as_of, found.cached, tier_of(found)) == (START + 4, False, "ready")
    assert not rig.sent


def test_a_standing_question_exits_where_its_ready_answer_is_too_old() -> None:
    """It has none; the choices are its own."""
    rig = Rig()
    found = rig.exited(Ask(1, "aaa", QUESTION.name, max_age_s=0.0))
    assert found is not None
    assert (found.choice, found.flags[-1]) == ("YES", "ready_exit")
    assert rig.exited(Ask(1, "aaa", QUESTION.name, early_exit=0.0)) is None


@pytest.mark.parametrize(
    ("tau", "told", "ask"),
    [
        (0.0, ready(), ASK()),
        (TAU, ready(gap=TAU), ASK()),
        (TAU, ready(token=UP), ASK()),
        (TAU, ready(version=3), ASK()),
        (TAU, ready(times=Times(START + 4, 0, 1)), ASK()),
        (TAU, ready(), ASK(choices=())),
        (TAU, ready(), ASK(choices=("YES", "MAYBE"))),
        (TAU, ready(), ASK(early_exit=0.0)),
        (TAU, ready(), ASK(early_exit=2.5)),
        (TAU, ready(), ASK(session="bbb")),
    ],
    ids=[
        "off", "not above tau", "no choice of the ask", "an older version", "another engine's version",
        "no choices", "no fast answer", "turned off by the ask", "the ask's own tau", "another session",
    ],
)  # fmt: skip
def test_every_other_ask_is_computed(tau: float, told: protocol.ReadyLogits, ask: Ask) -> None:
    assert Rig(tau, told).exited(ask) is None


def test_an_ask_may_lower_the_gap() -> None:
    assert Rig(9.0).exited(ASK()) is None
    assert Rig(9.0).exited(ASK(early_exit=1.0)) is not None


def test_a_newer_version_is_not_answered_from_an_older_one_s_logits() -> None:
    rig = Rig()
    newer = Times(START + 5, 0, 1)
    rig.commit(5, newer)
    assert rig.exited(ASK()) is None
    rig.generations.exits.on_ready(ready(5, NO, times=newer))
    found = rig.exited(ASK())
    assert found is not None
    assert (found.choice, found.data_version) == ("NO", 5)


def test_the_version_of_another_engine_that_has_the_same_number_is_another_one() -> None:
    rig = Rig()
    rig.commit(3, Times(START + 3, 0, 8))
    rig.commit(4, Times(START + 4, 0, 9))
    assert rig.exited(ASK()) is None


def test_a_tape_model_answers_no_question_but_its_own() -> None:
    rig = Rig()
    rig.sessions.states["aaa"].model = ModelConfig()
    assert rig.exited(ASK()) is None
    found = rig.exited(ASK(question="volatility"))
    assert found is not None
    assert found.choice == "YES"


def test_a_reply_has_the_flags_of_its_moment() -> None:
    rig = Rig()
    rig.sessions.states["aaa"].stale_after_ns = 1
    old = Times(START, time.time_ns() - 10**9, time.monotonic_ns() - 10**9, replay=True)
    rig.commit(4, old)
    rig.generations.exits.on_ready(ready(times=old))
    found = rig.exited(ASK())
    assert found is not None
    assert found.flags == ("untrained", "ready_exit", "stale")
    assert found.staleness_ns >= 10**9


def test_there_is_no_answer_while_trading_is_halted() -> None:
    rig = Rig()
    rig.sessions.halt("aaa", True)
    with pytest.raises(QueryError) as refused:
        rig.exited(ASK())
    assert refused.value.code == "halted"


def test_what_is_not_open_here_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.sessions, "is_open", lambda session: False)
    assert rig.exited(ASK()) is None


def test_what_cannot_be_asked_is_refused_as_before() -> None:
    rig = Rig()
    with pytest.raises(QueryError) as refused:
        rig.exited(ASK(choices=("YES",)))
    assert refused.value.code == "bad_request"


def test_removed_sessions_are_forgotten() -> None:
    rig = Rig()
    exits = rig.generations.exits
    for n in range(50):
        exits.on_ready(msgspec.structs.replace(ready(), session=f"gone-{n}"))
    assert len(exits._newest) <= len(rig.sessions.states) + 1
    assert rig.exited(ASK()) is not None
