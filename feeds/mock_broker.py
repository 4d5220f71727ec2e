"""librdkafka's in-process mock cluster, as an embedded substitute for a Kafka broker.

This is not Apache Kafka. It lives in this process's memory, keeps 5 MiB per partition, forgets everything at
exit and fakes transactions, topic creation over the wire and groups of several members. It serves the demo
and fault injection in tests. confluent-kafka ships the library; only its mock cluster is used, through
ctypes.
"""

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

NOTICE = "embedded broker: librdkafka's mock cluster, in this process's memory; not Apache Kafka"

_PRODUCER = 0
_REBALANCE_DELAY_MS = 300
"""The mock cluster forms a group only after a delay, and refuses a second member's sync."""


class MockUnavailable(RuntimeError):
    """The library behind the mock cluster is not installed."""


class MockBroker:
    """A mock cluster of one broker on a free loopback port, for the duration of the context.

    Raises:
        MockUnavailable: confluent-kafka (the ``demo`` extra) is missing.
        RuntimeError: librdkafka refuses.
    """

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._handle: int | None = None
        self._cluster: int | None = None
        self.bootstrap = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Open the listeners and set ``bootstrap`` ("host:port,...")."""
        library = _load()
        reason = ctypes.create_string_buffer(512)
        settings = library.rd_kafka_conf_new()
        # The handle only carries the cluster: silence its warning that it has no brokers.
        library.rd_kafka_conf_set(settings, b"log_level", b"0", reason, len(reason))
        handle = library.rd_kafka_new(_PRODUCER, settings, reason, len(reason))
        if not handle:
            raise RuntimeError(f"librdkafka: {reason.value.decode(errors='replace')}")
        cluster = library.rd_kafka_mock_cluster_new(handle, 1)
        if not cluster:
            library.rd_kafka_destroy(handle)
            raise RuntimeError("librdkafka did not start its mock cluster")
        self._library, self._handle, self._cluster = library, handle, cluster
        library.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, _REBALANCE_DELAY_MS)
        self.bootstrap = library.rd_kafka_mock_cluster_bootstraps(cluster).decode()

    def stop(self) -> None:
        """Close the listeners and forget all data. Idempotent."""
        library, handle, cluster = self._library, self._handle, self._cluster
        self._library = self._handle = self._cluster = None
        if library is not None:
            library.rd_kafka_mock_cluster_destroy(cluster)
            library.rd_kafka_destroy(handle)

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic (one replica per partition)."""
        self._call("rd_kafka_mock_topic_create", name.encode(), partitions, 1)

    def set_down(self) -> None:
        """Take the broker down: connections drop and new ones are refused."""
        self._call("rd_kafka_mock_broker_set_down", 1)

    def set_up(self) -> None:
        """Bring the broker back up, with its data."""
        self._call("rd_kafka_mock_broker_set_up", 1)

    def delay(self, rtt_ms: int) -> None:
        """How long each reply takes."""
        self._call("rd_kafka_mock_broker_set_rtt", 1, rtt_ms)

    def refuse(self, request: int, code: int, times: int = 1_000) -> None:
        """Answer the next ``times`` requests of a kind, by Kafka's number of it, with an error's code."""
        self._call(
            "rd_kafka_mock_push_request_errors_array", request, times, (ctypes.c_int * times)(*[code] * times)
        )

    def refuse_topic(self, topic: str, request: int, code: int, times: int = 1) -> None:
        """The same, of partition 0 of a topic."""
        codes = [ctypes.c_int(code)] * times
        self._call("rd_kafka_mock_partition_push_request_errors", topic.encode(), 0, request, times, *codes)

    def accept(self, request: int) -> None:
        """Answer requests of this kind as before."""
        self._call("rd_kafka_mock_clear_request_errors", request)

    def _call(self, function: str, *arguments: Any) -> None:
        if self._library is None:
            raise RuntimeError("the mock broker is not started")
        call: Callable[..., int] = getattr(self._library, function)
        code = call(self._cluster, *arguments)
        if code:
            raise RuntimeError(f"{function}{arguments} returned {code}")


_pointer, _text, _int = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "rd_kafka_conf_new": (_pointer, []),
    "rd_kafka_conf_set": (_int, [_pointer, _text, _text, _text, ctypes.c_size_t]),
    "rd_kafka_new": (_pointer, [_int, _pointer, _text, ctypes.c_size_t]),
    "rd_kafka_destroy": (None, [_pointer]),
    "rd_kafka_mock_cluster_new": (_pointer, [_pointer, _int]),
    "rd_kafka_mock_cluster_destroy": (None, [_pointer]),
    "rd_kafka_mock_cluster_bootstraps": (_text, [_pointer]),
    "rd_kafka_mock_group_initial_rebalance_delay_ms": (None, [_pointer, ctypes.c_int32]),
    "rd_kafka_mock_topic_create": (_int, [_pointer, _text, _int, _int]),
    "rd_kafka_mock_broker_set_down": (_int, [_pointer, ctypes.c_int32]),
    "rd_kafka_mock_broker_set_up": (_int, [_pointer, ctypes.c_int32]),
    "rd_kafka_mock_broker_set_rtt": (_int, [_pointer, ctypes.c_int32, ctypes.c_int]),
    "rd_kafka_mock_push_request_errors_array": (
        None,
        [_pointer, ctypes.c_int16, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int)],
    ),
    "rd_kafka_mock_partition_push_request_errors": (
        _int,
        [_pointer, _text, ctypes.c_int32, ctypes.c_int16, ctypes.c_size_t],
    ),
    "rd_kafka_mock_clear_request_errors": (None, [_pointer, ctypes.c_int16]),
}


def _load() -> ctypes.CDLL:
    """The librdkafka bundled with confluent-kafka's wheel, with argument types declared."""
    spec = importlib.util.find_spec("confluent_kafka")
    if spec is None or spec.origin is None:
        raise MockUnavailable("the embedded broker needs confluent-kafka: pip install 'foretick[demo]'")
    importlib.import_module("confluent_kafka")  # loads librdkafka's own dependencies
    libraries = Path(spec.origin).parent.parent / "confluent_kafka.libs"
    found = sorted(libraries.glob("librdkafka*"))
    if not found:
        raise MockUnavailable(
            "this build of confluent-kafka has no bundled librdkafka; install its PyPI wheel"
        )
    library = ctypes.CDLL(str(found[0]))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
