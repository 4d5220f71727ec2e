"""The lines of a text by number, in its encoding; lines that cannot be decoded are refused."""

import codecs
import io
from collections.abc import Callable, Generator, Iterator
from typing import IO, cast

from feeds.codec import MalformedRecord

Refuse = Callable[[int, MalformedRecord], None]
"""Called for every line that is not a row: its number and what is wrong."""

Line = tuple[int, str]
"""Number, from 1, and text with its end."""

MAX_LINE = 1 << 26
"""Characters of one line; a longer one is refused without being held."""
_MARK = "\udcff"
"""Stands for bytes that cannot be decoded: no valid text has it."""
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LOOKED_AT = 1 << 12


class Unreadable(ValueError):
    """The text is in another encoding than the one that is declared; the message says which."""


def _mark(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return _MARK, error.end


_MARKED = "foretick.mark"
codecs.register_error(_MARKED, _mark)


def lines(file: IO[bytes], encoding: str, skip: int, refuse: Refuse) -> Generator[Line]:
    """Lines from the one behind the first ``skip``. A byte-order mark at the beginning decides the encoding.

    Raises:
        Unreadable: the text has zero bytes, as of UTF-16, and no mark.
    """
    start = _start(file)
    encoding = next((name for bom, name in _BOMS if start.startswith(bom)), encoding)
    if b"\0" in start and not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        raise Unreadable(_zeros(start, encoding))
    text = io.TextIOWrapper(file, encoding=encoding, errors=_MARKED, newline="")
    try:
        yield from _numbered(text, skip, refuse)
    finally:
        text.detach()  # whoever opened the file closes it


def _numbered(text: io.TextIOWrapper, skip: int, refuse: Refuse) -> Iterator[Line]:
    number = 0
    while line := text.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE and line[-1] not in "\r\n":
            while len(rest := text.readline(MAX_LINE)) == MAX_LINE and rest[-1] not in "\r\n":
                continue
            refuse(number, MalformedRecord("oversize", f"a line of more than {MAX_LINE} characters"))
        elif number <= skip:
            continue
        elif _MARK in line:
            refuse(number, MalformedRecord("encoding", f"the line is not {text.encoding}: {_around(line)}"))
        else:
            yield number, line


def _around(line: str) -> str:
    """What stands where a line cannot be decoded."""
    at = line.index(_MARK)
    return repr(line[max(0, at - 40) : at + 40].replace(_MARK, "\ufffd").strip())


def _start(file: IO[bytes]) -> bytes:
    """The first bytes, which are read again."""
    buffered = cast(io.BufferedReader, file)
    if not buffered.seekable():
        return buffered.peek(_LOOKED_AT)[:_LOOKED_AT]
    start = buffered.read1(_LOOKED_AT)  # one piece: the next may be damaged
    buffered.seek(0)
    return start


def _zeros(start: bytes, encoding: str) -> str:
    for name, at in (("utf-16-le", 1), ("utf-16-be", 0)):
        if start[at : at + 6 : 2] == b"\0\0\0":
            return f"the file looks like {name}, not like {encoding}: declare encoding = {name!r}"
    return f"the file has zero bytes, so it is no text in {encoding}"
