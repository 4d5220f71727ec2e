"""`[source.zeromq]` and `[sink.zeromq]`."""

from collections.abc import Mapping
from typing import Annotated

from feeds.connector import SOCKET, Route, SinkConnector, SourceConnector, about
from feeds.source import Source


class ZmqSourceConnector(SourceConnector, frozen=True):
    """A SUB socket. When the ring is full, the oldest records are dropped and counted."""

    endpoint: Annotated[str, about("tcp://host:port or ipc://path", pattern=SOCKET)]
    bind: Annotated[bool, about("bind the endpoint instead of connecting to it")] = False
    topics: Annotated[
        tuple[str, ...], about('topic prefixes to subscribe to; "" is everything', min_length=1)
    ] = ("",)
    hwm: Annotated[int, about("most messages that ZeroMQ itself queues", ge=1)] = 100_000

    def bound(self) -> Mapping[str, str]:
        """The endpoint, if this source binds it."""
        return {"endpoint": self.endpoint} if self.bind else {}

    def open(self, name: str, stop_timeout_s: float) -> Source:
        """A subscriber; it stops at once."""
        from feeds.zeromq import ZmqSource

        return ZmqSource(name, self.endpoint, self.topics, bind=self.bind, rcvhwm=self.hwm)


class ZmqSinkConnector(SinkConnector, frozen=True):
    """Publishes answers on a ZeroMQ PUB socket."""

    endpoint: Annotated[str, about("tcp://host:port or ipc://path", pattern=SOCKET)]
    bind: Annotated[bool, about("bind the endpoint instead of connecting to it")] = True

    def bound(self) -> Mapping[str, str]:
        """The endpoint, if this sink binds it."""
        return {"endpoint": self.endpoint} if self.bind else {}

    def open(self, name: str, stop_timeout_s: float) -> Route:
        """A publisher with a topic for each kind of message; it stops at once."""
        from feeds.zeromq import ZmqSink

        sink = ZmqSink(name, self.endpoint, bind=self.bind)
        return Route(sink, "answers.v1", "data_updated.v1", "dlq.v1", "flash_ready.v1")


SOURCE, SINK = ZmqSourceConnector, ZmqSinkConnector
