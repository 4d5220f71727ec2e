"""`[sink.jsonl]`: answers as lines of a file."""

from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Annotated

from feeds.connector import Finding, SinkConnector, SinkRoute, about
from feeds.source import SinkStopped


class JsonLinesConnector(SinkConnector, frozen=True):
    """Answers as lines of a file."""

    file: Annotated[str, about("where they are appended", min_length=1)]

    def check(self) -> Iterator[Finding]:
        """For `foretick check`."""
        there = Path(self.file).parent.is_dir()
        yield Finding("file", f"{self.file} {'has a folder' if there else 'has no folder'}", ok=there)

    def open(self, name: str, stop_timeout_s: float) -> SinkRoute:
        """The sink, not started; it takes answers, and no other messages."""
        return SinkRoute(JsonLines(name, Path(self.file)), answers="answers")


class JsonLines:
    """The sink."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self._path = name, path
        self._file: FileIO | None = None

    async def start(self) -> None:
        """Open the file."""
        self._file = FileIO(self._path, "a")

    async def publish(
        self, topic: str, key: bytes | None, payload: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """Append a message, which is JSON without line breaks."""
        if self._file is None:
            raise SinkStopped(self.name)
        self._file.write(payload + b"\n")

    async def stop(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
