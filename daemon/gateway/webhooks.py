"""`[[webhooks]]`: signals as signed HTTP requests, by the Standard Webhooks specification.

A webhook is a sink that has a signal once it is in a file of the state directory, so answers never wait for
whom it calls, and what is not delivered yet is sent after a restart. A signal may be sent more than once,
with the same id.
"""

import asyncio
import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from daemon.config.schema import Config, WebhookConfig
from feeds.connector import SinkRoute, settings_in
from feeds.source import PublishRefused, SinkStopped
from feeds.webhook_signatures import read_keys, signed
from metrics.store import MetricStore
from support.durable_file import remove_abandoned, replacing

log = logging.getLogger(__name__)

FIRST_S, CAP_S = 1.0, 300.0
"""The first pause before a signal is sent again, which doubles, and the longest."""
CONCURRENT = 8
"""Requests of a webhook that are open at a time: one that hangs holds back no other signal."""
_SUFFIX = ".json"


def webhook_routes(config: Config, store: MetricStore) -> list[SinkRoute]:
    """One for each webhook. Raises SettingError."""
    directory = config.recovery.path / "webhooks" if config.recovery.interval else None
    routes = []
    for index, settings in enumerate(config.webhooks):
        with settings_in(f"webhooks[{index}]"):
            keys = read_keys("secret_file", settings.secret_file)
        own = None if directory is None else directory / settings.name
        routes.append(SinkRoute(WebhookSink(settings, keys, store, own), "", signals="signals"))
    return routes


@dataclass(eq=False)
class _Waiting:
    """A signal, sent ``attempts`` times in vain, and ``due`` again then, monotonic seconds."""

    signal_id: str
    body: bytes
    attempts: int = 0
    due: float = 0.0
    sending: bool = False


