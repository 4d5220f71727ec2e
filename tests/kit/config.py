"""Configurations of a daemon in the test's process."""

from collections.abc import Iterable
from typing import Literal

from daemon.config.schema import (
    UNTRAINED,
    BarsConfig,
    Config,
    HttpConfig,
    LogConfig,
    ModelConfig,
    ProcessConfig,
    QueryConfig,
    SchedulerConfig,
    SessionConfig,
    SourceConfig,
)
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.durations import Duration
from tests.kit.records import SECOND


def sessions(*symbols: str, **settings: object) -> tuple[SessionConfig, ...]:
    """A session for each VENUE:SYMBOL, named like the symbol in lower case."""
    return tuple(
        SessionConfig(name=symbol.partition(":")[2].lower(), symbol=symbol, **settings)  # type: ignore[arg-type]  # a Session's
        for symbol in symbols
    )


def inproc_config(symbols: Iterable[str] = ("V:AAA",), **settings: object) -> Config:
    """A daemon in this process on free ports, one-second bars; ``settings`` replace the file's sections.

    Its model is the untrained one, which takes any question and reads decimal lines.
    """
    defaults: dict[str, object] = {
        "model": ModelConfig(path=UNTRAINED),
        "sessions": sessions(*symbols, retention_tokens=1024),
        "bars": BarsConfig(interval=Duration(SECOND)),
        "scheduler": SchedulerConfig(max_new_tokens=64),
        "query": QueryConfig(endpoint="tcp://127.0.0.1:*"),
        "http": HttpConfig(port=0),
        "process": ProcessConfig(mode="inproc", drain=Duration(5 * SECOND)),
        "log": LogConfig(level="warning"),
    }
    return Config(**(defaults | settings))  # type: ignore[arg-type]  # a Config's


def log_source(policy: Literal["wait", "skip"] = "wait") -> SourceConfig:
    """A log of which daemons of a group read a part each; there is no broker."""
    return SourceConfig(kind="kafka", kafka=KafkaSourceConnector("127.0.0.1:1"), backlog_policy=policy)
