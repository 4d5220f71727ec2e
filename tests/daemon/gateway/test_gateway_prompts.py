"""The gateway's prompts: limits, the order of inputs, and who is informed when a prompt ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from daemon import protocol
from daemon.api.generation import (
    CancelGeneration,
    ExtendPrompt,
    Failed,
    Finished,
    FinishPrompt,
    Generate,
    GenerateAll,
    PromptStats,
    TokensCounted,
)
from daemon.api.messages import (
    Append,
    Close,
    ClosedReply,
    Code,
    Complete,
    Finish,
    Open,
    QueryError,
    ReplyMetadata,
    Update,
)
from daemon.gateway.prompt_quota import PromptQuota
from daemon.gateway.prompts import Prompts
from daemon.tenants import LOCAL, Client, Tenant
from daemon.traces.trace_context import TraceContext, current
from tests.kit.gateway import GenerationsRig, admitting

ME = Client(LOCAL, "me")
STATS = PromptStats(3, 4, 5, 6, {"step": 7})
DONE: dict[str, Any] = {
    "text": "YES",
    "choice": None,
    "logit_gap": 0.5,
    "untrained": True,
    "prompt_tokens": 9,
    "answer_tokens": 1,
    "reused_tokens": 2,
    **msgspec.structs.asdict(STATS),
}

TRACE = TraceContext("1" * 32, "2" * 16)

MAX_INPUTS, REMEMBERED = 5, 40


class Rig(GenerationsRig):
    """Prompts and the commands they send; `taking`: an engine that takes inputs at once, a token a letter."""

    def __init__(self, most: int = 4, max_each: int = 3) -> None:
        super().__init__(access=admitting(), room=PromptQuota(most, max_each))
        self.numbers: list[int] = []
        """The prompts' numbers, in order of opening."""
        self.taking = True
        bounds = {"max_inputs": MAX_INPUTS, "remembered": REMEMBERED}
        self.prompts = Prompts(self.generations, self.pending, self.room, self.access, **bounds)

    def send(self, command: protocol.Command) -> None:
        self.sent.append(command)
        input_: ExtendPrompt | Generate | None = command if isinstance(command, ExtendPrompt) else None
        if isinstance(command, GenerateAll):
            (asked,) = command.requests
            self.numbers.append(asked.id)
            input_ = None if asked.complete else asked
        if self.taking and input_ is not None:
            taken = TokensCounted(input_.id, len(input_.text))
            asyncio.get_running_loop().call_soon(self.pending.on_event, taken)

    async def open(self, text: str = "abc", client: str = "me") -> str:
        return (await self.prompts.open(Open(1, text), Client(LOCAL, client))).prompt

    def taken(self, tokens: int, number: int = 1) -> None:
        self.pending.on_event(TokensCounted(self.numbers[number - 1], tokens))

    def done(self, number: int = 1) -> None:
        self.pending.on_event(
            Finished(
                id=self.numbers[number - 1],
                text="YES",
                finish="stop",
                stop=None,
                prompt_tokens=9,
                reused_tokens=2,
                answer_tokens=1,
                metadata=ReplyMetadata(logit_gap=0.5, untrained=True),
                stats=STATS,
            )
        )

    def failed(self, code: Code, number: int = 1) -> None:
        self.pending.on_event(Failed(self.numbers[number - 1], code, f"because of {code}"))

    async def refusal(self, work: Coroutine[Any, Any, Any]) -> str:
        with pytest.raises(QueryError) as refused:
            await work
        return refused.value.code

    async def later(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A started task, run until it waits."""
        task = asyncio.create_task(work)
        await asyncio.sleep(0)
        return task


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_a_prompt_from_its_opening_to_its_answer(rig):
    current.set(TRACE)
    opened = await rig.prompts.open(Open(5, "abc", 8, ("A", "B"), 0.5), ME)
    assert (opened.id, opened.prompt_tokens) == (5, 3)
    prompt = opened.prompt
    assert (await rig.prompts.append(Append(6, prompt, "defg"), ME)).prompt_tokens == 4
    assert (await rig.prompts.append(Update(7, prompt, "h"), ME)).prompt_tokens == 1
    finishing = await rig.later(rig.prompts.finish(Finish(8, prompt), ME))
    assert rig.sent == [
        GenerateAll(
            (
                Generate(
                    id=1,
                    trace_id=TRACE.trace_id,
                    text="abc",
                    max_tokens=8,
                    choices=("A", "B"),
                    temperature=0.5,
                    exact=True,
                    complete=False,
                ),
            )
        ),
        ExtendPrompt(1, "defg"),
        ExtendPrompt(1, "h", replace=True),
        FinishPrompt(1),
    ]
    rig.done()
    reply = await finishing
    assert (reply.id, reply.prompt) == (8, prompt)
    assert {name: getattr(reply, name) for name in DONE} == DONE
    assert len(rig.prompts) == 0


async def test_all_at_once_is_one_command(rig):
    current.set(TRACE)
    whole = await rig.later(rig.prompts.complete(Complete(1, "abc"), ME))
    asked = Generate(id=1, text="abc", max_tokens=64, exact=True, trace_id=TRACE.trace_id)
    assert rig.sent == [GenerateAll((asked,))]
    rig.done()
    assert ((await whole).id, (await whole).text, (await whole).trace_id) == (1, "YES", TRACE.trace_id)


async def test_the_engine_is_told_whose_prompt_it_is(rig):
    desk = Client(Tenant("desk", weight=3.0), "me")
    whole = await rig.later(rig.prompts.complete(Complete(1, "abc"), desk))
    (asked,) = rig.sent[0].requests
    assert (asked.tenant, asked.weight, asked.salt) == ("desk", 3.0, desk.tenant.salt())
    rig.done()
    await whole


async def test_ids_cannot_be_guessed_from_one_another(rig):
    ids = [await rig.open() for _ in range(3)]
    assert len({len(each) for each in ids}) == 1
    assert all(sum(a != b for a, b in zip(one, two, strict=True)) > 4 for one, two in [ids[:2], ids[1:]])


async def test_inputs_are_taken_in_order_including_those_without_a_waiting_client(rig):
    prompt = await rig.open()
    rig.taking = False
    first, second, third = [await rig.later(rig.prompts.append(Append(n, prompt, "x"), ME)) for n in range(3)]
    second.cancel()
    await asyncio.sleep(0)
    for tokens in (4, 5, 6):
        rig.taken(tokens)
    assert [(await first).prompt_tokens, (await third).prompt_tokens] == [4, 6]
    assert len(rig.prompts) == 1


async def test_a_prompt_takes_so_many_inputs_ahead(rig):
    prompt = await rig.open()
    rig.taking = False
    waiting = [await rig.later(rig.prompts.append(Append(n, prompt, "x"), ME)) for n in range(MAX_INPUTS)]
    assert await rig.refusal(rig.prompts.append(Append(99, prompt, "x"), ME)) == "busy"
    rig.failed("too_long")
    assert {await rig.refusal(asyncio.wait_for(task, 60)) for task in waiting} == {"too_long"}


async def test_bounds_hold_in_all_and_for_one_client_and_count_what_is_open(rig):
    first, _, _ = [await rig.open() for _ in range(3)]
    assert await rig.refusal(rig.open()) == "busy"
    assert await rig.refusal(rig.prompts.complete(Complete(1, "x"), ME)) == "busy"
    await rig.open(client="you")
    assert await rig.refusal(rig.open(client="third")) == "busy"
    assert await rig.prompts.close(Close(4, first), ME) == ClosedReply(4, first)
    assert rig.sent[-1] == CancelGeneration(1)
    await rig.open()
    rig.failed("abandoned", 2)
    await rig.open()
    closed = Rig(most=0)
    assert await closed.refusal(closed.open()) == "bad_request"
    assert closed.sent == []


@pytest.mark.parametrize("code", ["abandoned", "too_long", "bad_request", "shutting_down", "engine"])
async def test_the_reason_of_a_failure_is_reported_now_and_later(rig, code):
    prompt = await rig.open()
    finishing = await rig.later(rig.prompts.finish(Finish(1, prompt), ME))
    rig.failed(code)
    assert await rig.refusal(finishing) == code
    assert await rig.refusal(rig.prompts.append(Append(2, prompt, "x"), ME)) == code
    assert await rig.prompts.close(Close(3, prompt), ME) == ClosedReply(3, prompt)


async def test_a_finished_prompt_takes_nothing_more(rig):
    prompt = await rig.open()
    finishing = await rig.later(rig.prompts.finish(Finish(1, prompt), ME))
    for _ in range(2):
        assert await rig.refusal(rig.prompts.append(Append(2, prompt, "x"), ME)) == "finished"
        assert await rig.refusal(rig.prompts.finish(Finish(2, prompt), ME)) == "finished"
        if not finishing.done():
            rig.done()
            await finishing
    assert await rig.refusal(rig.prompts.finish(Finish(2, "nowhere"), ME)) == "unknown_prompt"
    assert await rig.refusal(rig.prompts.close(Close(2, "nowhere"), ME)) == "unknown_prompt"


async def test_closing_ends_a_finish_that_waits(rig):
    prompt = await rig.open()
    finishing = await rig.later(rig.prompts.finish(Finish(1, prompt), ME))
    await rig.prompts.close(Close(2, prompt), ME)
    assert await rig.refusal(finishing) == "unknown_prompt"
    rig.done()  # too late: no request waits for it
    assert rig.sent[-1] == CancelGeneration(1)


async def test_a_cancelled_wait_closes_a_prompt_whose_answer_or_id_is_lost(rig):
    prompt = await rig.open()
    finishing = await rig.later(rig.prompts.finish(Finish(1, prompt), ME))
    rig.taking = False
    opening = await rig.later(rig.prompts.open(Open(2), ME))
    for task in (finishing, opening):
        task.cancel()
    await asyncio.gather(finishing, opening, return_exceptions=True)
    assert rig.sent[-2:] == [CancelGeneration(1), CancelGeneration(2)]
    assert len(rig.prompts) == 0


async def test_a_prompt_that_cannot_be_sent_gives_its_place_back(rig):
    def fail(command: protocol.Command) -> None:
        if not isinstance(command, CancelGeneration):
            raise OverflowError("too large")

    rig.send = fail
    for work in (rig.prompts.open(Open(1), ME), rig.prompts.complete(Complete(2, "x"), ME)):
        with pytest.raises(OverflowError):
            await work
    assert (len(rig.prompts), len(rig.room)) == (0, 0)


async def test_the_engine_s_end_is_the_end_of_all(rig):
    prompt, other = await rig.open(), await rig.open()
    finishing = await rig.later(rig.prompts.finish(Finish(1, prompt), ME))
    rig.pending.engine_gone("it died")
    assert await rig.refusal(finishing) == "engine"
    assert await rig.refusal(rig.prompts.append(Append(2, other, "x"), ME)) == "engine"
    assert len(rig.prompts) == 0


async def test_only_so_many_ends_are_remembered(rig):
    first = await rig.open()
    rig.failed("abandoned")
    for number in range(2, REMEMBERED + 1):
        await rig.open()
        rig.failed("abandoned", number)
    assert await rig.refusal(rig.prompts.finish(Finish(1, first), ME)) == "abandoned"
    await rig.open()
    rig.failed("abandoned", REMEMBERED + 1)
    assert await rig.refusal(rig.prompts.finish(Finish(1, first), ME)) == "unknown_prompt"
