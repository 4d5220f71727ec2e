"""CURVE for ZeroMQ sockets: keys in files, sockets that use them, and the count of refused peers."""

import asyncio
import contextlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from feeds.connector import SettingError, about
from feeds.secret_files import read_secret, write_secret

log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""Z85 of 32 bytes."""
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_FAILED |= zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(frozen=True)
class Keys:
    """Keys of one socket in Z85. ``server``: of the peer that it connects to; ``clients``: of those admitted.

    Without ``clients``, a socket that binds admits all who know its public key.
    """

    public: bytes
    secret: bytes
    server: bytes = b""
    clients: frozenset[bytes] = frozenset()

    def __repr__(self) -> str:
        return f"Keys({self.public.decode()})"


class CurveKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Encryption by keys of `foretick keys`. Without a secret key the socket is in the clear."""

    secret_key_file: Annotated[
        str, about("this side's NAME.secret; only its owner may read the file; needed for the other keys")
    ] = ""
    server_key_file: Annotated[
        str, about("NAME.public of the side that binds; needed by the side that connects")
    ] = ""
    client_key_files: Annotated[
        tuple[str, ...],
        about(
            "NAME.public of each client that may connect to this side, where it binds; "
            "empty admits all who know its public key"
        ),
    ] = ()

    def read(self, bind: bool) -> Keys | None:
        """The keys of a socket that binds or connects; None without a secret key. Raises SettingError."""
        if not self.secret_key_file:
            for key in ("server_key_file", "client_key_files"):
                if getattr(self, key):
                    raise SettingError(key, "needs secret_key_file")
            return None
        if bind and self.server_key_file:
            raise SettingError("server_key_file", "is for a side that connects: this one binds")
        if not bind and self.client_key_files:
            raise SettingError("client_key_files", "is for a side that binds: this one connects")
        if not bind and not self.server_key_file:
            raise SettingError("server_key_file", "missing: the key of the side that binds")
        secret = read_secret_key("secret_key_file", self.secret_key_file)
        server = b"" if bind else _public("server_key_file", self.server_key_file)
        clients = frozenset(_public("client_key_files", path) for path in self.client_key_files)
        return Keys(zmq.curve_public(secret), secret, server, clients)


def encrypt(socket: zmq.Socket[Any], keys: Keys) -> None:
    """Have a socket connect by CURVE, to the holder of ``keys.server``."""
    _set_keys(socket, keys)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)


def _set_keys(socket: zmq.Socket[Any], keys: Keys) -> None:
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)


@dataclass(frozen=True)
class _Admitted:
    """Whom an authenticator admits."""

    clients: frozenset[bytes]

    def callback(self, _domain: str, key: bytes) -> bool:
        return key in self.clients


class Guarded:
    """A socket with its keys, and a watch over handshakes. Without keys, a plain socket."""

    def __init__(self, name: str, keys: Keys | None, context: zmq.asyncio.Context | None) -> None:
        self.handshakes_failed = 0
        self._name, self._keys, self._context = name, keys, context
        self._own: zmq.asyncio.Context | None = None
        self._admitting: AsyncioAuthenticator | None = None
        self._watching: asyncio.Task[None] | None = None

    def open(self, kind: int, bind: bool) -> zmq.asyncio.Socket:
        """The socket, neither bound nor connected."""
        keys = self._keys
        if keys is not None and keys.clients:
            # one list of clients a context: sockets with different lists must not share one
            self._own = zmq.asyncio.Context()
            self._admitting = AsyncioAuthenticator(self._own)
            self._admitting.start()
            self._admitting.configure_curve_callback("*", _Admitted(keys.clients))
        socket = (self._own or self._context or zmq.asyncio.Context.instance()).socket(kind)
        if keys is None:
            return socket
        if bind:
            _set_keys(socket, keys)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            if keys.clients:
                socket.setsockopt(zmq.ZAP_DOMAIN, b"*")
        else:
            encrypt(socket, keys)
        monitor = socket.get_monitor_socket(_FAILED)
        self._watching = asyncio.create_task(self._watch(monitor), name=f"handshakes of {self._name}")
        return socket

    async def attach(self, socket: zmq.asyncio.Socket, endpoint: str, bind: bool) -> str:
        """Bind or connect; returns the endpoint in use. Raises zmq.ZMQError, after closing the socket."""
        try:
            if not bind:
                socket.connect(endpoint)
                return endpoint
            socket.bind(endpoint)
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError:
            await self.close(socket, 0)
            raise

    async def close(self, socket: zmq.asyncio.Socket, linger_ms: int) -> None:
        """Close; what was sent goes out for at most ``linger_ms``."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            socket.disable_monitor()
            self._watching = None
        socket.close(linger=linger_ms)
        if self._admitting is not None and self._own is not None:
            self._admitting.stop()
            await asyncio.to_thread(self._own.term)
            self._admitting = self._own = None

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        with monitor:
            await self._count(monitor)

    async def _count(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            self.handshakes_failed += 1
            if self.handshakes_failed == 1:
                log.warning(
                    "%s: a peer at %s has no valid key (%s)",
                    self._name,
                    event["endpoint"].decode(errors="replace"),
                    zmq.Event(event["event"]).name,
                )


def make_keys(name: Path) -> tuple[Path, Path]:
    """Write a new pair to NAME.public and NAME.secret, both of mode 0600; returns their paths.

    Raises:
        OSError: a file exists already, or cannot be written; then neither is there.
    """
    public, secret = zmq.curve_keypair()
    paths = [name.with_name(f"{name.name}.{end}") for end in ("public", "secret")]
    written: list[Path] = []
    try:
        for path, key in zip(paths, (public, secret), strict=True):
            write_secret(path, f"{key.decode()}\n")
            written.append(path)
    except OSError:
        for path in written:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise
    return paths[0], paths[1]


def read_secret_key(key: str, path: str) -> bytes:
    """The key in NAME.secret, which only its owner may read. Raises SettingError about ``key``."""
    return _checked(key, path, read_secret(key, path))


def key_pair(key: str, secret_file: str | Path, server_file: str | Path | None = None) -> Keys:
    """Keys of a socket that connects; by default to one that has the same pair. Raises SettingError."""
    secret = read_secret_key(key, str(secret_file))
    public = zmq.curve_public(secret)
    return Keys(public, secret, public if server_file is None else _public(key, str(server_file)))


def is_key(text: str) -> bool:
    """Whether a text is a key, public or secret."""
    return _KEY.fullmatch(text) is not None


def _public(key: str, path: str) -> bytes:
    try:
        return _checked(key, path, Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(key, f"{path} cannot be read: {error}") from error


def _checked(key: str, path: str, text: str) -> bytes:
    if not _KEY.fullmatch(text.strip()):
        raise SettingError(key, f"{path} holds no key of `foretick keys`")
    return text.strip().encode()
