"""An ask that has been answered at a version is not computed again while it cannot come out otherwise."""

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from daemon import protocol
from daemon.ages import Times
from daemon.api.auth import Access
from daemon.api.generation import Finished, Generate, ModelEntry, Turn
from daemon.api.messages import Ask, AskReply
from daemon.gateway.answer_cache import tier_of
from daemon.tenants import LOCAL, Client, Tenant
from flash.question import Question
from tests.daemon.gateway.test_gateway_sessions import reply_to, times_of
from tests.kit import until
from tests.kit.gateway import GenerationsRig

HERE = Client(LOCAL, "")
ASK = partial(Ask, 7, "aaa", "Is it quiet?", choices=("NO", "YES"))
SIDE = Question("side", "Up or down?", ("UP", "DOWN"))
READY = protocol.EngineReady((ModelEntry("tape", "0123"),))


class Counted(Access):
    charged = 0

    def charge(self, client: Client, tokens: int, engine_ns: int = 0) -> None:
        self.charged += tokens


class Rig(GenerationsRig):
    """Session ``aaa`` at version 4, and what comes of the look-ups of kept replies."""

    def __init__(self) -> None:
        self.counted, self.revision, self.opened = list[str](), "0123", True
        super().__init__(
            "aaa",
            access=Counted(),
            counted=self.counted.append,
            model=lambda: protocol.EngineReady((ModelEntry("tape", self.revision),)),
        )
        self.sessions.is_open = lambda session: self.opened
        self.commit(4)

    def commit(self, version: int, times: Times | None = None) -> None:
        at = times or times_of(version, 60)
        inputs = protocol.VersionInputs()
        self.sessions.committed(protocol.Committed("aaa", version, 1, 40, 1, at, inputs))

    async def ask(self, request: Ask, client: Client = HERE, **metadata: object) -> AskReply | None:
        """What the engine computes, which has read the newest version; None for a reply without it."""
        found = self.generations.ask(request, client)
        if not callable(found):
            return None
        asking = asyncio.ensure_future(found())
        (sent,) = (await until(lambda: self.sent and self.sent.pop())).requests
        self.pending.on_event(self.reply(sent, **metadata))
        return await asking

    def reply(self, sent: Generate, **metadata: object) -> Finished:
        state = self.sessions.states["aaa"]
        done = reply_to(sent, "YES", "YES")
        found = msgspec.structs.replace(done.metadata, data_version=state.version, **metadata)
        return msgspec.structs.replace(done, metadata=found, times=state.times)

    def kept(self, request: Ask, client: Client = HERE) -> AskReply | None:
        found = self.generations.ask(request, client)
        return None if callable(found) else found


@pytest.fixture
async def rig() -> Rig:
    """Whose ask has been answered."""
    rig = Rig()
    assert await rig.ask(ASK()) is not None
    return rig


async def test_the_same_ask_at_the_same_version_gets_the_reply_again_which_says_so(rig: Rig) -> None:
    """It costs nothing, and has the ages and the flags of now."""
    charged = rig.access.charged
    rig.sessions.states["aaa"].stale_after_ns = 1
    found = rig.kept(msgspec.structs.replace(ASK(), id=8))
    assert found is not None
    assert (found.id, found.text, found.choice, found.logit_gap, found.data_version) == (
        8, "YES", "YES", 0.25, 4
    )  # fmt: skip
    assert (found.cached, tier_of(found), found.flags) == (
        True,
        "cached",
        ("untrained", "stale", "kept_reply"),
    )
    assert found.staleness_ns > 60 * 10**9
    assert rig.access.charged == charged
    assert (rig.sent, rig.counted) == ([], ["miss", "hit"])


OTHERS: dict[str, Callable[[Rig], object]] = {
    "a new version": lambda rig: rig.commit(5),
    "the number of another engine's version": lambda rig: rig.commit(4, times_of(4, 30)),
    "a window that was lost": lambda rig: rig.sessions.states["aaa"].invalidate(),
    "a label": lambda rig: rig.sessions.labelled(protocol.Labelled("aaa", "side", 3, "UP")),
    "another engine": lambda rig: rig.sessions.engine_ready(()),
    "another model": lambda rig: setattr(rig, "revision", "4567"),
    "other standing questions": lambda rig: rig.sessions.questions_set("aaa", [SIDE]),
    "other settings": lambda rig: rig.sessions.change(rig.config.sessions[0]),
    "a session that begins again": lambda rig: rig.sessions.add(rig.config.sessions[0], version=4),
    "a session that is not open": lambda rig: setattr(rig, "opened", False),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
async def test_what_may_change_the_answer_has_it_computed(rig: Rig, change: Callable[[Rig], object]) -> None:
    assert rig.kept(ASK()) is not None
    change(rig)
    assert rig.kept(ASK()) is None


@pytest.mark.parametrize(
    "members", [{"question": "Is it?"}, {"choices": ("YES", "NO")}, {"choices": ()}, {"max_tokens": 9}]
)
async def test_another_ask_is_computed(rig: Rig, members: dict[str, object]) -> None:
    assert rig.kept(msgspec.structs.replace(ASK(), **members)) is None
    assert rig.kept(ASK(), Client(Tenant("desk"), "")) is None


async def test_an_answer_that_came_after_a_change_is_not_kept_for_what_follows_it() -> None:
    rig = Rig()
    found = rig.generations.ask(ASK(), HERE)
    assert callable(found)
    asking = asyncio.ensure_future(found())
    (sent,) = (await until(lambda: rig.sent and rig.sent.pop())).requests
    rig.sessions.states["aaa"].invalidate()
    rig.pending.on_event(rig.reply(sent))
    await asking
    assert rig.kept(ASK()) is None


async def test_answers_while_bars_are_read_again_and_those_to_standing_questions_are_not_kept() -> None:
    """Their flag may go at an unchanged version; standing questions have their ready answers."""
    rig = Rig()
    rig.sessions.questions_set("aaa", [SIDE])
    for _ in range(2):
        assert await rig.ask(ASK(), flags=("warm_up",)) is not None
        assert await rig.ask(Ask(7, "aaa", SIDE.name, max_age_s=1.0)) is not None


@pytest.mark.parametrize("members", [{}, {"temperature": 1.0, "seed": 3}, {"scored": True, "meant": "Up?"}])
async def test_requests_of_every_api_are_kept(members: dict[str, object]) -> None:
    rig = Rig()
    turns = (Turn("system", "Be strict."), Turn("user", "Up?"))
    asked = Generate(session="aaa", turns=turns, choices=("YES", "NO"), **members)

    async def run(request: Generate) -> Finished:
        *_, (_, last) = [each async for each in rig.generations.run([request], HERE)]
        assert isinstance(last, Finished)
        return last

    running = asyncio.ensure_future(run(asked))
    (sent,) = (await until(lambda: rig.sent and rig.sent.pop())).requests
    rig.pending.on_event(msgspec.structs.replace(rig.reply(sent), scores=(0.0, -1.0)))
    first = await running
    again = await run(asked)
    assert (first.metadata.cached, again.metadata.cached, again.computed_tokens) == (False, True, 0)
    assert (again.text, again.scores, again.metadata.data_version) == (first.text, first.scores, 4)
    rig.commit(5)
    running = asyncio.ensure_future(run(asked))
    await until(lambda: rig.sent)
    running.cancel()
