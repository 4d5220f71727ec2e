"""A reply that is written while it comes, and what an API must tell of itself to be served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from daemon.api.api_errors import ApiError
from daemon.api.generation import Event, Finished, Generate, ModelCatalog

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class ReplyIdentity:
    """What a reply says of itself: ``key`` is random and makes its ids, ``created`` Unix time in seconds."""

    key: str
    created: int
    model: str
    fingerprint: str


class Writer(Protocol):
    """Writes a stream as bytes."""

    def write(self, index: int, event: Event) -> Iterator[bytes]:
        """An answer begins, goes on, or is whole. ``index``: of the answer."""

    def end(self) -> Iterator[bytes]:
        """All are."""

    def failed(self, problem: ApiError) -> Iterator[bytes]:
        """The stream has ended."""

    def ping(self) -> bytes:
        """Keeps a connection open."""


Asked = TypeVar("Asked", contravariant=True)


class Api(Protocol[Asked]):
    """One endpoint that generates: pure translation from its ``request`` and to its ``reply``.

    A request has the members ``model`` and ``stream``. ``harmless``: members that are not supported, and the
    values of each that are served beside null, because they change nothing.
    """

    name: str
    path: str
    summary: str
    request: type[Any]
    reply: type[Any]
    harmless: dict[str, tuple[Any, ...]]

    def wanted(self, asked: Asked, served: ModelCatalog) -> list[Generate]:
        """What to generate. Raises ApiError."""

    def whole(self, asked: Asked, made: ReplyIdentity, done: Sequence[Finished]) -> msgspec.Struct:
        """The reply at once."""

    def writer(self, asked: Asked, made: ReplyIdentity) -> Writer:
        """The reply as a stream."""

    def error(self, problem: ApiError) -> dict[str, Any]:
        """The body of an error."""


def sse(data: msgspec.Struct | dict[str, Any], event: str = "") -> bytes:
    """A server-sent event."""
    named = f"event: {event}\n".encode() if event else b""
    return named + b"data: " + encode(data) + b"\n\n"
