"""The proxy itself, before a server that echoes frames."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.kit import until
from tests.kit.kafka import free_ports
from tests.kit.kafka_proxy import Api, Fault, KafkaProxy


def request(api: Api, number: int) -> bytes:
    body = struct.pack(">hhi", api, 0, number)
    return struct.pack(">i", len(body)) + body


class Broker:
    """Answers each frame by the same frame; ``got``: their numbers."""

    def __init__(self) -> None:
        self.got: list[int] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                frame = await reader.readexactly(12)
                self.got.append(struct.unpack_from(">i", frame, 8)[0])
                writer.write(frame)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:  # also where the test ends first
            writer.close()


@asynccontextmanager
async def proxied(*faults: Fault) -> AsyncIterator[tuple[Broker, KafkaProxy]]:
    up, port = free_ports(2)
    broker, proxy = Broker(), KafkaProxy(port, up)
    proxy.faults += faults
    server = await asyncio.start_server(broker.serve, "127.0.0.1", up)
    await proxy.start()
    yield broker, proxy
    await proxy.stop()
    server.close()


async def replies(proxy: KafkaProxy, requests: list[bytes], count: int) -> list[int]:
    """Numbers of the first ``count`` replies, or those before the connection was cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"".join(requests))
    got: list[int] = []
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while len(got) < count:
            got.append(struct.unpack_from(">i", await reader.readexactly(12), 8)[0])
    writer.close()
    return got


THREE = [request(Api.PRODUCE, 1), request(Api.END_TXN, 2), request(Api.PRODUCE, 3)]


@pytest.mark.parametrize(
    ("act", "sent", "heard"),
    [
        ("delay", [1, 2, 3], [1, 2, 3]),
        ("drop", [1, 3], [1, 3]),
        ("drop_reply", [1, 2, 3], [1, 3]),
        ("duplicate", [1, 2, 2, 3], [1, 2, 3]),
        ("cut", [1], []),
        ("cut_after", [1, 2], [1, 2]),
    ],
)
async def test_each_fault_hits_one_request_of_its_kind(act: str, sent: list[int], heard: list[int]) -> None:
    async with proxied(Fault(Api.END_TXN, act, 0.05)) as (broker, proxy):  # type: ignore[arg-type]
        got = await replies(proxy, THREE, len(heard) or 1)
        await until(lambda: len(broker.got) >= len(sent))
        await asyncio.sleep(0.1)  # nothing more comes
        # a reply may be lost with its connection
        assert got == heard or (act == "cut" and got in ([], [1]))
        assert broker.got == sent
        assert await replies(proxy, [request(Api.END_TXN, 4)], 1) == [4]
        assert proxy.applied == {f"END_TXN {act}": 1}
        assert proxy.seen[Api.END_TXN] == 2


async def test_a_delayed_request_arrives_after_its_client_is_gone() -> None:
    async with proxied(Fault(Api.END_TXN, "delay", 2.0)) as (broker, proxy):
        await replies(proxy, THREE[:2], 1)
        assert broker.got == [1]
        await until(lambda: len(broker.got) > 1)
        assert broker.got == [1, 2]


async def test_all_connections_are_cut_and_new_ones_taken() -> None:
    async with proxied() as (_, proxy):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(THREE[0])
        await reader.readexactly(12)
        proxy.cut()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(12)
        writer.close()
        assert await replies(proxy, THREE[:1], 1) == [1]
