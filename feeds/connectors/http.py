"""`[source.http]`: records that clients push by `POST /v1/data`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from feeds.connector import Finding, SettingError, SourceConnector, about
from feeds.file_format import FormatError, names
from feeds.source import Source

if TYPE_CHECKING:
    from feeds.batch_body import BodyFormat


class HttpSourceConnector(SourceConnector, frozen=True):
    """Records that clients send to the daemon's HTTP port. A push that finds no room is refused, by 429."""

    max_waiting: Annotated[
        int, about("most records that wait to be read, and most in one request", ge=1, le=1 << 24)
    ] = 65_536
    max_body_bytes: Annotated[int, about("longest body of one request", ge=256)] = 1 << 20
    formats: Annotated[
        tuple[str, ...],
        about("TOML files of formats that requests may name, beside the built-in ones; named as their files"),
    ] = ()

    def open(self, name: str, stop_timeout_s: float) -> Source:
        """A queue; it stops at once."""
        from feeds.push_source import PushedSource, PushLimits

        return PushedSource(name, PushLimits(self.max_waiting, self.max_body_bytes, self._formats()))

    def listen(self, name: str, stop_timeout_s: float) -> Source:
        """Raises SettingError: what is pushed comes to the daemon alone."""
        raise SettingError(
            "", "records are pushed to the daemon: ask it, by foretick sessions or its metrics"
        )

    def check(self) -> Iterator[Finding]:
        """The formats can be used."""
        try:
            yield Finding("formats", ", ".join(self._formats()))
        except SettingError as error:
            yield Finding(error.key, error.message, ok=False)

    def _formats(self) -> "dict[str, BodyFormat]":
        from feeds.batch_body import BodyFormat

        built_in = *names(), *names(of_messages=True)
        try:
            return {Path(each).stem: BodyFormat.load(each) for each in (*built_in, *self.formats)}
        except FormatError as error:
            raise SettingError("formats", str(error)) from error


SOURCE = HttpSourceConnector
