"""`[source.zeromq]` and `[sink.zeromq]`."""

from collections.abc import Iterator, Mapping
from typing import Annotated

from feeds.connector import (
    SOCKET,
    Finding,
    SettingError,
    SinkConnector,
    SinkRoute,
    about,
    settings_in,
)
from feeds.curve import CurveKeys, Keys
from feeds.payloads.settings import MessageSource
from feeds.source import Source


class ZmqSourceConnector(MessageSource, frozen=True):
    """A SUB socket. When the ring is full, the oldest records are dropped and counted."""

    endpoint: Annotated[str, about("tcp://host:port or ipc://path", pattern=SOCKET)]
    bind: Annotated[bool, about("bind the endpoint instead of connecting to it")] = False
    topics: Annotated[
        tuple[str, ...], about('topic prefixes to subscribe to; "" is everything', min_length=1)
    ] = ("",)
    hwm: Annotated[int, about("most messages that ZeroMQ itself queues", ge=1)] = 100_000
    curve: CurveKeys = CurveKeys()

    def bound(self) -> Mapping[str, str]:
        """The endpoint, if this source binds it."""
        return {"endpoint": self.endpoint} if self.bind else {}

    def authenticates(self) -> bool:
        """Whether clients need a key."""
        return self.curve.secret_key_file != ""

    def open(self, name: str, stop_timeout_s: float) -> Source:
        """A subscriber; it stops at once."""
        from feeds.zmq_feed import ZmqSource

        keys = _keys(self.curve, self.bind)
        return ZmqSource(name, self.endpoint, self.topics, bind=self.bind, rcvhwm=self.hwm, keys=keys)

    def check(self) -> Iterator[Finding]:
        """The keys and the formats can be used."""
        yield from _check(self.curve, self.bind)
        yield from self.check_formats()


class ZmqSinkConnector(SinkConnector, frozen=True):
    """Publishes answers on a ZeroMQ PUB socket."""

    endpoint: Annotated[str, about("tcp://host:port or ipc://path", pattern=SOCKET)]
    bind: Annotated[bool, about("bind the endpoint instead of connecting to it")] = True
    hwm: Annotated[
        int, about("most messages that ZeroMQ itself queues for one subscriber; it drops further ones", ge=1)
    ] = 100_000
    curve: CurveKeys = CurveKeys()

    def bound(self) -> Mapping[str, str]:
        """The endpoint, if this sink binds it."""
        return {"endpoint": self.endpoint} if self.bind else {}

    def authenticates(self) -> bool:
        """Whether clients need a key."""
        return self.curve.secret_key_file != ""

    def open(self, name: str, stop_timeout_s: float) -> SinkRoute:
        """A publisher with a topic for each kind of message; it stops at once."""
        from feeds.zmq_feed import ZmqSink

        sink = ZmqSink(
            name, self.endpoint, bind=self.bind, sndhwm=self.hwm, keys=_keys(self.curve, self.bind)
        )
        return SinkRoute(sink, "answers.v1", "data_updated.v1", "dlq.v1", "flash_ready.v1", "signals.v1")

    def check(self) -> Iterator[Finding]:
        """The keys can be used."""
        return _check(self.curve, self.bind)


def _keys(curve: CurveKeys, bind: bool) -> Keys | None:
    with settings_in("curve"):
        return curve.read(bind)


def _check(curve: CurveKeys, bind: bool) -> Iterator[Finding]:
    try:
        if keys := _keys(curve, bind):
            yield Finding("curve", f"CURVE, public key {keys.public.decode()}")
    except SettingError as error:
        yield Finding(error.key, error.message, ok=False)


SOURCE, SINK = ZmqSourceConnector, ZmqSinkConnector