class WebhookSink:
    """One webhook. ``directory``: of the signals that wait, None keeps them in memory alone."""

    def __init__(
        self,
        settings: WebhookConfig,
        keys: Sequence[bytes],
        store: MetricStore,
        directory: Path | None,
        *,
        jitter: Callable[[], float] = random.random,
        first_s: float = FIRST_S,
    ) -> None:
        self.name, self._host = settings.name, urlsplit(settings.url).hostname or ""  # a path may be secret
        self._settings, self._keys, self._store, self._directory = settings, keys, store, directory
        self._jitter, self._first_s = jitter, first_s
        self._waiting: dict[str, _Waiting] = {}
        self._news = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._failing = False

    async def start(self) -> None:
        """Read what waits, and send it."""
        for signal_id, body in await asyncio.to_thread(self._stored):
            self._waiting[signal_id] = _Waiting(signal_id, body)
        self._note()
        self._running = asyncio.create_task(self._run(), name=f"webhook {self.name}")

    async def stop(self) -> None:
        """What waits is sent after the next start."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def publish(
        self, topic: str, key: bytes | None, payload: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """Keep a signal until it is sent. Raises PublishRefused where too many wait, SinkStopped."""
        if self._running is None:
            raise SinkStopped(f"webhook {self.name} is stopped")
        signal_id = headers["signal_id"].decode()
        if self._settings.signals and json.loads(payload)["name"] not in self._settings.signals:
            return
        if signal_id in self._waiting:
            return
        if len(self._waiting) >= self._settings.max_waiting:
            self._count("dropped")
            why = f"{len(self._waiting)} signals wait for {self._host}, which takes none"
            raise PublishRefused(f"webhook {self.name}: {why}")
        self._waiting[signal_id] = waiting = _Waiting(signal_id, payload, sending=True)
        try:
            await asyncio.to_thread(self._save, waiting)
        except OSError as error:
            log.warning("webhook %s: %s is kept in memory alone: %s", self.name, signal_id, error)
        waiting.sending = False
        self._note()

    # What waits.

    def _path(self, waiting: _Waiting) -> Path | None:
        name = hashlib.blake2b(waiting.signal_id.encode(), digest_size=16).hexdigest()
        return None if self._directory is None else self._directory / f"{name}{_SUFFIX}"

    def _save(self, waiting: _Waiting) -> None:
        if (path := self._path(waiting)) is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replacing(path) as file:
                file.write(waiting.body)

    def _stored(self) -> list[tuple[str, bytes]]:
        """Ids and bodies; what cannot be read is left where it is."""
        found: list[tuple[str, bytes]] = []
        if self._directory is None or not self._directory.is_dir():
            return found
        remove_abandoned(self._directory, "*")
        for path in sorted(self._directory.glob(f"*{_SUFFIX}"), key=lambda each: each.stat().st_mtime_ns):
            try:
                body = path.read_bytes()
                found.append((str(json.loads(body)["signal_id"]), body))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("webhook %s: %s is no signal: %s", self.name, path, error)
        return found

    def _end(self, waiting: _Waiting) -> None:
        """It is sent, or given up."""
        del self._waiting[waiting.signal_id]
        if (path := self._path(waiting)) is not None:
            with suppress(OSError):
                path.unlink()
        self._note()

    def _note(self) -> None:
        self._store.set("foretick_webhook_waiting", len(self._waiting), webhook=self.name)
        self._news.set()

    # Sending.

    async def _run(self) -> None:
        # without proxies and passwords of ~/.netrc: only what is configured is called
        client = httpx2.AsyncClient(trust_env=False, follow_redirects=False)
        async with client, asyncio.TaskGroup() as group:
            while True:
                self._news.clear()
                idle = [each for each in self._waiting.values() if not each.sending]
                room = CONCURRENT - len(self._waiting) + len(idle)
                now = time.monotonic()
                for waiting in sorted(idle, key=lambda each: each.due)[: max(0, room)]:
                    if waiting.due <= now:
                        waiting.sending = True
                        group.create_task(self._send(client, waiting))
                due = [each.due for each in self._waiting.values() if not each.sending and each.due > now]
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(due) - now if due else None):
                        await self._news.wait()

    async def _send(self, client: httpx2.AsyncClient, waiting: _Waiting) -> None:
        began = time.monotonic_ns()
        why = await self._post(client, waiting)
        self._store.inc("foretick_webhook_seconds_total", time.monotonic_ns() - began, webhook=self.name)
        waiting.attempts += 1
        self._tell(why)
        if not why:
            self._count("delivered")
            self._end(waiting)
        elif waiting.attempts >= self._settings.max_attempts:
            self._count("given_up")
            log.error("webhook %s: %s is given up: %s", self.name, waiting.signal_id, why)
            self._end(waiting)
        else:
            self._count("failed")
            pause_s = min(CAP_S, self._first_s * 2.0 ** min(waiting.attempts - 1, 16))
            waiting.due = time.monotonic() + pause_s * (0.5 + self._jitter() / 2)
        waiting.sending = False
        self._news.set()

    async def _post(self, client: httpx2.AsyncClient, waiting: _Waiting) -> str:
        """ "" if it was taken; else why not."""
        headers = signed(self._keys, waiting.signal_id, int(time.time()), waiting.body)
        try:
            url, body = self._settings.url, waiting.body
            async with (
                asyncio.timeout(self._settings.timeout / 1e9),
                client.stream("POST", url, content=body, headers=headers, timeout=None) as reply,
            ):
                status = reply.status_code
        except TimeoutError:
            return f"no reply within {self._settings.timeout}"
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            return str(error) or type(error).__name__
        except Exception as error:  # what goes wrong here is never the daemon's affair
            log.exception("webhook %s", self.name)
            return repr(error)
        return "" if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES else f"status {status}"

    def _tell(self, why: str) -> None:
        """Log each change once."""
        host = self._host
        if why and not self._failing:
            log.warning("webhook %s: %s takes no signals; they are sent again: %s", self.name, host, why)
        elif not why and self._failing:
            log.info("webhook %s: %s takes signals again", self.name, host)
        self._failing = bool(why)

    def _count(self, outcome: str) -> None:
        self._store.inc("foretick_webhook_attempts_total", webhook=self.name, outcome=outcome)
