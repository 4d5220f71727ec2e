"""Opening and closing aiokafka clients: retry until the broker is there, stop in bounded time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka.errors import KafkaError

from feeds.backoff import Link

log = logging.getLogger(__name__)

PROBE_S = 2.0
"""A silent connection is looked at this often: an idle topic and a dead broker look alike."""


def quiet_client_log() -> None:
    """Silence aiokafka's own lines, which repeat with every attempt; ``Link`` logs changes of state, once."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


async def open_client(new: Callable[[], Any], link: Link, stop: asyncio.Event, stop_timeout_s: float) -> Any:
    """Build and start a client, retrying with backoff until it is up; None when ``stop`` is set first."""
    while not stop.is_set():
        client = new()
        try:
            if await until(stop, client.start()):
                link.up()
                return client
        except (KafkaError, OSError) as error:
            await close_client(client, stop_timeout_s)
            await until(stop, link.wait_before_retry(repr(error)))
        except BaseException:
            await close_client(client, stop_timeout_s)
            raise
        else:
            await close_client(client, stop_timeout_s)
    return None


async def until(stop: asyncio.Event, doing: Awaitable[Any]) -> bool:
    """Await ``doing`` unless ``stop`` is set first; True when it finished."""
    task, stopping = asyncio.ensure_future(doing), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for each in (task, stopping):
            each.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


async def close_client(client: Any, timeout_s: float) -> None:
    """Stop an aiokafka client in bounded time, whatever state it or its broker is in."""
    try:
        await asyncio.wait_for(client.stop(), timeout_s)
    except (KafkaError, OSError, TimeoutError) as error:
        log.debug("closing a Kafka client: %r", error)
