"""A daemon's doors before a backend of a test's own: the query socket, or HTTP with the live page."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from daemon.api import messages
from daemon.api.auth import Access, tenant_labels
from daemon.api.events import Events
from daemon.api.health import health_of
from daemon.api.http_api import api_routes
from daemon.api.http_requests import Requests
from daemon.api.http_server import HttpServer
from daemon.api.messages import ErrorReply
from daemon.api.pushes import Pushes
from daemon.api.zmq import QueryServer
from daemon.config.tenants_file import TenantTable
from daemon.supervision import Tasks
from daemon.tenants import Client, Tenants, hash_of, new_key
from feeds.curve import Keys
from feeds.market_data import FlashReady
from feeds.push_source import PushedSource, PushLimits
from metrics.store import MetricStore
from tests.kit.gateway import queries

DESK = new_key()
PUBLIC, SECRET = zmq.curve_keypair()
CURVE = Keys(*zmq.curve_keypair(), server=PUBLIC)
TABLES = (
    TenantTable("desk", sessions=("*",), api_keys=(hash_of(DESK),), curve_keys=(CURVE.public.decode(),)),
)


NONE = ErrorReply(0, "unknown_session", "there is no such session")


def plain(message: Any) -> Any:
    """Without what differs from request to request."""
    other = {"latency_ns": 0, "trace_id": ""}
    there = {name: value for name, value in other.items() if hasattr(message, name)}
    return msgspec.structs.replace(message, id=0, **there)


@dataclass
class Daemon:
    """Both transports before one backend, which replies as it is told; "slow" waits for `release`."""

    transport: str
    epoch: int = 1
    tenants: Tenants = field(default_factory=Tenants)
    tls: Any = None
    replies: list[tuple[messages.ClientRequest, messages.Reply]] = field(default_factory=list)
    asked: list[messages.ClientRequest] = field(default_factory=list)
    otherwise: messages.Reply = NONE
    given_up: int = 0

    def __post_init__(self) -> None:
        self.release = asyncio.Event()
        self.store = MetricStore.local({"tenant": tenant_labels(self.tenants)})
        self.access = Access(self.tenants, self.store)
        self.events = Events(self.epoch, self.store, max_clients=10, kept=100)
        self.source = PushedSource("http", PushLimits(10, 100_000))
        self.pushes = Pushes({"http": self.source}, self.store, 1 << 16)
        self.server: Any = None

    async def answer(self, request: messages.ClientRequest, client: Client) -> messages.Reply:
        if isinstance(request, messages.Push):
            return await self.pushes.push(request, client.tenant)
        self.asked.append(plain(request))
        if getattr(request, "question", "") == "slow":
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        found = (reply for wanted, reply in self.replies if wanted == plain(request))
        return msgspec.structs.replace(next(found, self.otherwise), id=request.id)

    async def start(self, port: int = 0) -> "Daemon":
        await self.source.start()
        answer = queries(
            lambda request, client: lambda: self.answer(request, client), 20.0, access=self.access
        ).answer
        if self.transport == "zeromq":
            own = Keys(PUBLIC, SECRET, PUBLIC) if self.access.required else None
            where = f"tcp://127.0.0.1:{port or '*'}"
            self.server = QueryServer(
                answer, where, events=self.events, store=self.store, access=self.access, keys=own
            )
        else:
            routes = api_routes(
                Requests(answer),
                self.events,
                self.pushes,
                lambda client: health_of([], [], "tape", spare=False),
                self.access,
            )
            self.server = HttpServer(
                lambda names: b"", list, more=routes, closing=self.events.close, access=self.access,
                port=port, tls=self.tls,
            )  # fmt: skip
        await self.server.start(Tasks())
        return self

    @property
    def address(self) -> str:
        if self.transport == "zeromq":
            return str(self.server.endpoint)
        return f"{'https' if self.tls else 'http'}://localhost:{self.server.port}"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def keys(self) -> Any:
        return (CURVE if self.transport == "zeromq" else DESK) if self.access.required else None

    def publish(self, n: int, session: str = "s") -> None:
        self.events.publish(FlashReady(session=session, data_version=n, as_of=0, answers=1))
