"""Commands that wait for the engine's reply: one table for requests, and for changes of sessions."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from daemon import protocol
from daemon.api.generation import Begun, Delta, Failed, Finished
from daemon.api.messages import QueryError
from daemon.gateway.engine_client import EngineClient

OnReply = Callable[[protocol.ReplyEvent], None]
Charge = Callable[[int, int], None]
"""Gets tokens, and ns of the engine."""


@dataclass(eq=False, slots=True)
class _Entry:
    """Who gets the events of a number, and what charges the tokens that they tell of."""

    on_event: OnReply
    charge: Charge
    tokens: int = 0
    """Charged so far."""

    def charge_for(self, event: protocol.ReplyEvent) -> None:
        """Charge the tokens that were computed since the last event, and at the end the engine's time."""
        engine_ns = 0
        match event:
            case Begun():
                taken = self.tokens + max(0, event.prompt_tokens - event.reused_tokens)
            case Delta():
                taken = self.tokens + event.tokens
            case Finished():
                taken, engine_ns = event.computed_tokens, event.engine_ns
            case Failed():
                taken, engine_ns = event.tokens, event.engine_ns
            case _:
                return
        self.charge(max(0, taken - self.tokens), engine_ns)
        self.tokens = max(self.tokens, taken)


class PendingCommands:
    """What waits, by the number that command and events have as ``id``. On the event loop.

    An entry stays until the engine has replied, even where its client is gone.
    """

    def __init__(self, connected: Callable[[], EngineClient | None]) -> None:
        """``connected()``: the engine that is up, if one is."""
        self._connected = connected
        self._entries: dict[int, _Entry] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        """How many commands wait."""
        return len(self._entries)

    def send(self, command: protocol.Command) -> None:
        """Send to the engine; while none is up, the command's clients get a `Failed`."""
        if (engine := self._connected()) is not None:
            engine.send(command)
            return
        for failure in protocol.failures_of(command, "engine", "the engine is not up"):
            self.on_event(failure)

    def open(self, on_event: OnReply, charge: Charge = lambda tokens, engine_ns: None) -> int:
        """A new number; each event of it goes to ``on_event``, until it is closed.

        ``charge`` gets what each event tells of; `Finished` and `Failed` close the number.
        """
        number = next(self._numbers)
        self._entries[number] = _Entry(on_event, charge)
        return number

    def close(self, number: int) -> None:
        """Nothing more comes for this number."""
        self._entries.pop(number, None)

    async def reply(
        self, make: Callable[[int], protocol.Command], on_event: OnReply = lambda event: None
    ) -> protocol.ReplyEvent:
        """Send the command that ``make`` gives for a number, and wait for its only event.

        ``on_event`` sees the event first, also where the wait has ended before it. Raises QueryError for a
        `Failed`.
        """
        future: asyncio.Future[protocol.ReplyEvent] = asyncio.get_running_loop().create_future()

        def hear(event: protocol.ReplyEvent) -> None:
            self.close(event.id)
            on_event(event)
            resolve(future, event)

        number = self.open(hear)
        try:
            self.send(make(number))
        except BaseException:
            self.close(number)
            raise
        return await future

    def on_event(self, event: protocol.ReplyEvent) -> None:
        """The engine replied. An event that no command waits for is dropped."""
        if (entry := self._entries.get(event.id)) is None:
            return
        if isinstance(event, Finished | Failed):
            self.close(event.id)
        entry.charge_for(event)
        entry.on_event(event)

    def engine_gone(self, message: str) -> None:
        """Fail every command in flight: the engine is gone."""
        for number in list(self._entries):
            self.on_event(Failed(number, "engine", message))


def resolve(future: asyncio.Future[protocol.ReplyEvent], event: protocol.ReplyEvent) -> None:
    """Give ``event`` to who waits for ``future``, a `Failed` as a QueryError."""
    if future.done():
        return
    if isinstance(event, Failed):
        future.set_exception(QueryError(event.code, event.message))
    else:
        future.set_result(event)
