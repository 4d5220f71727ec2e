"""A real Apache Kafka for tests: a KRaft broker on loopback, jars fetched by Maven (tests/kafka/pom.xml)."""

import base64
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete

from tests.kit.programs import need, unavailable

REPOSITORY = Path(__file__).resolve().parents[2]
POM = REPOSITORY / "tests" / "kafka" / "pom.xml"
JARS = REPOSITORY / ".cache" / "kafka"

CLUSTER = base64.urlsafe_b64encode(b"foretick's tests").decode().rstrip("=")
"""Kafka's form of a cluster's id: 16 bytes."""
READY_S = 60.0
STOP_S = 20.0


async def create_topics(bootstrap: str, topics: Mapping[str, int], replicas: int = 1) -> None:
    """Create topics, by name and number of partitions, that do not exist."""
    async with administering(bootstrap) as admin:
        response = await admin.create_topics(
            [NewTopic(name, count, replicas) for name, count in topics.items()]
        )
    assert not any(code for _, code, *_ in response.topic_errors), response.topic_errors


async def delete_records(bootstrap: str, topic: str, partition: int, before: int) -> None:
    """Delete what is before an offset."""
    async with administering(bootstrap) as admin:
        await admin.delete_records({TopicPartition(topic, partition): RecordsToDelete(before)})


@asynccontextmanager
async def administering(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """A started client, closed as `producing` does."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        await admin.start()
        yield admin
    finally:
        await admin.close()


@asynccontextmanager
async def producing(bootstrap: str, **settings: Any) -> AsyncIterator[AIOKafkaProducer]:
    """A started producer, closed whatever happens: one that a failed test leaves open fails a later test."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, **settings)
    try:
        await producer.start()
        yield producer
    finally:
        await producer.stop()


def resolve_jars() -> Path:
    """Directory of the broker's jars, fetched by Maven once for every content of pom.xml."""
    digest = hashlib.sha256(POM.read_bytes()).hexdigest()[:12]
    ready = JARS / f"jars-{digest}"
    if ready.is_dir():
        return ready
    JARS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=JARS) as fetching:
        goal = "dependency:copy-dependencies"
        command = [need("mvn"), "-q", "-B", "-f", str(POM), goal, "-DincludeScope=runtime"]
        command.append(f"-DoutputDirectory={fetching}/jars")
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            unavailable(f"Maven could not fetch Apache Kafka: {(done.stdout + done.stderr)[-800:]}")
        try:
            os.replace(f"{fetching}/jars", ready)  # whole or not at all
        except OSError:
            if not ready.is_dir():  # else another process was first
                raise
    return ready


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on right now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


USER, PASSWORD = "desk", "tick tock"
"""Who may use the listener of a `KafkaServer` with TLS; PLAIN, SCRAM-SHA-256 and SCRAM-SHA-512."""


