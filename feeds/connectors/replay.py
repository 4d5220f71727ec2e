"""`[source.replay]`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar

from feeds.connector import Finding, SettingError, SourceConnector, about
from feeds.file_format import FileFormat, FormatError, load_format
from feeds.source import Source
from feeds.timestamps import Instant


class ReplayConnector(SourceConnector, frozen=True, rename={"from_": "from"}):
    """Plays a file as if it were live."""

    live: ClassVar[bool] = False

    file: Annotated[str, about("the recorded file", min_length=1)]
    format: Annotated[str, about("name of a built-in format, or the TOML file of another", min_length=1)]
    speed: Annotated[
        float, about("seconds of event time per second; 1 is real time, 0 does not wait", ge=0)
    ] = 1.0
    from_: Annotated[Instant | None, about("first event time to play, with a zone")] = None
    until: Annotated[Instant | None, about("event time at which to stop, with a zone")] = None

    def open(self, name: str, stop_timeout_s: float) -> Source:
        """A source that plays the file; it stops at once."""
        from feeds.replay_source import ReplaySource

        return ReplaySource(
            name,
            Path(self.file),
            self._file_format(),
            speed=self.speed,
            from_ns=self.from_,
            until_ns=self.until,
        )

    def check(self) -> Iterator[Finding]:
        """The file exists and the format is known."""
        exists = Path(self.file).is_file()
        yield Finding("file", self.file if exists else "no such file", ok=exists)
        try:
            self._file_format()
            yield Finding("format", self.format)
        except SettingError as error:
            yield Finding(error.key, error.message, ok=False)

    def _file_format(self) -> FileFormat:
        try:
            return load_format(self.format)
        except FormatError as error:
            raise SettingError("format", str(error)) from error


SOURCE = ReplayConnector
