"""What a recorded file is packed in: nothing, gzip, zip or zstd, told by its first bytes."""

import gzip
import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

import zstandard

_GZIP, _ZIP, _ZSTD = b"\x1f\x8b", b"PK", b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 16

Opened = Callable[[BinaryIO], object]
"""Gets the file as it lies on the disk: its position tells how far reading has come."""


class Corrupt(ValueError):
    """The file cannot be unpacked any further; the message says why."""


def texts(path: Path, opened: Opened | None = None) -> Iterator[tuple[str, IO[bytes]]]:
    """The files in ``path`` by name: those of a zip archive in its own order, else ``path`` alone.

    Raises:
        OSError: the file cannot be opened. Corrupt: it cannot be unpacked; `unpacking` says the same while
        a text is read.
    """
    with ExitStack() as open_files:
        raw = open_files.enter_context(path.open("rb"))
        if opened is not None:
            opened(raw)
        start = raw.read(4)
        raw.seek(0)
        with unpacking():
            if start.startswith(_ZIP):
                archive = open_files.enter_context(zipfile.ZipFile(raw))
                for member in archive.infolist():
                    if not member.is_dir():
                        with archive.open(member) as text:
                            yield member.filename, text
            elif start.startswith(_GZIP):
                # unbuffered: what precedes a damage is read before it raises
                yield path.name, cast(IO[bytes], gzip.GzipFile(fileobj=raw))
            elif start == _ZSTD:
                yield path.name, io.BufferedReader(_Zstd(raw))
            else:
                yield path.name, raw


@contextmanager
def unpacking() -> Iterator[None]:
    """Turns what the libraries raise for a broken archive into `Corrupt`."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Corrupt(f"the gzip or zip stream is truncated or corrupt: {error}") from error
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise Corrupt(f"the zip archive cannot be read: {error}") from error
    except RuntimeError as error:  # zipfile's word for a missing password
        if "password" not in str(error):
            raise
        raise Corrupt(f"the zip archive is encrypted: {error}") from error
    except zstandard.ZstdError as error:
        raise Corrupt(f"the zstd stream is truncated or corrupt: {error}") from error


class _Zstd(io.RawIOBase):
    """Zstd frames one after the other; the library's own reader takes a truncated file for a short one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._packed, self._text = b"", memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: object, /) -> int:
        """Unpack into ``buffer``; 0 at the end. Raises ZstdError."""
        into = memoryview(buffer)  # type: ignore[arg-type]  # io passes a writable buffer
        while not self._text:
            self._packed = self._packed or self._raw.read(_CHUNK)
            if not self._packed:
                if self._frame is not None:
                    raise zstandard.ZstdError("it ends within a frame")
                return 0
            frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._text = memoryview(frame.decompress(self._packed))
            self._packed, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        size = min(len(into), len(self._text))
        into[:size], self._text = self._text[:size], self._text[size:]
        return size
