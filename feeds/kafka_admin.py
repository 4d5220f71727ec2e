"""Topics of a broker: which are missing, and creating them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, for_code

Result = TypeVar("Result")


class BrokerError(RuntimeError):
    """The broker does not answer, or does not do what was asked; the text is written for a person."""


async def missing_topics(
    bootstrap: str, topics: Iterable[str], *, timeout_s: float = 5.0, options: Mapping[str, Any] | None = None
) -> list[str]:
    """The names among ``topics`` that the broker does not have, in order. Raises BrokerError."""
    known = await _ask(bootstrap, timeout_s, options, _list_topics)
    return [topic for topic in topics if topic not in known]


async def ensure_topics(
    bootstrap: str,
    topics: Mapping[str, int],
    *,
    replication: int = 1,
    timeout_s: float = 15.0,
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Create the topics (name to partition count) that do not exist; returns those created. Raises
    BrokerError.

    Needs a real broker: librdkafka's mock cluster cannot create topics over the wire
    (``MockBroker.create_topic``).
    """

    async def create(admin: AIOKafkaAdminClient) -> list[str]:
        known = await _list_topics(admin)
        wanted = [NewTopic(name, count, replication) for name, count in topics.items() if name not in known]
        if not wanted:
            return []
        response = await admin.create_topics(wanted)
        for name, code, *rest in response.topic_errors:
            if code:
                raise BrokerError(f"topic {name} was not created: {for_code(code).__name__} {rest}")
        return [topic.name for topic in wanted]

    return await _ask(bootstrap, timeout_s, options, create)


async def _list_topics(admin: AIOKafkaAdminClient) -> set[str]:
    return set(await admin.list_topics())


async def _ask(
    bootstrap: str,
    timeout_s: float,
    options: Mapping[str, Any] | None,
    question: Callable[[AIOKafkaAdminClient], Awaitable[Result]],
) -> Result:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, **(options or {}))
    try:
        async with asyncio.timeout(timeout_s):
            await admin.start()
            return await question(admin)
    except TimeoutError as error:
        raise BrokerError(f"no answer from Kafka at {bootstrap} within {timeout_s:g} s") from error
    except (KafkaError, OSError) as error:
        raise BrokerError(f"no useful answer from Kafka at {bootstrap}: {error!r}") from error
    finally:
        await admin.close()
