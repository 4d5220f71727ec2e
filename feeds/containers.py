"""What a recorded file is packed in: nothing, gzip, zip or zstd, as its first bytes say."""

import gzip
import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

from feeds.zstd import zstd

_GZIP = b"\x1f\x8b\x08"
_ZIPS = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
"""Of an archive, an empty one, and one in several volumes. `PK` alone may begin a text: it is a ticker."""
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPED = b"\x2a\x4d\x18"
"""Behind any of the bytes 50 to 5f: a frame of zstd that holds no text."""
_OTHERS = {
    b"\xfd7zXZ\x00": "xz",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
    b"\x04\x22\x4d\x18": "lz4",
    b"PAR1\x15": "parquet",
    b"ARROW1\x00\x00": "arrow",
    b"DBN\x01": "dbn",
    b"DBN\x02": "dbn",
    b"DBN\x03": "dbn",
    b"\x89HDF\r\n\x1a\n": "hdf5",
    b"SQLite format 3\x00": "sqlite",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "an old office document",
}
"""Files that are known and not read, by their first bytes."""
_TABLES = ("parquet", "arrow", "dbn")
_TAR = slice(257, 262)
_HEAD = 512
_SYSTEM_FILES = frozenset(("thumbs.db", "desktop.ini"))

Opened = Callable[[BinaryIO], object]
"""Gets the file as it lies on the disk: its position tells how far reading has come."""


class CorruptFile(ValueError):
    """The file cannot be unpacked any further; the message says why."""


OnSkipped = Callable[[str], object]
"""Called with the name of each file of an archive that is no data."""


def texts(
    path: Path,
    opened: Opened | None = None,
    *,
    members: str = "",
    table: bool = False,
    skipped: OnSkipped | None = None,
) -> Iterator[tuple[str, IO[bytes]]]:
    """The files in ``path`` by name: those of a zip archive in its own order, else ``path`` alone.

    ``table``: it is read as a table, not as a text. Of an archive, files that a system added (``__MACOSX``,
    ``.DS_Store``) are skipped, and those that ``members``, such as ``*.csv``, does not match.

    Raises:
        OSError: the file cannot be opened. Corrupt: it cannot be unpacked; `unpacking` says the same while
        a text is read.
    """
    with ExitStack() as open_files:
        raw = open_files.enter_context(path.open("rb"))
        if opened is not None:
            opened(raw)
        start = raw.read(_HEAD)
        raw.seek(0)
        with unpacking():
            if not start.startswith(_ZIPS):
                yield path.name, _unpacked(raw, start, path.name, table)
                return
            archive = open_files.enter_context(zipfile.ZipFile(raw))
            for member in archive.infolist():
                if member.is_dir():
                    continue
                if not _is_data(member.filename, members):
                    if skipped is not None:
                        skipped(member.filename)
                    continue
                with archive.open(member) as text:
                    start = cast(io.BufferedReader, text).read1(_HEAD)  # one piece: the next may be damaged
                    text.seek(0)
                    yield member.filename, _unpacked(text, start, member.filename, table)


def _is_data(name: str, members: str) -> bool:
    """Whether a file of an archive may be data, by its name."""
    parts = PurePosixPath(name).parts
    if "__MACOSX" in parts or parts[-1].startswith(".") or parts[-1].lower() in _SYSTEM_FILES:
        return False
    return not members or fnmatchcase(parts[-1], members) or fnmatchcase(name, members)


def _unpacked(raw: IO[bytes], start: bytes, name: str, table: bool) -> IO[bytes]:
    """What is in a file that begins with ``start``. Raises Corrupt: its kind is known and not read."""
    if start.startswith(_GZIP):
        # unbuffered: what precedes a damage is read before it raises
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if start.startswith(_ZSTD) or (start[1:4] == _ZSTD_SKIPPED and 0x50 <= start[0] <= 0x5F):
        return cast(IO[bytes], zstd.ZstdFile(raw))
    kind = next((kind for magic, kind in _OTHERS.items() if start.startswith(magic)), "")
    if kind in _TABLES:
        if table:
            return raw
        raise CorruptFile(f"{name} is {kind}: declare container = '{kind}'")
    if start.startswith(b"BZh") and start[4:10] == b"1AY&SY":
        kind = "bzip2"
    elif start[_TAR] == b"ustar":
        kind = "a tar archive"
    elif start.startswith(_ZIPS):
        kind = "an archive in an archive"
    if kind:
        raise CorruptFile(f"{name} is {kind}, which is not read: unpack it into a text, gzip, zip or zstd")
    return raw


@contextmanager
def unpacking() -> Iterator[None]:
    """Turns what the libraries raise for a broken archive into `CorruptFile`."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError) as error:
        raise CorruptFile(f"the packed stream is truncated or corrupt: {error}") from error
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise CorruptFile(f"the zip archive cannot be read: {error}") from error
    except RuntimeError as error:  # zipfile's word for a missing password
        if "password" not in str(error):
            raise
        raise CorruptFile(f"the zip archive is encrypted: {error}") from error
