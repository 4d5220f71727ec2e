"""Asks that exit at the ready position of a running daemon with the tape model, over socket and HTTP."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from daemon.config.schema import FlashConfig, ModelConfig, QuestionConfig
from flash.early_exit import FastAnswers, ReadyToken
from tests.kit import inproc_config, until
from tests.kit.inproc import RunningDaemon, running

TAU = 0.01
"""Below any gap of a decided answer."""
STANDING = "breakout"
OTHERS = ("volume_spike", "jump", "higher_closes", "failed_breakout", "drawdown")
"""With the choices of the standing question, and not standing themselves."""
CHOICES = ("YES", "NO")
Reply = dict[str, Any]


class World(NamedTuple):
    """A daemon at a settled version, and what its ready position says."""

    daemon: RunningDaemon
    ready: ReadyToken
    fast: FastAnswers

    async def socket(self, **asked: Any) -> Reply:
        """The reply of the query socket."""
        reply = await self.daemon.call("ask", "aaa", asked.pop("question"), **asked)
        return {name: getattr(reply, name) for name in reply.__struct_fields__}

    async def http(self, **asked: Any) -> Reply:
        """The reply of HTTP."""
        reply = await self.daemon.http("POST", "/v1/ask", {"session": "aaa", **asked})
        assert reply.status == 200, reply
        found: Reply = reply.json
        return found

    def tier(self, outcome: str) -> int:
        """How many asks that tier has answered."""
        return self.daemon.count("asks", outcome=outcome)

    @property
    def passes(self) -> int:
        """Forward passes so far."""
        return self.daemon.count("batches")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A tape of 24 bars."""
    questions = (QuestionConfig(name=STANDING, text=STANDING, choices=CHOICES),)
    config = inproc_config(
        model=ModelConfig(), standing="none", questions=questions, flash=FlashConfig(early_exit=TAU)
    )
    async with running(config) as daemon:
        daemon.feed(25)
        newest, state = daemon.gateway.generations.exits._newest, daemon.state()
        await until(lambda: state.live_records == 24, 120, "24 bars")
        await until(lambda: daemon.answered("aaa", state.version), what="the standing question's answer")
        await until(lambda: newest["aaa"].token.version == state.version, what="its ready position")
        yield World(daemon, newest["aaa"].token, newest["aaa"].fast)


def way_of(world: World, way: str) -> Callable[..., Awaitable[Reply]]:
    return {"socket": world.socket, "http": world.http}[way]


@pytest.mark.parametrize("way", ["socket", "http"])
async def test_an_exit_is_the_answer_of_a_pass_that_agrees_and_costs_none(world: World, way: str) -> None:
    """The oracle is the pass: each question is asked in full as well, and those with one answer are alike."""
    ask, agreed = way_of(world, way), 0
    by_token = {token: choice for choice, token in world.fast.items()}
    for question in OTHERS:
        computed = await ask(question=question, choices=CHOICES, early_exit=0)
        assert (computed["cached"], "ready_exit" in computed["flags"]) == (False, False)
        before = world.passes, world.tier("ready")
        exited = await ask(question=question, choices=CHOICES)
        assert exited["flags"][-1] == "ready_exit"
        assert exited["choice"] == exited["text"] == by_token[world.ready.token]
        assert exited["data_version"] == computed["data_version"] == world.ready.version
        assert exited["logit_gap"] == pytest.approx(world.ready.gap)
        assert (world.passes, world.tier("ready")) == (before[0], before[1] + 1), "it has its tier, no pass"
        agreed += exited["choice"] == computed["choice"]
    assert agreed, "on a quiet tape the model answers some of them as it would without a question"


@pytest.mark.parametrize("way", ["socket", "http"])
async def test_an_ask_below_the_threshold_is_computed(world: World, way: str) -> None:
    ask, gap = way_of(world, way), world.ready.gap
    before = world.passes, world.tier("computed")
    found = await ask(question=OTHERS[0], choices=CHOICES, early_exit=gap)
    assert "ready_exit" not in found["flags"], "the gap is not above itself"
    assert world.tier("computed") == before[1] + 1
    assert world.passes > before[0]
    kept = await ask(question=OTHERS[0], choices=CHOICES, early_exit=0)
    assert (kept["cached"], kept["choice"], kept["logit_gap"]) == (True, found["choice"], found["logit_gap"])
    assert "ready_exit" in (await ask(question=OTHERS[0], choices=CHOICES, early_exit=0.99 * gap))["flags"]


async def test_other_choices_than_fast_answers_are_computed_and_a_standing_answer_is_kept(
    world: World,
) -> None:
    computed = await world.socket(question="trend", choices=("UP", "DOWN"))
    assert "ready_exit" not in computed["flags"]
    assert computed["choice"] in ("UP", "DOWN")
    assert (await world.socket(question=STANDING))["cached"], "before any exit"
