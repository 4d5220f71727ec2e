"""What a tenant may ask of which sessions: hidden ones are as unknown as absent ones, in the same words."""

import time
from functools import partial

import pytest
from msgspec.structs import replace

from daemon.api import messages
from daemon.api.zmq import Answering
from daemon.tenants import LOCAL, Client, Tenant
from tests.kit.gateway import queries

NAMES = ("btc", "eth", "eurusd")
DESK = Client(Tenant("desk", ("e*",)), "here")
HEAD = Client(Tenant("head", ("e*",), operator=True), "here")
QUESTION = {"name": "up", "text": "Up?"}
OF_A_SESSION = (
    lambda name: messages.Ask(1, name, "Up?"),
    lambda name: messages.Answers(1, name),
    lambda name: messages.ListQuestions(1, name),
    lambda name: messages.ShowPrompt(1, name),
)
OF_OPERATORS = (
    lambda name: messages.SetQuestion(1, name, **QUESTION),
    lambda name: messages.RemoveQuestion(1, name, "up"),
    lambda name: messages.ChangeSession(1, name, {}),
    lambda name: messages.RemoveSession(1, name),
    lambda name: messages.Label(1, name, "Up?", 1, "Yes"),
)


def info(name: str) -> messages.SessionInfo:
    return messages.SessionInfo(name, "X:A", 1, 1, 1, 1, 1, ())


class Rig:
    def __init__(self) -> None:
        self.asked: list[messages.ClientRequest] = []
        self.door = queries(self.begin, names=lambda: NAMES)

    def begin(self, request: messages.ClientRequest, client: Client) -> Answering:
        self.asked.append(request)
        reply = messages.SessionsReply(request.id, tuple(info(name) for name in NAMES))
        return reply if isinstance(request, messages.Ask) else partial(self.later, reply)

    async def later(self, reply: messages.Reply) -> messages.Reply:
        return reply

    async def ask(self, request: messages.ClientRequest, client: Client) -> messages.Reply:
        found = self.door.answer(request, client, time.monotonic_ns())
        found = await found() if callable(found) else found
        return replace(found, trace_id="") if hasattr(found, "trace_id") else found


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize("make", [*OF_A_SESSION, *OF_OPERATORS])
async def test_a_hidden_session_is_refused_as_an_absent_one(rig: Rig, make: object) -> None:
    for client in (HEAD, DESK):
        hidden, absent = [await rig.ask(make(name), client) for name in ("btc", "xyz")]  # type: ignore[operator]
        assert messages.encode(hidden).replace(b"btc", b"xyz") == messages.encode(absent)
        assert not rig.asked


@pytest.mark.parametrize("make", OF_A_SESSION)
async def test_what_a_tenant_sees_it_may_ask(rig: Rig, make: object) -> None:
    await rig.ask(make("eth"), DESK)  # type: ignore[operator]
    unknown = await rig.ask(make("btc"), DESK)  # type: ignore[operator]
    assert len(rig.asked) == 1
    assert unknown == messages.unknown_session("btc", ("eth", "eurusd")).reply(1)


@pytest.mark.parametrize("make", OF_OPERATORS)
async def test_what_others_see_is_changed_by_operators_only(rig: Rig, make: object) -> None:
    refused = await rig.ask(make("eth"), DESK)  # type: ignore[operator]
    assert isinstance(refused, messages.ErrorReply)
    assert refused.code == "forbidden"
    await rig.ask(make("eth"), HEAD)  # type: ignore[operator]
    assert len(rig.asked) == 1


async def test_a_list_has_what_the_tenant_sees(rig: Rig) -> None:
    for client, names in ((DESK, ["eth", "eurusd"]), (Client(LOCAL, "here"), list(NAMES))):
        listed = await rig.ask(messages.ListSessions(1), client)
        assert isinstance(listed, messages.SessionsReply)
        assert [each.name for each in listed.sessions] == names


async def test_an_operator_opens_sessions_that_it_then_sees(rig: Rig) -> None:
    taken, absent = [
        await rig.ask(messages.AddSession(1, {"name": name, "symbol": "X:A"}), HEAD)
        for name in ("btc", "xyz")
    ]
    assert messages.encode(taken).replace(b"btc", b"xyz") == messages.encode(absent)
    assert not rig.asked
    await rig.ask(messages.AddSession(1, {"name": "eth-2", "symbol": "X:A"}), HEAD)
    assert len(rig.asked) == 1


async def test_what_is_there_is_given_at_once_and_so_is_a_refusal(rig: Rig) -> None:
    for name, client in (("btc", DESK), ("xyz", DESK), ("eth", DESK), ("btc", Client(LOCAL, "here"))):
        found = rig.door.answer(messages.Ask(1, name, "Up?"), client, 0)
        given = name == "eth" or client.tenant is LOCAL
        assert isinstance(found, messages.SessionsReply if given else messages.ErrorReply)
        assert bool(rig.asked) == given
        rig.asked.clear()
