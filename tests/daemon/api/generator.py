"""A generator in place of the daemon's: answers that a test can foretell, refusals, and answers that hang."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from math import log
from typing import get_args

from daemon.api.generation import (
    Begun,
    Delta,
    Event,
    Finished,
    Generate,
    Logprob,
    ModelCatalog,
    ModelEntry,
    TopLogprob,
)
from daemon.api.messages import Code, QueryError, ReplyMetadata
from daemon.tenants import Client

SERVED = ModelCatalog((ModelEntry("tape", "0123abcd"),), 1_700_000_000, ("btc",), 2048, 256)
LOGPROB = Logprob(
    "Up", -0.25, (85, 112), (TopLogprob("Up", -0.25, (85, 112)), TopLogprob("No", -1.5, (78, 111)))
)
POOL = ReplyMetadata(logit_gap=0.5, untrained=True, flags=("untrained",))
SESSION = ReplyMetadata(
    session="btc",
    data_version=7,
    as_of=5,
    staleness_ns=4,
    source_age_ns=3,
    daemon_age_ns=2,
    choice="UP",
    probability=0.75,
    choice_set=("UP",),
    logit_gap=0.5,
    flags=("stale",),
)


class FakeGenerator:
    """Answers "Up we go". A text that is an error code fails with it; "late CODE" fails after a piece.

    A scored one finds each choice half as likely as the one before.
    "slow" never begins, "hangs" never ends, and "broken" is a defect. "held TEXT" waits for `release`.
    """

    def __init__(self) -> None:
        self.asked: list[Generate] = []
        self.running = 0
        self.cancelled = 0
        self.release = asyncio.Event()
        self.refusals = 0
        """How many of the next requests are refused as `busy`."""

    def served(self, client: Client) -> ModelCatalog:
        return SERVED

    async def count(self, request: Generate, client: Client) -> int:
        if request.turns[-1].text == "slow":
            self.running += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.running -= 1
                self.cancelled += 1
        return sum(len(each.text) for each in request.turns)

    async def run(
        self, requests: Sequence[Generate], client: Client
    ) -> AsyncGenerator[tuple[int, Event], None]:
        self.asked += requests
        self.running += 1
        whole = False
        try:
            if self.refusals:
                self.refusals -= 1
                raise QueryError("busy", "try again")
            for index, request in enumerate(requests):
                async for event in self._one(request):
                    yield index, event
            whole = True
        finally:
            self.running -= 1
            self.cancelled += not whole

    async def _one(self, request: Generate) -> AsyncGenerator[Event, None]:
        text = request.turns[-1].text if request.turns else request.text
        if request.scored:
            text = text.partition("\n")[0]
        if text.startswith("held "):
            await self.release.wait()
            text = text[5:]
        if text in get_args(Code):
            raise QueryError(text, "because")  # type: ignore[arg-type]  # a Code
        if text == "slow":
            await asyncio.Event().wait()
        if text == "broken":
            raise ZeroDivisionError("secret detail")
        logprobs = (LOGPROB,) if request.top_logprobs is not None else ()
        yield Begun(0, 10, 4)
        if request.stream:
            yield Delta(0, "Up", logprobs)
        if text.startswith("late "):
            raise QueryError(text[5:], "because")  # type: ignore[arg-type]  # a Code
        if text == "hangs":
            await asyncio.Event().wait()
        if request.stream:
            yield Delta(0, " we go")
        read = SESSION if request.session else POOL
        length, stop = request.max_tokens == 2, request.stop[0] if request.stop else None
        yield Finished(
            id=0,
            text="Up we go",
            finish="length" if length else "stop_sequence" if stop else "stop",
            stop=stop,
            prompt_tokens=10,
            reused_tokens=4,
            answer_tokens=2,
            metadata=read,
            logprobs=logprobs,
            scores=tuple(-n * log(2) for n in range(len(request.choices))) if request.scored else (),
        )
