"""Bodies that clients have packed: read within a limit that counts what they hold, not what they send."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterable

from feeds.zstd import zstd

ACCEPTED = "gzip, deflate, zstd"
"""What `Accept-Encoding` says of requests."""
_ALIASES = {"x-gzip": "gzip"}
_WINDOW_LOG = 23
"""Memory that a decoder of zstd needs at most, as a power of two; RFC 9659 sets this limit for HTTP."""

Unpack = Callable[[bytes, int], bytes | None]


class UnknownCoding(ValueError):
    """A body is packed in a way that is not read here."""


class CorruptBody(ValueError):
    """A body is not what its coding says, or its end is missing."""


def coding_of(values: Iterable[bytes]) -> str:
    """The coding that `Content-Encoding` headers of these values name; "" for none. Raises UnknownCoding."""
    named = [each.strip().lower() for value in values for each in value.decode("latin-1").split(",")]
    codings = [_ALIASES.get(each, each) for each in named if each not in ("", "identity")]
    if not codings:
        return ""
    if len(codings) > 1:
        raise UnknownCoding(f"a body has one content coding at most, not {len(codings)}: {ACCEPTED}")
    if codings[0] not in _UNPACK:
        raise UnknownCoding(f"content coding {codings[0][:32]!r} is not one of {ACCEPTED}")
    return codings[0]


def unpacked(body: bytes, coding: str, max_bytes: int) -> bytes | None:
    """What ``body`` holds; None where that is more than ``max_bytes``. Raises Corrupt."""
    try:
        return _UNPACK[coding](body, max_bytes)
    except EOFError:
        raise CorruptBody(f"the body's {coding} has no end") from None
    except (OSError, zlib.error, zstd.ZstdError) as error:
        raise CorruptBody(f"the body is not {coding}: {error}") from None


def _gunzip(body: bytes, max_bytes: int) -> bytes | None:
    if not body:  # which Python takes for a file of no members
        raise EOFError
    with gzip.GzipFile(fileobj=io.BytesIO(body)) as stream:
        found = stream.read(max_bytes + 1)
    return found if len(found) <= max_bytes else None


def _inflate(body: bytes, max_bytes: int) -> bytes | None:
    """Zlib's format, as HTTP's `deflate` is, or the bare stream that some send in its name."""
    wrapped = len(body) > 1 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    stream = zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
    found = stream.decompress(body, max_bytes + 1)
    if len(found) > max_bytes:
        return None
    if not stream.eof:
        raise EOFError
    if stream.unused_data:
        raise zlib.error(f"{len(stream.unused_data)} bytes are behind its end")
    return found


def _unzstd(body: bytes, max_bytes: int) -> bytes | None:
    """One frame or more."""
    found, rest = b"", body
    while True:
        frame = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
        found += frame.decompress(rest, max_bytes + 1 - len(found))
        if len(found) > max_bytes:
            return None
        if not frame.eof:
            raise EOFError
        if not (rest := frame.unused_data):
            return found


_UNPACK: dict[str, Unpack] = {"gzip": _gunzip, "deflate": _inflate, "zstd": _unzstd}
