"""What sessions keep of their newest versions, in files: a daemon that starts again goes on from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from daemon.gateway.answer_cache import Sessions
from support.durable_file import replacing

log = logging.getLogger(__name__)

EVERY_S = 600.0
"""How often what has changed is written."""


class _Content(msgspec.Struct, frozen=True, array_like=True):
    format: Literal[1]
    versions: list[bytes]


_decode = msgspec.msgpack.Decoder(_Content).decode


class PastFiles:
    """A file for each session in ``directory``. ``serves(session)``: it is answered here, its file is ours.

    One that cannot be read or written costs the past of its session, and nothing else. On the event loop.
    """

    def __init__(self, directory: Path, sessions: Sessions, serves: Callable[[str], bool]) -> None:
        self._directory, self._sessions, self._serves = directory, sessions, serves
        self._saved: dict[str, int] = {}
        """Revision of what each file has."""

    def restore(self) -> None:
        """Have what was kept when it was last written. Before the first version."""
        for name, state in self._sessions.states.items():
            try:
                state.past.restore(_decode(self._path(name).read_bytes()).versions)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:  # msgspec's are ValueErrors
                why = f"{self._path(name)}: {error}"
                log.warning("%s: what was answered before is not known: %s", name, why)
            else:
                self._saved[name] = state.past.revision

    async def run(self) -> None:
        """Write what has changed now and then, until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.save()

    async def save(self) -> None:
        """Write what has changed; the file of a session that was removed goes."""
        states = self._sessions.states
        changed = {
            name: (state.past.revision, state.past.packed())
            for name, state in states.items()
            if state.past.span[1] and state.past.revision != self._saved.get(name) and self._serves(name)
        }
        gone = [name for name in self._saved if name not in states]
        if not changed and not gone:
            return
        try:
            await asyncio.to_thread(self._write, {name: kept for name, (_, kept) in changed.items()}, gone)
        except OSError as error:
            log.warning("what was answered before could not be written: %s", error)
            return
        self._saved = {name: revision for name, revision in self._saved.items() if name in states}
        self._saved |= {name: revision for name, (revision, _) in changed.items()}

    def _path(self, session: str) -> Path:
        return self._directory / f"{session}.past"

    def _write(self, changed: Mapping[str, Sequence[bytes]], gone: Iterable[str]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for name, versions in changed.items():
            with replacing(self._path(name)) as file:
                file.write(msgspec.msgpack.encode(_Content(1, list(versions))))
        for name in gone:
            self._path(name).unlink(missing_ok=True)
