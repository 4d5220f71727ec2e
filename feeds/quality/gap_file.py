"""What is usual for the symbols of a source, in a file: a daemon that starts again knows it at once."""

import logging
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from feeds.decoding import Undecodable, decoded
from feeds.quality.silence import BUCKETS, HOURS, Counts, SilenceMonitor
from support.durable_file import replacing

log = logging.getLogger(__name__)

EVERY_NS = 600 * 10**9
"""How often it is written, monotonic clock."""
_MOST = 10_000
"""Symbols in a file; those that this daemon reads come first."""
_PLACES = HOURS * BUCKETS


class _Symbol(msgspec.Struct, frozen=True, array_like=True):
    """Which counts of [HOURS, BUCKETS] are not 0, as uint16, and these, as uint32."""

    places: bytes
    counts: bytes


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    buckets: int
    symbols: dict[str, _Symbol]


_decode = msgspec.msgpack.Decoder(_Content).decode


class GapFile:
    """The file of one source's `SilenceMonitor`, which goes on from it.

    An unusable file costs what was learnt, and nothing else. ``now_ns``: monotonic clock.
    """

    def __init__(self, path: Path, monitor: SilenceMonitor, now_ns: int) -> None:
        self._path, self._monitor, self._written_ns = path, monitor, now_ns
        self._monitor.restore({name: partial(_counts, each) for name, each in self._stored().items()})

    def is_due(self, now_ns: int) -> bool:
        """Whether to `save` now; then not again before `EVERY_NS`."""
        if now_ns - self._written_ns < EVERY_NS:
            return False
        self._written_ns = now_ns
        return True

    def save(self) -> None:
        """Write what the monitor has learnt; symbols that it does not read stay as they are. Any thread."""
        symbols = {name: _packed(counts) for name, counts in self._monitor.learnt().items()}
        for name, each in self._stored().items():
            if len(symbols) < _MOST:
                symbols.setdefault(name, each)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as file:
                file.write(msgspec.msgpack.encode(_Content(_PLACES, symbols)))
        except OSError as error:
            log.warning("what is usual for symbols could not be written: %s", error)

    def _stored(self) -> dict[str, _Symbol]:
        try:
            found = decoded(_decode, self._path.read_bytes())
            usable = found.buckets == _PLACES and all(map(_is_whole, found.symbols.values()))
        except FileNotFoundError:
            return {}
        except (OSError, Undecodable) as error:
            log.warning("what is usual for symbols is not known: %s: %s", self._path, error)
            return {}
        return found.symbols if usable else {}


def _packed(counts: Counts) -> _Symbol:
    flat = counts.reshape(-1)
    places = np.flatnonzero(flat)
    return _Symbol(places.astype("<u2").tobytes(), flat[places].astype("<u4").tobytes())


def _counts(symbol: _Symbol) -> Counts:
    flat = np.zeros(_PLACES, np.uint32)
    flat[np.frombuffer(symbol.places, "<u2")] = np.frombuffer(symbol.counts, "<u4")
    return flat.reshape(HOURS, BUCKETS)


def _is_whole(symbol: _Symbol) -> bool:
    """Whether it has a count for each place, and each place is one."""
    if len(symbol.places) % 2 or 2 * len(symbol.places) != len(symbol.counts):
        return False
    return bool((np.frombuffer(symbol.places, "<u2") < _PLACES).all())
