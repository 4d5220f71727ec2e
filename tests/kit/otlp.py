"""An OpenTelemetry collector of tests, which reads what it gets by OpenTelemetry's own messages."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class OtlpReceiver:
    """Answers with ``status``, or where it ``hangs`` not at all. ``port``: where it listens."""

    def __init__(self, status: int = 200, *, hangs: bool = False) -> None:
        self.status, self.port = status, 0
        self._answers = asyncio.Event()
        if not hangs:
            self._answers.set()
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.asked = 0
        self._serving: list[asyncio.Task[None]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        self._serving.append(asyncio.create_task(self._converse(reader, writer)))

    async def close(self) -> None:
        """End all connections."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = [line.split(": ", 1) for line in head.split("\r\n")[1:] if line]
                headers = {name.lower(): value for name, value in lines}
                body = await reader.readexactly(int(headers["content-length"]))
                self.asked += 1
                await self._answers.wait()
                assert headers["content-type"] == "application/json"
                if self.status < 300:
                    self.requests.append(json_format.Parse(_base64_ids(body), ExportTraceServiceRequest()))
                    self.headers.append(headers)
                writer.write(f"HTTP/1.1 {self.status} X\r\ncontent-length: 2\r\n\r\n{{}}".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def _base64_ids(body: bytes) -> str:
    """Ids are hexadecimal in OTLP, where the JSON of Protobuf has Base64."""

    def changed(found: dict[str, Any]) -> dict[str, Any]:
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in found:
                found[name] = base64.b64encode(bytes.fromhex(found[name])).decode()
        return found

    return json.dumps(json.loads(body, object_hook=changed))


@asynccontextmanager
async def receiving(status: int = 200, *, hangs: bool = False) -> AsyncIterator[OtlpReceiver]:
    """A collector that listens."""
    receiver = OtlpReceiver(status, hangs=hangs)
    server = await asyncio.start_server(receiver.accept, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        await receiver.close()
