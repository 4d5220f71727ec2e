"""A bound ROUTER socket, with CURVE where it has keys. It sends without ever waiting for a peer to read."""

import asyncio
from collections.abc import Sequence

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from daemon.api.auth import Access
from feeds.curve import Keys
from support.inherited_sockets import inherited_socket

# libzmq closes the connection when a frame exceeds the limit by this much, without reading it into
# memory. Shorter ones get an error that says why.
_HARD_LIMIT_FACTOR = 4
_CLOSE_LINGER_MS = 500
_DOMAIN = "foretick"
_NO_CURVE = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_PINGED_MS, _GONE_MS = 5_000, 15_000
"""libzmq pings idle connections, and closes those without an answer."""

Route = Sequence[bytes]
"""The peer's identity, then REQ's empty delimiter if any; what is sent back begins with both."""


class _Admitting:
    """ZAP's question whether a public key may connect."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def callback(self, domain: str, key: bytes) -> bool:
        """As pyzmq asks it. ``key``: Z85."""
        del domain
        known = self._access.tenants.holder(key.decode()) is not None
        if not known:
            self._access.refused("zeromq", "unknown")
        return known


class RouterSocket:
    """One endpoint; ``endpoint`` has the real port in place of 0 or * once it is bound.

    ``max_bytes``: of a request. ``keys``: for CURVE; then ``access`` says whose keys may connect.
    """

    def __init__(self, endpoint: str, max_bytes: int, access: Access, keys: Keys | None) -> None:
        self.endpoint, self._max_bytes, self._access, self._keys = endpoint, max_bytes, access, keys
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._authenticator: AsyncioAuthenticator | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._watching: asyncio.Task[None] | None = None

    async def bind(self) -> None:
        """Raises OSError when the address cannot be bound.

        Where the service manager passes a socket by the name `query`, that is it, whatever the endpoint says.
        """
        self._context = zmq.asyncio.Context()
        self._socket = socket = self._context.socket(zmq.ROUTER)
        if self._keys is not None:
            self._encrypt(socket, self._keys, self._context)
        for option, value in (
            (zmq.LINGER, _CLOSE_LINGER_MS),
            (zmq.MAXMSGSIZE, self._max_bytes * _HARD_LIMIT_FACTOR),
            (zmq.IPV6, int("[" in self.endpoint)),
            # sending says when a client is gone or does not read, in place of dropping the message
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.HEARTBEAT_IVL, _PINGED_MS),
            (zmq.HEARTBEAT_TIMEOUT, _GONE_MS),
        ):
            socket.setsockopt(option, value)
        if (passed := inherited_socket("query", keyed=self._access.required)) is not None:
            socket.setsockopt(zmq.USE_FD, passed.detach())
        try:
            socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            await self.close()
            why = f"cannot bind the query socket to {self.endpoint}: {zmq.strerror(error.errno or 0)}"
            raise OSError(error.errno, why) from None
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> tuple[list[bytes], str]:
        """The next message's frames, and the public key that its connection has proven to hold."""
        assert self._socket is not None  # it is bound
        if self._keys is None:
            return await self._socket.recv_multipart(), ""
        frames: list[zmq.Frame] = await self._socket.recv_multipart(copy=False)
        try:
            user = str(frames[-1].get("User-Id"))
        except zmq.ZMQError:
            user = ""
        return [frame.bytes for frame in frames], user

    def send(self, route: Route, payload: bytes) -> bool | None:
        """Whether it was sent; None: there is no room, since the client does not read."""
        if self._socket is None:
            return False
        try:
            # done at once, as no sender ever waits: the future's result is an exception or nothing
            done = self._socket.send_multipart([*route, payload], zmq.NOBLOCK)
            assert isinstance(done, asyncio.Future)
            done.result()
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    async def close(self) -> None:
        """Close it; what was sent goes out for half a second at most."""
        if self._socket is not None and self._context is not None:
            if self._watching is not None:
                self._watching.cancel()
                await asyncio.gather(self._watching, return_exceptions=True)
            if self._monitor is not None:
                # not by the task, which may never have begun; an open one would keep the context from ending
                self._monitor.close(0)
                self._socket.disable_monitor()
            self._socket.close()
            if self._authenticator is not None:
                self._authenticator.stop()
            await asyncio.to_thread(self._context.term)
        self._socket = self._context = self._authenticator = self._watching = self._monitor = None

    def _encrypt(self, socket: zmq.asyncio.Socket, keys: Keys, context: zmq.asyncio.Context) -> None:
        """Ask for keys. A context has one authenticator, which must run before the socket is bound."""
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, _Admitting(self._access))
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        # a peer without CURVE does not get as far as the authenticator
        self._monitor = socket.get_monitor_socket(_NO_CURVE)
        self._watching = asyncio.create_task(
            self._watch(self._monitor), name="handshakes of the query socket"
        )

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            await monitor.recv_multipart()
            self._access.refused("zeromq", "missing")
