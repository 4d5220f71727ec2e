"""`[source.zeromq]` and `[sink.zeromq]`."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from feeds.connector import SOCKET, Route, SinkConnector, SourceConnector
from feeds.source import Source


class ZmqSourceConnector(SourceConnector, frozen=True):
    """A SUB socket. When the ring is full, the oldest records are dropped and counted."""

    endpoint: Annotated[str, Meta(pattern=SOCKET, description="tcp://host:port or ipc://path")]
    bind: Annotated[bool, Meta(description="bind the endpoint instead of connecting to it")] = False
    topics: Annotated[
        tuple[str, ...], Meta(min_length=1, description='topic prefixes subscribed; "" is everything')
    ] = ("",)
    hwm: Annotated[int, Meta(ge=1, description="messages ZeroMQ itself may queue")] = 100_000

    def bound(self) -> Mapping[str, str]:
        """The endpoint, unless it is only connected to."""
        return {"endpoint": self.endpoint} if self.bind else {}

    def open(self, name: str, stop_timeout_s: float) -> Source:
        """A subscriber; closing needs no time."""
        from feeds.zeromq import ZmqSource

        return ZmqSource(name, self.endpoint, self.topics, bind=self.bind, rcvhwm=self.hwm)


class ZmqSinkConnector(SinkConnector, frozen=True):
    """Publishes answers on a ZeroMQ PUB socket."""

    endpoint: Annotated[str, Meta(pattern=SOCKET, description="tcp://host:port or ipc://path")]
    bind: Annotated[bool, Meta(description="bind the endpoint instead of connecting to it")] = True

    def bound(self) -> Mapping[str, str]:
        """The endpoint, unless it is only connected to."""
        return {"endpoint": self.endpoint} if self.bind else {}

    def open(self, name: str, stop_timeout_s: float) -> Route:
        """A publisher with a topic for each kind of message; closing needs no time."""
        from feeds.zeromq import ZmqSink

        sink = ZmqSink(name, self.endpoint, bind=self.bind)
        return Route(sink, "answers.v1", "data_updated.v1", "dlq.v1")


SOURCE, SINK = ZmqSourceConnector, ZmqSinkConnector
