"""`[source.replay]`."""

from collections.abc import Iterator
from datetime import date as Date
from glob import has_magic
from pathlib import Path
from typing import Annotated, ClassVar

from feeds.connector import Finding, SettingError, SourceConnector, about
from feeds.containers import CorruptFile, texts
from feeds.file_format import FileFormat, FormatError, load_format
from feeds.source import Source
from feeds.timestamps import Instant


class ReplayConnector(SourceConnector, frozen=True, rename={"from_": "from"}):
    """Plays a file as if it were live."""

    live: ClassVar[bool] = False

    file: Annotated[
        str,
        about(
            "the recorded file; or a folder or a pattern, such as trades/*.parquet, all of whose files are "
            "played by time",
            min_length=1,
        ),
    ]
    format: Annotated[str, about("name of a built-in format, or the TOML file of another", min_length=1)]
    speed: Annotated[
        float, about("seconds of event time per second; 1 is real time, 0 does not wait", ge=0)
    ] = 1.0
    from_: Annotated[Instant | None, about("first event time to play, with a zone")] = None
    until: Annotated[Instant | None, about("event time at which to stop, with a zone")] = None

    date: Annotated[
        str,
        about(
            "of a file whose times count from midnight, such as 2020-01-02; "
            '"" takes it from the file\'s name, as its format declares',
            pattern=r"^$|^\d{4}-\d{2}-\d{2}$",
        ),
    ] = ""

    def open(self, name: str, stop_timeout_s: float) -> Source:
        """A source that plays the file; it stops at once."""
        from feeds.replay_source import ReplaySource

        form = self._file_format()

        return ReplaySource(
            name,
            Path(self.file),
            form,
            speed=self.speed,
            from_ns=self.from_,
            until_ns=self.until,
            day=self._day(),
        )

    def check(self) -> Iterator[Finding]:
        """The file exists and the format is known."""
        exists = Path(self.file).exists() or has_magic(self.file)
        yield Finding("file", self.file if exists else "no such file", ok=exists)
        try:
            form = self._file_format()
            yield Finding("format", self.format)
            for file in self._files(form) if exists else [Path(self.file)]:
                if day := self._day() or self._named_day(file, form):
                    yield Finding("date", f"times count from midnight of {day}")
                if exists:
                    yield from self._look(file, form)
        except SettingError as error:
            yield Finding(error.key, error.message, ok=False)

    def _files(self, form: FileFormat) -> list[Path]:
        from feeds.merged_files import files_of

        try:
            return files_of(Path(self.file), form.members)
        except OSError as error:
            raise SettingError("file", str(error)) from error

    def _look(self, file: Path, form: FileFormat) -> Iterator[Finding]:
        """What a file's beginning and end say, held against its format."""
        from feeds.recorded_file import look

        notices: list[str] = []
        try:
            look(file, form, notices.append, to_end=True)
        except (OSError, CorruptFile, FormatError) as error:
            yield Finding("file", str(error), ok=False)
        for notice in notices:
            yield Finding("file", notice)

    def _day(self) -> Date | None:
        """The day that the settings give."""
        try:
            return Date.fromisoformat(self.date) if self.date else None
        except ValueError as error:
            raise SettingError("date", str(error)) from error

    def _named_day(self, file: Path, form: FileFormat) -> Date | None:
        """The day in the name of a file, or of the first file in its archive."""
        try:
            files = texts(file, members=form.members, table=not form.is_text)
            name = next((name for name, _ in files), "")
            return form.date_of(file.name, name)
        except (OSError, CorruptFile):
            return None
        except FormatError as error:
            raise SettingError("date", str(error)) from error

    def _file_format(self) -> FileFormat:
        try:
            return load_format(self.format)
        except FormatError as error:
            raise SettingError("format", str(error)) from error


SOURCE = ReplayConnector
