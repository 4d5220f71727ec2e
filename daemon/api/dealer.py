"""How a client connects to the query socket: a DEALER, encrypted if it has keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import zmq

from daemon.api.messages import QueryError

S = TypeVar("S", bound="zmq.Socket[Any]")
_PINGED_MS, _GONE_MS = 5_000, 15_000
"""libzmq pings an idle connection, and makes a new one when nothing comes back."""


class CurvePair(Protocol):
    """CURVE keys in Z85: the daemon's public key, and the client's own pair."""

    @property
    def server(self) -> bytes:
        """The daemon's."""

    @property
    def public(self) -> bytes:
        """The client's."""

    @property
    def secret(self) -> bytes:
        """Its other half."""


@dataclass(frozen=True)
class ClientKeys:
    """A `CurvePair` from files."""

    server: bytes
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"ClientKeys({self.public.decode()})"

    @classmethod
    def read(cls, server_key_file: str | Path, secret_key_file: str | Path) -> ClientKeys:
        """From `foretick keys`: the daemon's NAME.public, the client's NAME.secret. Raises QueryError."""
        try:
            server, secret = (Path(each).read_bytes().strip() for each in (server_key_file, secret_key_file))
            return cls(server, zmq.curve_public(secret), secret)
        except (OSError, ValueError, zmq.ZMQError) as error:
            raise QueryError("bad_request", f"the keys cannot be read: {error}") from None


def connect(context: zmq.Context[S], endpoint: str, keys: CurvePair | None, identity: bytes = b"") -> S:
    """A socket that connects, now or as soon as the daemon is there. Raises QueryError, and ends ``context``.

    ``identity``: the connection's name at the daemon, unique among its clients; by default it gets one.
    """
    # DEALER, not REQ: the socket stays usable after a timeout, and the id identifies a late reply
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PINGED_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _GONE_MS)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    try:
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        context.term()
        why = f"{endpoint} is not an address to connect to: {error.strerror}"
        raise QueryError("bad_request", why) from None
    return socket
