"""How a client connects to the query socket: a DEALER, encrypted if it has keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

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


def connect(
    context: zmq.Context[S], endpoint: str, keys: CurvePair | None, identity: bytes = b""
) -> tuple[S, Handshakes[S]]:
    """A socket that connects, now or as soon as the daemon is there, and how its handshakes end.

    Raises QueryError, and ends ``context``.
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
    # before it connects: libzmq tries no second time after a refusal, so none may be missed
    handshakes = Handshakes(socket, endpoint, keys)
    try:
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        handshakes.close()
        socket.close()
        context.term()
        why = f"{endpoint} is not an address to connect to: {error.strerror}"
        raise QueryError("bad_request", why) from None
    return socket, handshakes


class Handshakes(Generic[S]):
    """How the handshakes of a connection end, which its socket does not say.

    ``events``: a socket that has them as messages.
    """

    def __init__(self, socket: S, endpoint: str, keys: CurvePair | None) -> None:
        self._socket, self._endpoint, self._keys = socket, endpoint, keys
        kinds = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        kinds |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        address = f"inproc://handshakes-{id(self)}"
        socket.monitor(address, kinds)
        self.events: S = socket.context.socket(zmq.PAIR)
        self.events.setsockopt(zmq.RCVHWM, 0)  # else libzmq waits for a reader, also as the socket is closed
        self.events.connect(address)
        self.refused = ""
        """Why there is no connection, as long as none has succeeded since."""
        self.doubt = "; is a daemon running there?"
        """What may be wrong, as long as none has succeeded since."""

    def note(self, frames: list[bytes]) -> None:
        """Take one of the ``events``."""
        event, daemon = parse_monitor_message(frames), f"the daemon at {self._endpoint}"
        match event["event"], event["value"]:
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                asks = "asks for keys: give yours, and its public one"
                what = asks if self._keys is None else "takes no keys: connect without"
                self.refused = f"{daemon} {what}"
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH, _:
                self.refused = f"{daemon} does not know this key"
            case zmq.EVENT_HANDSHAKE_SUCCEEDED, _:
                self.refused = self.doubt = ""
            case _:
                self.doubt = "; its connections end during the handshake"
                if self._keys is not None:
                    self.doubt += ", as where the server key is not the daemon's"

    def check(self) -> None:
        """Raises QueryError where there is no connection, and will be none."""
        if self.refused:
            raise QueryError("unauthenticated", self.refused)

    def no_reply(self, within_s: float) -> QueryError:
        """What is wrong when nothing came in time."""
        return QueryError("timeout", f"no reply from {self._endpoint} within {within_s:g} s{self.doubt}")

    def close(self) -> None:
        """Watch no longer; before the socket is closed."""
        self._socket.disable_monitor()
        self.events.close(0)
