"""A `foretick` command as a subprocess, and its surroundings: a service manager, producers and consumers."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families

from daemon.cli.main import main
from daemon.ledger import ledger
from feeds.codec import decode_message
from feeds.kafka_sink import KafkaSink
from feeds.kafka_source import KafkaSource
from feeds.market_data import Answer, AnyMessage
from metrics.catalogue import Metric
from tests.kit.kafka import free_ports
from tests.kit.waiting import until, until_slowly

START_S = 120.0
SYMBOLS = {"aaa": "V:AAA", "bbb": "V:BBB"}
"""VENUE:SYMBOL by session; of two partitions, each is in one of its own."""
FORETICK = str(Path(sys.executable).with_name("foretick"))


def command(*arguments: str, timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
    """Run `foretick ARGUMENTS` to its end."""
    return subprocess.run(
        [FORETICK, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def invoke(*arguments: str) -> Result:
    """Like `command`, but in this process, without its start-up time."""
    with logging_put_back():
        return CliRunner().invoke(main, arguments)


@contextlib.contextmanager
def logging_put_back() -> Iterator[None]:
    """Restore logging: commands set it up for their whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


class Daemon:
    """`foretick run` on a configuration; the end of the block ends it by its process id.

    ``spare``: with a spare engine, whose fork serves. ``certificate``: of HTTPS, and its key.
    """

    def __init__(
        self,
        folder: Path,
        config: str,
        environment: Mapping[str, str] | None = None,
        *,
        spare: bool = False,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        (self.http_port,) = free_ports(1)
        self._certificate = certificate
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "foretick.toml"
        self.configure(config)
        self._log = folder / "log"
        self._spare = str(spare).lower()
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> Path:
        """Its configuration."""
        return self._config

    def configure(self, config: str) -> None:
        """Write the file; a running daemon reads it at SIGHUP."""
        http = f"[http]\nport = {self.http_port}\n"
        if self._certificate is not None:
            http += 'tls_certificate_file = "{}"\ntls_key_file = "{}"\n'.format(*self._certificate)
        self._config.write_text(f"{config}\n{http}")

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [FORETICK, "run", "--config", str(self._config), f"--set=process.spare_engine={self._spare}"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._running
        try:
            if error is None:
                self.check_balance()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if error is not None:
            error.add_note(f"log of the daemon:\n{self.log[-6000:]}")

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "only inside its block"
        return self._process

    @property
    def pid(self) -> int:
        """Process id of the gateway."""
        return self._running.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        self._running.send_signal(number)

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._running.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for the exit status."""
        return self._running.wait(timeout_s)

    def terminate(self, timeout_s: float) -> int:
        """Send SIGTERM; returns the exit status."""
        self.check_balance()
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def engine(self) -> int | None:
        """Process id of the engine, while it runs."""
        pid = self.pid
        for child in _engines(pid):
            return next(iter(_engines(child)), child)  # a spare has forked it
        return None

    def engines(self) -> list[int]:
        """Process ids of the engine and of what loads for it."""
        own = _engines(self.pid)
        return own + [fork for each in own for fork in _engines(each)]

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP request; (0, "") while the port is closed."""
        scheme, context = "http", None
        if self._certificate is not None:
            scheme, context = "https", ssl.create_default_context(cafile=self._certificate[0])
        url = f"{scheme}://127.0.0.1:{self.http_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=30, context=context) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    async def ready(self, timeout_s: float = START_S) -> None:
        """Wait until /readyz says so; fails at once if the process ended."""

        def look() -> bool:
            if self._running.poll() is not None:
                raise AssertionError(f"the daemon ended with {self._running.returncode}\n{self.log[-3000:]}")
            return self.get("/readyz")[0] == 200

        await until_slowly(look, timeout_s, "readiness")

    def metric(self, name: str, **labels: str) -> float:
        """One series of /metrics; the sum of all series with these labels."""
        found = [
            float(value)
            for series, value in re.findall(r"^(\S+) (\S+)$", self.get("/metrics")[1], re.MULTILINE)
            if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items())
        ]
        assert found, f"/metrics has no {name} with {labels}"
        return sum(found)

    def check_balance(self, within_s: float = 10.0) -> None:
        """Every record that was read is in a bar, or dropped for a reason that is counted.

        Not where an engine ended, or a partition moved: records on their way are read again from the log.
        """
        deadline = time.monotonic() + within_s
        while self.poll() is None and (text := self.get("/metrics")[1]):
            counters = Scraped(text)
            found = ledger(counters)  # type: ignore[arg-type]  # the same series, as text
            if not found.unaccounted or found.lost or any(map(counters.total, READ_AGAIN)):
                return
            assert time.monotonic() < deadline, found
            time.sleep(0.1)

    def reasons(self) -> list[str]:
        """What is missing, by /readyz."""
        return list(json.loads(self.get("/readyz")[1])["reasons"])


READ_AGAIN = ("foretick_engine_restarts_total", "foretick_partitions_moved_total")


class Scraped:
    """The counters of /metrics, as a store has them."""

    def __init__(self, text: str) -> None:
        self._found = [each for family in text_string_to_metric_families(text) for each in family.samples]

    def series(self, metric: Metric) -> Iterator[dict[str, str]]:
        return (dict(each.labels) for each in self._found if each.name == metric.name)

    def value(self, name: str, **labels: str) -> float:
        return sum(each.value for each in self._found if each.name == name and each.labels == labels)

    def total(self, name: str) -> float:
        return sum(each.value for each in self._found if each.name == name)


class Topics:
    """The broker's clients: produce records, and read a topic from its beginning."""

    def __init__(self, bootstrap: str, trades: str, answers: str) -> None:
        self._bootstrap = bootstrap
        self._trades = trades
        self._sink = KafkaSink("test-trades", bootstrap)
        # the longest that a broker holds an empty fetch; the mock holds it even when records arrive
        at_once = {"fetch_max_wait_ms": 20}
        self._source = KafkaSource("test-answers", bootstrap, [answers], None, options=at_once)
        self._reading: asyncio.Task[None] | None = None
        self.messages: list[AnyMessage] = []

    async def __aenter__(self) -> Self:
        await asyncio.gather(self._sink.start(), self._source.start())
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await asyncio.gather(self._sink.stop(), self._source.stop())

    async def produce(self, records: Iterable[tuple[str, bytes]]) -> None:
        """Produce (key, payload) each; returns when all are acknowledged."""
        sent = [self._sink.publish(self._trades, key.encode(), payload, {}) for key, payload in records]
        await asyncio.wait_for(asyncio.gather(*sent), 60)

    def answers(self, session: str) -> list[Answer]:
        return [m for m in self.messages if isinstance(m, Answer) and m.session == session]

    async def answered(self, session: str, version: int, questions: int = 6, timeout_s: float = 30) -> None:
        """Wait until this many answers of a version have been read back."""

        def there() -> bool:
            return sum(a.data_version == version for a in self.answers(session)) >= questions

        await until(there, timeout_s, f"{questions} answers of {session} version {version}")

    def versions(self, session: str, questions: int = 6) -> int:
        """How many versions have this many answers."""
        counts = Counter((a.epoch, a.data_version) for a in self.answers(session))
        return sum(count >= questions for count in counts.values())

    async def reached(self, session: str, versions: int, timeout_s: float = 30) -> None:
        """Wait until this many versions have all their answers."""
        await until(
            lambda: self.versions(session) >= versions,
            timeout_s,
            f"{versions} answered versions of {session}",
        )

    async def _read(self) -> None:
        async for batch in self._source.batches():
            self.messages += [decode_message(message.payload) for message in batch]


async def committed(bootstrap: str, group: str, topic: str, partitions: int) -> dict[int, int | None]:
    """The group's stored offsets by partition."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False)
    await consumer.start()
    try:
        return {p: await consumer.committed(TopicPartition(topic, p)) for p in range(partitions)}
    finally:
        await consumer.stop()


def kafka_toml(
    bootstrap: str,
    suffix: str = "",
    sessions: Mapping[str, str] = SYMBOLS,
    more: Mapping[str, str] = {},  # read only
    *,
    group: str = "foretick",
    top: str = "",
) -> str:
    """A daemon's file for a broker whose topics and group end in ``suffix``.

    ``sessions``: their symbols by name; ``more``: further lines, by table; ``top``: those before all tables.
    """
    (query,) = free_ports(1)
    broker = f'bootstrap = "{bootstrap}"'
    tables = {
        "source": 'kind = "kafka"',
        "source.kafka": f'{broker}\ntopics = ["md.trades.v1{suffix}"]\ngroup = "{group}{suffix}"',
        "sink.kafka": f'{broker}\ntopic = "answers.v1{suffix}"\ndlq = "dlq.v1{suffix}"',
        "query": f'endpoint = "tcp://127.0.0.1:{query}"',
        "process": 'drain = "3s"',
    }
    tables |= {name: "\n".join(filter(None, [tables.get(name), lines])) for name, lines in more.items()}
    named = [f'[[sessions]]\nname = "{name}"\nsymbol = "{symbol}"' for name, symbol in sessions.items()]
    return "\n".join([top, *named, *(f"[{name}]\n{lines}" for name, lines in tables.items())])


def gone(pid: int) -> bool:
    """Whether the process has ended (or only waits to be reaped)."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def _engines(parent: int) -> list[int]:
    """Engine processes that another one has started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [
        int(pid) for pid in children if b"daemon.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
