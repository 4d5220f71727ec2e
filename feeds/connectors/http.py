"""`[source.http]`: records that clients push by `POST /v1/data`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from feeds.connector import Finding, SettingError, SourceConnector, about, settings_in
from feeds.file_format import FormatError, names
from feeds.payloads.settings import RegistrySettings
from feeds.source import Source

if TYPE_CHECKING:
    from feeds.batch_body import BodyFormat
    from feeds.payloads.schema_registry import SchemaRegistry


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
    registry: RegistrySettings = RegistrySettings()

    def open(self, name: str, stop_timeout_s: float) -> Source:
        """A queue; it stops at once."""
        from feeds.push_source import PushedSource, PushLimits

        formats = self._formats(self._open_registry())
        return PushedSource(name, PushLimits(self.max_waiting, self.max_body_bytes, formats))

    def listen(self, name: str, stop_timeout_s: float) -> Source:
        """Raises SettingError: what is pushed comes to the daemon alone."""
        raise SettingError(
            "", "records are pushed to the daemon: ask it, by foretick sessions or its metrics"
        )

    def check(self) -> Iterator[Finding]:
        """The formats can be used, and the registry answers."""
        try:
            registry = self._open_registry()
            yield Finding("formats", ", ".join(self._formats(registry)))
        except SettingError as error:
            yield Finding(error.key, error.message, ok=False)
            return
        yield from self.registry.check(registry)

    def _open_registry(self) -> "SchemaRegistry | None":
        with settings_in("registry"):
            return self.registry.open()

    def _formats(self, registry: "SchemaRegistry | None") -> "dict[str, BodyFormat]":
        from feeds.batch_body import BodyFormat

        known = *names(), *names(of_messages=True), *self.formats
        try:
            return {Path(each).stem: BodyFormat.load(each, registry) for each in known}
        except FormatError as error:
            raise SettingError("formats", str(error)) from error


SOURCE = HttpSourceConnector
