"""`[source.websocket]`: a venue's public stream, without a broker in between."""

import asyncio
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from feeds.connector import Finding, SettingError, about
from feeds.durations import Duration
from feeds.payloads.settings import MessageSource
from feeds.secret_files import read_headers
from feeds.source import Source

if TYPE_CHECKING:
    from feeds.websocket_source import Stream

SECOND = 1_000_000_000


class WebSocketConnector(MessageSource, frozen=True):
    """A client of a WebSocket. It connects again whenever the connection ends, and notes a gap.

    Built-in formats of messages: binance, bybit, coinbase, kraken, okx.
    """

    url: Annotated[str, about("ws:// or wss:// address of the stream", pattern=r"^wss?://.+$")]
    subscribe: Annotated[
        tuple[str, ...], about("messages that are sent once it is connected, such as a subscription in JSON")
    ] = ()
    ping_every: Annotated[Duration, about("how often the venue is asked whether it lives; 0s: never")] = (
        Duration(20 * SECOND)
    )
    ping: Annotated[
        str, about('what it is asked by, such as ping; "" asks by a frame of the protocol, and waits as long')
    ] = ""
    ignored: Annotated[
        tuple[str, ...], about("replies that are no messages of the format, such as pong, exactly")
    ] = ()
    silence: Annotated[
        Duration, about("a connection on which nothing comes for so long is opened again; 0s: never")
    ] = Duration(60 * SECOND)
    headers_file: Annotated[
        str, about("headers of the request, a line each, such as a login; only its owner may read the file")
    ] = ""
    ca_file: Annotated[
        str, about('certificate authorities that sign the venue, in PEM; "" trusts those of the system')
    ] = ""
    proxy: Annotated[
        str, about('URL of a proxy; "system" takes the one that the environment names, "" none')
    ] = ""
    max_waiting: Annotated[
        int, about("most frames that wait to be read; the oldest are dropped and counted", ge=1)
    ] = 100_000

    def open(self, name: str, stop_timeout_s: float) -> Source:
        """A client; it stops at once."""
        from feeds.websocket_source import WebSocketSource

        return WebSocketSource(name, self._stream(), waiting=self.max_waiting)

    def check(self) -> Iterator[Finding]:
        """Files and formats can be used, and the venue answers."""
        formats = list(self.check_formats())
        yield from formats
        try:
            stream = self._stream()
        except SettingError as error:
            yield Finding(error.key, error.message, ok=False)
            return
        if all(each.ok for each in formats):
            from feeds.websocket_source import check

            try:
                asyncio.run(check(stream))
                yield Finding("url", f"{stream.shown} answers")
            except Exception as error:  # whatever the library raises
                yield Finding(
                    "url", f"{stream.shown} does not answer: {error or type(error).__name__}", ok=False
                )

    def _stream(self) -> "Stream":
        """Raises SettingError."""
        try:
            from feeds.websocket_source import Stream
        except ImportError as error:
            needs = "a WebSocket needs websockets: pip install 'foretick[websocket]'"
            raise SettingError("url", f"{needs} ({error})") from error
        return Stream(
            self.url,
            self.subscribe,
            read_headers("headers_file", self.headers_file),
            ping_s=self.ping_every / SECOND,
            ping=self.ping,
            ignored=frozenset(each.encode() for each in self.ignored),
            silence_s=self.silence / SECOND,
            tls=self._tls(),
            proxy=True if self.proxy == "system" else self.proxy or None,
        )

    def _tls(self) -> ssl.SSLContext | None:
        if not self.url.startswith("wss:"):
            if self.ca_file:
                raise SettingError("ca_file", "is for wss:// addresses")
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file or None)
        except (OSError, ssl.SSLError) as error:
            raise SettingError("ca_file", f"{self.ca_file} cannot be used: {error}") from error


SOURCE = WebSocketConnector
