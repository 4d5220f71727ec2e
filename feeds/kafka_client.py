"""aiokafka clients: opened once the broker is up, closed in bounded time; and which topics a broker lacks."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.metadata import MetadataRequest

from feeds.backoff import ConnectionLog, until
from feeds.source import CommitPoint

log = logging.getLogger(__name__)

SILENCE_S, LOGIN_S = 1.0, 4.0
"""How long a broker is silent until it seems to want TLS or a login, and may be where it has both."""
PROBE_S = 2.0
"""Interval for checking a silent connection: an idle topic and a dead broker look alike."""
BOOTSTRAP_S = 1.0
"""For the brokers' addresses to come, where a client that has just begun is stopped."""


NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})


def broker_time_ms(time_ns: int) -> int:
    """A time as brokers look records up by it: ms, which fit 64 bits and have no special meaning."""
    return min(max(0, time_ns // 1_000_000), (1 << 63) - 1)


def headers_of(headers: Sequence[tuple[str, bytes | None]]) -> dict[str, bytes]:
    """A record's headers; of those of one name the last, and b"" for a null value."""
    return {name: value or b"" for name, value in headers}


def quiet_client_log() -> None:
    """Silence aiokafka's own log, which repeats itself at every attempt; ``ConnectionLog`` logs changes."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


class Clients:
    """Opens and closes the aiokafka clients of one source or sink. Once ``stop`` is set it opens none.

    ``settings``: a client's, also to tell why a connection is refused (`why_closed`).
    """

    def __init__(
        self, kind: type, connection: ConnectionLog, settings: Mapping[str, Any], stop_timeout_s: float
    ) -> None:
        self.connection, self.settings, self.stop_timeout_s = connection, dict(settings), stop_timeout_s
        self.stop = asyncio.Event()
        self._kind = kind

    async def open(self, prepare: Callable[[Any], None] = lambda client: None, **options: Any) -> Any:
        """One that is up, retrying with backoff; None when ``stop`` is set first.

        ``options`` replace settings of the same name; ``prepare`` gets each that is about to start.
        """
        settings = {**self.settings, **options}
        while not self.stop.is_set():
            client = self._kind(**settings)
            prepare(client)
            try:
                if await until(self.stop, start_client(client)) and not self.stop.is_set():
                    self.connection.up()
                    return client
            except (KafkaError, OSError) as error:
                await self.close(client)
                # to its end: a connection that is cancelled while it opens stays open
                why = await why_closed(settings) if isinstance(error, KafkaConnectionError) else ""
                await until(self.stop, self.connection.wait_before_retry(why or repr(error)))
            except BaseException:
                await self.close(client)
                raise
            else:
                await self.close(client)
        return None

    async def close(self, client: Any) -> None:
        """Close, in bounded time, if there is one."""
        if client is not None:
            await close_client(client, self.stop_timeout_s)


async def start_client(client: Any) -> None:
    """Start an aiokafka client. Where this is cancelled, the first connection is closed within `BOOTSTRAP_S`.

    aiokafka 0.14 leaves it to the garbage collector, wherever its ``bootstrap`` is cancelled.
    """
    bootstrapped = asyncio.Event()
    connections_of(client).cluster.add_listener(lambda _: bootstrapped.set())
    starting = asyncio.ensure_future(client.start())
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(BOOTSTRAP_S):
                await until(bootstrapped, starting)
        raise


async def close_client(client: Any, timeout_s: float) -> None:
    """Stop an aiokafka client in about ``timeout_s``, whatever its state or its broker's. Never raises.

    aiokafka 0.14 waits for a broker that does not answer, and leaves the rest open when a fetch is under way.
    So its connections are closed under it, which ends what waits for an answer: one that is left half-way
    stays a member of its group.
    """
    stopping = asyncio.ensure_future(client.stop())
    try:
        await asyncio.wait((stopping,), timeout=timeout_s)
    finally:
        if not _succeeded(stopping):
            await _quietly(connections_of(client).close(), timeout_s)
            await asyncio.wait((stopping,), timeout=timeout_s)
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            sender = getattr(client, "_sender", None)  # it sends its messages again without end
            if sender is not None:
                await _quietly(sender.close(), timeout_s)
        await _quietly(_close_connections(connections_of(client)), timeout_s)


async def _close_connections(connections: Any) -> None:
    """Close all, also one that opens just now: aiokafka 0.14 closes those that it has, and keeps that one."""
    async with connections._get_conn_lock:
        await connections.close()


# What aiokafka has no public way to. `tests/feeds/test_feeds_kafka_client.py` fails where a name has gone.


def connections_of(client: Any) -> Any:
    """Return the connections of a consumer or a producer; the latter has them under a public name."""
    return client._client if hasattr(client, "_client") else client.client


def partitions_of(consumer: AIOKafkaConsumer, topics: Iterable[str]) -> list[TopicPartition]:
    """Return all partitions of these topics that the consumer knows."""
    return [TopicPartition(t, number) for t in topics for number in consumer.partitions_for_topic(t) or ()]


async def committed_points(
    consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, CommitPoint]:
    """Return the offsets that the consumer's group has committed."""
    found = await consumer._coordinator.fetch_committed_offsets(partitions)
    return {p: CommitPoint(each.offset) for p, each in found.items() if each.offset >= 0}


def generation_of(consumer: AIOKafkaConsumer) -> tuple[int, str]:
    """Return the generation of its group and its id there."""
    return consumer._coordinator.generation, consumer._coordinator.member_id


def request_rejoin(consumer: AIOKafkaConsumer) -> None:
    """Have the group formed again; the consumer keeps its assignment until the next one."""
    consumer._coordinator.request_rejoin()


def check_membership(consumer: AIOKafkaConsumer) -> None:
    """Raise the KafkaError that keeps it from joining its group, if any: it waits until that is taken."""
    consumer._coordinator.check_errors()


def leave_at_close(consumer: AIOKafkaConsumer) -> None:
    """Have a static member leave the group when it is closed, as one without an instance does."""
    consumer._coordinator._group_instance_id = None


def has_stopped_fetching(consumer: AIOKafkaConsumer) -> bool:
    """Whether nothing is fetched any more; only its log says so."""
    return bool(consumer._fetcher.error_future.done())


class BrokerError(RuntimeError):
    """The broker does not answer or refuses; the text is written for people."""


async def missing_topics(
    bootstrap: str,
    topics: Iterable[str],
    *,
    timeout_s: float = 5.0,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """The names in ``topics`` that the broker lacks, in order. Raises BrokerError."""
    settings = {"bootstrap_servers": bootstrap, **options}
    admin = AIOKafkaAdminClient(**settings)
    try:
        async with asyncio.timeout(timeout_s):
            await start_client(admin)
            known = set(await admin.list_topics())
    except TimeoutError as error:
        why = await why_closed(settings)
        raise BrokerError(
            f"no answer from Kafka at {bootstrap} within {timeout_s:g} s{why and f': {why}'}"
        ) from error
    except (KafkaError, OSError) as error:
        why = await why_closed(settings) or repr(error)
        raise BrokerError(f"no useful answer from Kafka at {bootstrap}: {why}") from error
    finally:
        await admin.close()
    return [topic for topic in topics if topic not in known]


async def why_closed(settings: Mapping[str, Any]) -> str:
    """What is wrong with TLS or the login, for people; "" if that is not it.

    aiokafka reports every failed connection as the same error and keeps the reason in its log, so the first
    broker is asked once more.
    """
    host, port, _ = collect_hosts(settings["bootstrap_servers"])[0]
    names = (
        *("client_id", "security_protocol", "ssl_context"),
        *("sasl_mechanism", "sasl_plain_username", "sasl_plain_password"),
    )
    options = {name: settings[name] for name in names if name in settings}
    tls = "ssl_context" in settings
    has_both = tls and "sasl_mechanism" in settings
    silence_s = LOGIN_S if has_both else SILENCE_S
    try:
        async with asyncio.timeout(2 * silence_s):
            # a broker answers nothing to a client that speaks in the clear where TLS is due
            connection = await create_conn(host, port, request_timeout_ms=int(silence_s * 1000), **options)
            try:
                await connection.send(MetadataRequest([]))
            finally:
                connection.close()
        return ""
    except SaslAuthenticationFailed as error:
        return f"the broker refuses user name and password: {error.args[0] if error.args else error!r}"
    except (UnsupportedSaslMechanismError, IllegalSaslStateError) as error:
        return f"the broker does not take this login: {error}"
    except ssl.SSLCertVerificationError as error:
        return f"the broker's certificate is not trusted (security.ca_file): {error.verify_message}"
    except (ssl.SSLError, ConnectionResetError, ConnectionAbortedError) as error:
        return (
            f"no TLS with the broker, whose port may be for connections in the clear: {error}" if tls else ""
        )
    except (KafkaError, TimeoutError):
        if has_both:
            return ""  # it is slow, or something else is wrong
        wanted = "a login (security.sasl)" if tls else "TLS (security.tls) or a login (security.sasl)"
        return f"the broker takes the connection but does not answer: it may want {wanted}"
    except OSError:
        return ""


async def _quietly(doing: Awaitable[Any], timeout_s: float) -> None:
    """Await ``doing`` for ``timeout_s`` at most."""
    task = asyncio.ensure_future(doing)
    try:
        await asyncio.wait((task,), timeout=timeout_s)
    finally:
        task.cancel()  # no effect on a finished task
    await asyncio.gather(task, return_exceptions=True)
    _succeeded(task)


def _succeeded(task: "asyncio.Future[Any]") -> bool:
    """Whether it has ended, and well."""
    if not task.done():
        return False
    if task.cancelled() or task.exception() is not None:
        log.debug("closing a Kafka client: %s", "given up" if task.cancelled() else repr(task.exception()))
        return False
    return True
