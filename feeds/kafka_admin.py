"""Finds which topics a broker lacks."""

import asyncio
from collections.abc import Iterable

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError


class BrokerError(RuntimeError):
    """The broker does not answer or refuses; the text is written for people."""


async def missing_topics(bootstrap: str, topics: Iterable[str], *, timeout_s: float = 5.0) -> list[str]:
    """The names in ``topics`` that the broker lacks, in order. Raises BrokerError."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        async with asyncio.timeout(timeout_s):
            await admin.start()
            known = set(await admin.list_topics())
    except TimeoutError as error:
        raise BrokerError(f"no answer from Kafka at {bootstrap} within {timeout_s:g} s") from error
    except (KafkaError, OSError) as error:
        raise BrokerError(f"no useful answer from Kafka at {bootstrap}: {error!r}") from error
    finally:
        await admin.close()
    return [topic for topic in topics if topic not in known]
