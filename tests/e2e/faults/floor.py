"""A daemon that hears an encrypted ZeroMQ feed and is asked over HTTPS: there is no log to read again."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from feeds.curve import CurveKeys, make_keys
from feeds.zmq_feed import ZmqSink
from tests.e2e.faults.desk import Volume
from tests.e2e.faults.fault import Fault, again
from tests.e2e.faults.watched import Watched
from tests.kit import trade
from tests.kit.daemon import Daemon
from tests.kit.kafka import free_ports
from tests.kit.programs import need

TRADED = ("V:AAA", "V:BBB")
INTRUDERS = 5
FLOOD, FLOOD_STOP_S = 800, 0.5
"""Records of each symbol that come while the engine is stopped, more than the ring holds."""
CONFIG = """
[source]
kind = "zeromq"
ring_capacity = 1024
[source.zeromq]
endpoint = "tcp://127.0.0.1:{feed}"
bind = true
[source.zeromq.curve]
secret_key_file = "{folder}/daemon.secret"
client_key_files = ["{folder}/venue.public"]
[sink.zeromq]
endpoint = "tcp://127.0.0.1:{answers}"
[query]
endpoint = "tcp://127.0.0.1:{query}"
[recovery]
interval = "1s"
directory = "{folder}/disk/snapshots"
max_bytes = 33554432
[process]
drain = "3s"
[[sessions]]
name = "aaa"
symbol = "V:AAA"
[[sessions]]
name = "bbb"
symbol = "V:BBB"
"""


class Floor(Watched):
    """The daemon, its feed and its disk."""

    scheme = "https"

    def __init__(self, daemon: Daemon, feed: ZmqSink, intruders: Sequence[ZmqSink], disk: Volume) -> None:
        super().__init__(daemon)
        self.feed, self.intruders, self.disk = feed, intruders, disk

    async def trade(self, n: int = 1) -> None:
        for symbol in TRADED:
            for _ in range(n):
                now = time.time_ns()
                price = f"{100 + now // 10**9 % 7 / 10:.2f}"
                await self.feed.publish("ticks", None, trade(symbol, now, price), {})


def make_certificate(folder: Path, days: int) -> tuple[Path, Path]:
    """A certificate of this machine and its key."""
    certificate, key = folder / "https.pem", folder / "https.key"
    new = [need("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    new += ["-days", str(days), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*new, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    key.chmod(0o600)
    return certificate, key


@contextlib.asynccontextmanager
async def floor(folder: Path, days: int) -> AsyncIterator[Floor]:
    """All of it; its certificate is valid for so many ``days``."""
    feed, answers, query = free_ports(3)
    with contextlib.ExitStack() as stack:
        disk = Volume(folder / "disk")
        stack.callback(disk.close)
        for name in ("daemon", "venue"):
            make_keys(folder / name)
        text = CONFIG.format(feed=feed, answers=answers, query=query, folder=folder)
        daemon = stack.enter_context(Daemon(folder / "run", text, certificate=make_certificate(folder, days)))
        endpoint = f"tcp://127.0.0.1:{feed}"
        keys = CurveKeys(f"{folder}/venue.secret", f"{folder}/daemon.public").read(bind=False)
        async with contextlib.AsyncExitStack() as sinks:
            venue = ZmqSink("venue", endpoint, bind=False, keys=keys)
            await venue.start()
            sinks.push_async_callback(venue.stop)
            intruders = [ZmqSink(f"intruder {n}", endpoint, bind=False) for n in range(INTRUDERS)]
            made = Floor(daemon, venue, intruders, disk)
            await daemon.ready(600)
            async with again(made.trade, 0.1):
                await made.healthy()
                yield made


@contextlib.asynccontextmanager
async def flood(at: Floor) -> AsyncIterator[None]:
    async def burst() -> None:
        engine = at.daemon.engine()
        assert engine is not None
        os.kill(engine, signal.SIGSTOP)
        try:
            await at.trade(FLOOD)
            await asyncio.sleep(FLOOD_STOP_S)
        finally:
            os.kill(engine, signal.SIGCONT)

    async with again(burst, 2.0):
        yield


@contextlib.asynccontextmanager
async def read_only(at: Floor) -> AsyncIterator[None]:
    await asyncio.to_thread(at.disk.freeze)
    try:
        yield
    finally:
        at.disk.thaw()


@contextlib.asynccontextmanager
async def intruder(at: Floor) -> AsyncIterator[None]:
    """Publishers without a key, which connect again and again."""

    async def connect() -> None:
        await asyncio.gather(*(each.start() for each in at.intruders))
        await asyncio.sleep(0.5)
        await asyncio.gather(*(each.stop() for each in at.intruders))

    async with again(connect):
        yield


@contextlib.asynccontextmanager
async def ended(at: Floor) -> AsyncIterator[None]:
    await asyncio.to_thread(at.daemon.terminate, 60)
    yield


@contextlib.asynccontextmanager
async def as_it_is(at: Floor) -> AsyncIterator[None]:
    """What is wrong is wrong from the start."""
    yield


FAULTS: tuple[Fault[Floor], ...] = (
    Fault("flood", flood, "ForetickRecordsDropped", "its ring was full",
          "metrics.ring_dropped_total", "source zeromq"),
    Fault("disk-read-only", read_only, "ForetickProgressNotWritten", "how far its sessions are answered",
          "recovery.directory", "cannot write"),
    Fault("no-key", intruder, "ForetickUnauthenticated", "without a right key",
          "metrics.source_handshakes_failed_total", "source zeromq"),
    Fault("daemon-ended", ended, "ForetickDown", "does not answer",
          "daemon", "not running"),
)  # fmt: skip
CERTIFICATES: dict[int, Fault[Floor]] = {
    2: Fault("certificate-of-two-days", as_it_is, "ForetickCertificateExpires", "The http certificate",
             "http.tls_certificate_file", "valid from"),
    10: Fault("certificate-of-ten-days", as_it_is, "ForetickCertificateExpiresSoon", "The http certificate",
              "http.tls_certificate_file", "valid from"),
}  # fmt: skip
"""By the days that they are valid."""
