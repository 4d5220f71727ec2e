"""When certificates are valid, read from files in PEM."""

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.S)
_VERSION, _UTC_TIME = 0xA0, 0x17


class Validity(NamedTuple):
    """First and last moment of a certificate."""

    begin: datetime
    end: datetime


def validities_in(path: Path) -> list[Validity]:
    """Of all certificates in a file in PEM. Raises OSError, ValueError."""
    try:
        found = [
            validity_of(ssl.PEM_cert_to_DER_cert(each)) for each in _PEM.findall(path.read_text("utf-8"))
        ]
    except IndexError:
        raise ValueError("a certificate is cut short") from None
    if not found:
        raise ValueError("holds no certificate in PEM")
    return found


def validity_of(der: bytes) -> Validity:
    """Read a certificate's validity (RFC 5280, 4.1). Raises ValueError, IndexError for other bytes."""
    element = _element(der, _element(der, _element(der, 0).start).start)
    if element.tag == _VERSION:
        element = _element(der, element.end)
    for _ in range(3):  # behind the serial number: algorithm, issuer, validity
        element = _element(der, element.end)
    begin = _element(der, element.start)
    return Validity(_time(der, begin), _time(der, _element(der, begin.end)))


class _Element(NamedTuple):
    """A tag of DER, and where its content is."""

    tag: int
    start: int
    end: int


def _element(der: bytes, place: int) -> _Element:
    length, start = der[place + 1], place + 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[place + 2 : start])
    return _Element(der[place], start, start + length)


def _time(der: bytes, element: _Element) -> datetime:
    form = "%y%m%d%H%M%SZ" if element.tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(der[element.start : element.end].decode("ascii"), form).replace(tzinfo=UTC)
