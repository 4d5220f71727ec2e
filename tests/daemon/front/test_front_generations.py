"""The front's generations: limits, what is charged and kept, and what ends without a place in the room."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import msgspec
import pytest

from daemon import protocol
from daemon.api.access import Access
from daemon.api.generation import (
    Begun,
    CountTokens,
    Delta,
    Event,
    Facts,
    Finished,
    Generate,
    GenerationFailed,
    TokensCounted,
    Turn,
)
from daemon.api.messages import QueryError
from daemon.config.tenants import TenantTable
from daemon.front.generations import Generations
from daemon.front.room import Room
from daemon.front.sessions import Sessions
from daemon.tenants import LOCAL, Client, Tenants
from metrics.store import MetricStore
from tests.e2e.support import inproc_config, until

ME = Client(LOCAL, "me")


class Rig:
    """Generations, and the commands that reach the engine over the wire."""

    def __init__(self, access: Access | None = None, max_wait_s: float = 5.0) -> None:
        self.sent: list[protocol.Command] = []
        store = MetricStore.local({"session": ["aaa"], "source": ["test"], "sink": []})
        sessions = Sessions(inproc_config(["V:AAA"]), store, self._send)
        self.room = Room(4, 4)
        self.generations = Generations(
            sessions, self._send, self.room, access or Access(), max_wait_s=max_wait_s
        )
        self.generations.ready(protocol.Ready("tape", "0123", True, "cpu", 10))

    def _send(self, command: protocol.Command) -> None:
        self.sent.append(msgspec.msgpack.decode(protocol.encode(command)))

    async def all(self, *requests: Generate, client: Client = ME) -> list[tuple[int, Event]]:
        return [event async for event in self.generations.run(requests, client)]


@pytest.fixture
async def rig() -> Rig:
    return Rig()


def nested(depth: int) -> dict[str, Any]:
    return functools.reduce(lambda inner, _: {"properties": {"a": inner}}, range(depth), {})


@pytest.mark.parametrize(
    "members",
    [
        {"schema": {"enum": [2**64]}},
        {"schema": {"enum": [-(2**70)]}, "temperature": 1.0},
        {"schema": nested(2000)},
        {"tokens": (2**64,)},
    ],
)
async def test_schemas_that_no_message_holds_are_refused_and_take_no_place(
    rig: Rig, members: dict[str, Any]
) -> None:
    with pytest.raises(QueryError, match="64 bits") as refused:
        await rig.all(Generate(text="x"), Generate(text="x", **members))
    assert (refused.value.code, len(rig.room), len(rig.generations)) == ("bad_request", 0, 0)
    assert not rig.generations._open


def finished(number: int, **members: Any) -> Finished:
    done = {"prompt_tokens": 5, "reused_tokens": 2, "answer_tokens": 3, "facts": Facts()} | members
    return Finished(id=number, text="Up we go", finish="length", stop=None, **done)


async def test_a_response_is_kept_by_a_short_key_unless_it_has_log_probabilities(rig: Rig) -> None:
    asked = Generate(text="x" * 10_000)
    for request in (asked, asked, msgspec.structs.replace(asked, top_logprobs=0)):
        for _ in range(2):
            running = asyncio.ensure_future(rig.all(request))
            await asyncio.sleep(0)
            for number in list(rig.generations._open):
                rig.generations.heard(finished(number))
            assert (await running)[-1][1].text == "Up we go"
    assert [each["type"] for each in rig.sent] == ["generate_all"] * 3
    (keys,) = rig.generations._responses._owned.values()
    assert [len(key) for key in keys] == [32]


class Counted(Access):
    """Adds up what is charged."""

    charged = 0

    def charge(self, client: Client, tokens: int) -> None:
        self.charged += tokens


async def test_tokens_that_are_not_shown_are_signs_of_life_and_charged() -> None:
    access = Counted()
    rig = Rig(access, max_wait_s=0.2)
    running = asyncio.ensure_future(rig.all(Generate(text="x")))
    await until(lambda: rig.sent)
    rig.generations.heard(Begun(1, 5, 2))
    for n in range(4):
        await asyncio.sleep(0.1)
        rig.generations.heard(Delta(1, ""))
        assert (access.charged, running.done()) == (4 + n, False)
    rig.generations.heard(finished(1, answer_tokens=5))
    assert [type(event) for _, event in await running] == [Begun, Finished]
    assert access.charged == 3 + 5
    with pytest.raises(QueryError, match="no token within"):
        await rig.all(Generate(text="y"))


async def test_a_client_that_leaves_pays_for_what_was_computed() -> None:
    access = Counted()
    rig = Rig(access)
    running = asyncio.ensure_future(rig.all(Generate(text="x"), Generate(text="y")))
    await until(lambda: rig.sent)
    rig.generations.heard(Begun(1, 5, 2))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [each["type"] for each in rig.sent[1:]] == ["cancel_generation"] * 2
    assert (access.charged, len(rig.room)) == (3, 0)
    rig.generations.heard(Delta(1, ""))
    rig.generations.heard(GenerationFailed(1, "cancelled", "the request was cancelled"))
    rig.generations.heard(GenerationFailed(2, "cancelled", "the request was cancelled", 4))
    assert (access.charged, len(rig.generations._open)) == (3 + 1 + 4, 0)


COUNT = CountTokens(turns=(Turn("user", "Up?"),))


async def test_counting_takes_a_place_until_the_reply_or_the_client_is_gone(rig: Rig) -> None:
    counting = [asyncio.ensure_future(rig.generations.count(COUNT, ME)) for _ in range(4)]
    await until(lambda: len(rig.sent) == 4)
    with pytest.raises(QueryError, match="4 prompts") as busy:
        await rig.generations.count(COUNT, ME)
    assert (busy.value.code, len(rig.room)) == ("busy", 4)
    rig.generations.heard(TokensCounted(1, 7))
    assert await counting[0] == 7
    for each in counting[1:]:
        each.cancel()
    await asyncio.gather(*counting, return_exceptions=True)
    assert (len(rig.room), len(rig.generations), len(rig.generations._open)) == (0, 0, 0)


async def test_a_tenant_without_tokens_counts_none() -> None:
    tenants = Tenants((TenantTable("desk", api_keys=("0" * 64,), tokens_per_minute=10),))
    access = Access(tenants)
    rig, desk = Rig(access), Client(tenants.named("desk"), "me")
    access.charge(desk, 20)
    with pytest.raises(QueryError, match="10 tokens a minute"):
        await rig.generations.count(COUNT, desk)
    assert (rig.sent, len(rig.room)) == ([], 0)
