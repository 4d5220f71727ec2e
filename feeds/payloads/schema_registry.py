"""Schemas of a registry that speaks Confluent's API, by the id in front of a payload."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from feeds.backoff import delay_s
from feeds.codec import MalformedRecord

log = logging.getLogger(__name__)

UNKNOWN_S = 10.0
"""A schema that the registry did not know is asked for again after so long."""
_HEAD = 5
_NOT_FOUND = 404


@dataclass(frozen=True)
class Schema:
    """``kind``: AVRO, PROTOBUF or JSON. ``references``: the schemas it uses, by the names it gives them."""

    kind: str
    text: str
    references: dict[str, Schema] = field(default_factory=dict)


def split(payload: bytes) -> tuple[int | None, bytes]:
    """The id of the schema in front of a payload, and the rest; None where there is no id."""
    if payload[:1] == b"\0" and len(payload) > _HEAD:
        return int.from_bytes(payload[1:_HEAD], "big"), payload[_HEAD:]
    return None, payload


class SchemaRegistry:
    """Asks for each schema once. ``client``: confluent-kafka's; its calls block, so they have a thread.

    ``failed``: requests that failed so far, for want of the registry.
    """

    def __init__(self, client: Any, sleep: Callable[[float], Any] = asyncio.sleep) -> None:
        self._client, self._sleep = client, sleep
        self._known: dict[int, Schema] = {}
        self._unknown: dict[int, float] = {}
        """When they were asked for, monotonic, s."""
        self.failed = 0

    async def load(self, ids: Iterable[int]) -> None:
        """Get these schemas; waits as long as the registry cannot be asked."""
        for number in ids:
            asked = self._unknown.get(number)
            if number in self._known or (asked is not None and time.monotonic() - asked < UNKNOWN_S):
                continue
            attempt = 0
            while not await self._ask(number):
                attempt += 1
                await self._sleep(delay_s(attempt))

    def get(self, number: int) -> Schema:
        """A schema that was loaded. Raises MalformedRecord: the registry has none with this id."""
        try:
            return self._known[number]
        except KeyError:
            raise MalformedRecord("schema", f"the registry has no schema with the id {number}") from None

    def check(self) -> None:
        """Ask it for anything. Raises whatever the client raises where it does not answer."""
        self._client.get_subjects()

    async def _ask(self, number: int) -> bool:
        """Whether the registry told; False where it cannot be reached."""
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            found = await asyncio.to_thread(self._fetch, number)
        except SchemaRegistryError as error:
            if error.http_status_code == _NOT_FOUND:
                self._unknown[number] = time.monotonic()
                log.warning("the schema registry has no schema with the id %d", number)
                return True
            why: Exception = error
        except Exception as error:  # whatever the client raises, the schema is not known
            why = error
        else:
            self._known[number] = found
            self._unknown.pop(number, None)
            return True
        self.failed += 1
        log.warning("the schema registry does not tell the schema %d, trying again: %r", number, why)
        return False

    def _fetch(self, number: int) -> Schema:
        return self._whole(self._client.get_schema(number))

    def _whole(self, found: Any) -> Schema:
        """With all that it uses."""
        references = {
            each.name: self._whole(self._client.get_version(each.subject, each.version).schema)
            for each in found.references or ()
        }
        return Schema(found.schema_type or "AVRO", found.schema_str, references)
