"""Prompts in place of the gateway's: every one is accepted, but for texts and names that say otherwise."""

import asyncio
from typing import Any, get_args

from daemon.api.messages import (
    Append,
    Close,
    ClosedReply,
    Code,
    Complete,
    Finish,
    FinishReply,
    Open,
    PromptReply,
    QueryError,
    Update,
)
from daemon.tenants import Client


class FakePrompts:
    """Records the requests, and the clients of those that open a prompt, whose name is always "p".

    A text that is an error code is refused with it, "slow" never ends, "broken" is a defect; there is no
    prompt "q".
    """

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.clients: list[Client] = []

    async def open(self, request: Open, client: Client) -> PromptReply:
        self.clients.append(client)
        return await self.append(request)

    async def append(self, request: Open | Append | Update, client: Client | None = None) -> PromptReply:
        self.asked.append(request)
        if request.text in get_args(Code):
            raise QueryError(request.text, "because")
        if request.text == "slow":
            await asyncio.Event().wait()
        if request.text == "broken":
            raise ZeroDivisionError("secret detail")
        return PromptReply(request.id, "p", len(request.text))

    async def finish(self, request: Finish, client: Client | None = None) -> FinishReply:
        self.asked.append(request)
        if request.prompt == "q":
            raise QueryError("unknown_prompt", "there is no such prompt")
        return FinishReply(request.id, "p", "YES", None, 0.5, True, 3, 1, 0, 0, 0, 0, 7, {"step": 5})

    async def complete(self, request: Complete, client: Client) -> FinishReply:
        self.clients.append(client)
        return await self.finish(Finish(request.id, "p"))

    async def close(self, request: Close, client: Client | None = None) -> ClosedReply:
        self.asked.append(request)
        return ClosedReply(request.id, request.prompt)
