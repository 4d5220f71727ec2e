"""Work that ends with its client: its result, its errors, and who is gone when."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request

from daemon.api.disconnect import _WATCH_S, ClientDisconnected, unless_gone


class Rig:
    """A request whose client leaves at ``left``, and work that says whether it was cancelled."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.watched = self.cancelled = False
        self.request = Request({"type": "http"}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        self.watched = True
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def work(self, seconds: float, ends: Callable[[], Any] = lambda: "done") -> Any:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return ends()

    def served(self, seconds: float, ends: Callable[[], Any] = lambda: "done") -> Awaitable[Any]:
        return unless_gone(self.request, self.work(seconds, ends))


@pytest.fixture
async def rig() -> Rig:
    return Rig()


def failing(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.mark.parametrize("seconds", [0, 2 * _WATCH_S])
async def test_the_result_and_every_error_of_the_work_pass_through(rig: Rig, seconds: float) -> None:
    assert await rig.served(seconds) == "done"
    for error in (KeyError("own"), TimeoutError("own")):
        with pytest.raises(type(error), match="own"):
            await rig.served(seconds, failing(error))
    assert (rig.watched, rig.cancelled) == (seconds > 0, False)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("after_s", [0, 2 * _WATCH_S])
async def test_the_work_of_a_client_that_goes_is_cancelled(rig: Rig, after_s: float) -> None:
    asyncio.get_running_loop().call_later(after_s, rig.left.set)
    with pytest.raises(ClientDisconnected):
        await asyncio.wait_for(rig.served(3600), 60)
    assert rig.cancelled
    assert len(asyncio.all_tasks()) == 1


async def test_work_that_is_there_before_the_client_is_missed_is_given(rig: Rig) -> None:
    rig.left.set()
    assert await rig.served(0) == "done"


@pytest.mark.parametrize("after_s", [0, 2 * _WATCH_S])
async def test_a_cancellation_from_outside_cancels_the_work(rig: Rig, after_s: float) -> None:
    serving = asyncio.ensure_future(rig.served(60))
    await asyncio.sleep(after_s)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert rig.cancelled
    assert len(asyncio.all_tasks()) == 1