def make_certificates(folder: Path) -> None:
    """An authority (ca.pem), and a certificate by it for a broker at 127.0.0.1 (broker.pem, broker.key)."""
    new = [need("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    authority = ["-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem"]
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:false"]
    named = ["-subj", "/CN=broker", "-addext", "subjectAltName=IP:127.0.0.1"]
    for arguments in (authority, [*signed, *named, "-keyout", "broker.key", "-out", "broker.pem"]):
        subprocess.run([*new, *arguments], cwd=folder, check=True, capture_output=True)


class Door(NamedTuple):
    """``upstream``: port of a listener whose clients are told to connect to ``port``, a proxy's."""

    upstream: int
    port: int

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"


class KafkaServer:
    """One broker in KRaft combined mode. ``stop`` and ``start`` again keep its ports and its data.

    ``secured``: a second listener, of clients that know ``ca_file`` and log in as `USER`, at ``secure``.
    There are ``proxied`` ``doors`` for a `KafkaProxy` each; those of the first have names of their own, too.
    ``more``: properties of the broker. ``node``: its id.
    """

    replicas = 1
    """Of a topic, at most."""

    def __init__(
        self,
        heap_mb: int = 512,
        secured: bool = False,
        more: Mapping[str, object] | None = None,
        node: int = 1,
        proxied: int = 1,
    ) -> None:
        self._heap_mb = heap_mb
        self._secured = secured
        self.node = node
        self._peers: tuple[KafkaServer, ...] = (self,)
        # all at once: a port that is free is given again by the next call
        self._secure_port, self._port, self._controller, *doors = free_ports(3 + 2 * proxied)
        self.doors = [Door(*pair) for pair in zip(doors[::2], doors[1::2], strict=True)]
        self.behind_port, self.proxy_port = self.doors[0]
        self.secure = f"127.0.0.1:{self._secure_port}"
        self._home = Path(tempfile.mkdtemp(prefix="foretick-kafka-"))
        self.ca_file = self._home / "ca.pem"
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._formatted = False
        self.bootstrap = f"127.0.0.1:{self._port}"
        self.behind = self.doors[0].bootstrap
        self._more = more or {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def join(self, peers: Iterable["KafkaServer"]) -> None:
        """Before the first start: one quorum with these, this one among them."""
        self._peers = tuple(peers)

    @property
    def voter(self) -> str:
        """This node in a quorum, as StorageTool reads it."""
        directory = base64.urlsafe_b64encode(f"foretick node {self.node:02}".encode()).decode().rstrip("=")
        return f"{self.node}@127.0.0.1:{self._controller}:{directory}"

    def start(self) -> None:
        """Start the broker and wait until it takes requests."""
        settings = self._home / "server.properties"
        if not self._formatted:
            settings.write_text(self._properties())
            self._format(settings)
        self._log = (self._home / "broker.log").open("ab")
        self._process = subprocess.Popen(
            self._java("kafka.Kafka", str(settings)), stdout=self._log, stderr=subprocess.STDOUT
        )
        self._wait_ready()

    def stop(self) -> None:
        """End the broker: politely, then after 20 s by force. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def kill(self) -> None:
        """End the broker by SIGKILL: a hard bounce. ``start`` again recovers its log."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.stop()

    def run_tool(self, tool: str, *arguments: str, text: str | None = None) -> str:
        """What one of the release's own tools prints, by the name of its class. Raises RuntimeError.

        ``text`` is its standard input.
        """
        return self._run(tool, *arguments, text=text)

    def close(self) -> None:
        """Stop and delete all data."""
        self.stop()
        shutil.rmtree(self._home, ignore_errors=True)

    def _format(self, settings: Path) -> None:
        users = []
        if self._secured:
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
                users += ["--add-scram", f'{mechanism}=[name={USER},password="{PASSWORD}"]']
        voters = ("--initial-controllers", ",".join(each.voter for each in self._peers))
        base = ("kafka.tools.StorageTool", "format", "-t", CLUSTER)
        self._run(*base, *voters, "-c", str(settings), *users)
        self._formatted = True

    def _run(self, *arguments: str, text: str | None = None) -> str:
        done = subprocess.run(
            self._java(*arguments),
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{arguments[:2]} failed: {(done.stdout + done.stderr)[-800:]}")
        return done.stdout

    def _java(self, *arguments: str) -> list[str]:
        return [
            need("java"),
            f"-Xmx{self._heap_mb}m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",  # a short-lived broker starts faster without the optimising compiler
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            "-cp",
            f"{resolve_jars()}/*",
            *arguments,
        ]

    def _properties(self) -> str:
        plain = f"PLAINTEXT://127.0.0.1:{self._port}"
        behind = [f"BEHIND{n}://127.0.0.1:{door.upstream}" for n, door in enumerate(self.doors)]
        told = [f"BEHIND{n}://{door.bootstrap}" for n, door in enumerate(self.doors)]
        names = ["PLAINTEXT", *(f"BEHIND{n}" for n in range(len(self.doors))), "CONTROLLER"]
        settings = {
            "process.roles": "broker,controller",
            "node.id": self.node,
            "controller.quorum.bootstrap.servers": ",".join(
                f"127.0.0.1:{each._controller}" for each in self._peers
            ),
            "controller.listener.names": "CONTROLLER",
            "listeners": ",".join([plain, *behind, f"CONTROLLER://127.0.0.1:{self._controller}"]),
            "advertised.listeners": ",".join([plain, *told]),
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in names),
            "log.dirs": self._home / "data",
            "num.partitions": 1,
            "offsets.topic.num.partitions": 1,
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            "auto.create.topics.enable": "false",
            "log.cleaner.dedupe.buffer.size": 8 << 20,
        }
        settings |= self._more
        if self._secured:
            settings |= self._secure_settings(settings)
        return "".join(f"{name}={value}\n" for name, value in settings.items())

    def _secure_settings(self, plain: Mapping[str, object]) -> dict[str, object]:
        make_certificates(self._home)
        (self._home / "keys.pem").write_text(
            (self._home / "broker.key").read_text() + (self._home / "broker.pem").read_text()
        )
        login = "org.apache.kafka.common.security"
        listener = "listener.name.secure"
        return {
            "listeners": f"{plain['listeners']},SECURE://{self.secure}",
            "advertised.listeners": f"{plain['advertised.listeners']},SECURE://{self.secure}",
            "listener.security.protocol.map": f"{plain['listener.security.protocol.map']},SECURE:SASL_SSL",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
            f"{listener}.ssl.keystore.type": "PEM",
            f"{listener}.ssl.keystore.location": self._home / "keys.pem",
            f"{listener}.plain.sasl.jaas.config": f"{login}.plain.PlainLoginModule required "
            f'user_{USER}="{PASSWORD}";',
            f"{listener}.scram-sha-256.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;",
            f"{listener}.scram-sha-512.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;",
        }

    def _wait_ready(self) -> None:
        """A broker opens its listener only when it is ready, so a connection that is taken is the sign."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.1)
        tail = (self._home / "broker.log").read_bytes()[-1500:].decode(errors="replace")
        self.stop()
        raise RuntimeError(f"Apache Kafka did not get ready within {READY_S:g} s: {tail}")


class KafkaCluster:
    """Three brokers of one quorum, each of which holds all; any one of them can be killed.

    ``bootstrap`` names all. ``more``: properties of each.
    """

    replicas = 3

    def __init__(self, heap_mb: int = 320, more: Mapping[str, object] | None = None) -> None:
        replicated = {
            "offsets.topic.replication.factor": 3,
            "transaction.state.log.replication.factor": 3,
            "transaction.state.log.min.isr": 2,
            "min.insync.replicas": 2,
            "broker.session.timeout.ms": 3000,
            "broker.heartbeat.interval.ms": 500,
        }
        self._nodes = {
            node: KafkaServer(heap_mb, more=replicated | dict(more or {}), node=node) for node in (1, 2, 3)
        }
        for each in self._nodes.values():
            each.join(self._nodes.values())
        self.bootstrap = ",".join(each.bootstrap for each in self._nodes.values())

    def __enter__(self) -> Self:
        try:
            with ThreadPoolExecutor(len(self._nodes)) as pool:  # the first waits for a second
                list(pool.map(self.start, self._nodes))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, node: int) -> None:
        """Start a broker, again after `kill`."""
        self._nodes[node].start()

    def kill(self, node: int) -> None:
        """End a broker by SIGKILL."""
        self._nodes[node].kill()

    def run_tool(self, tool: str, *arguments: str) -> str:
        """What one of the release's own tools prints, by the name of its class. Raises RuntimeError."""
        return self._nodes[1].run_tool(tool, *arguments)

    def close(self) -> None:
        """Kill and delete all; politely it would take a quorum."""
        for each in self._nodes.values():
            each.kill()
            each.close()
