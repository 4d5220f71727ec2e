"""`foretick check`: everything that can be known to be wrong before the daemon runs, by key name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from daemon.config.load import exposure_warnings
from daemon.config.schema import Config
from daemon.config.standing import questions_of
from daemon.engine.build import build, register
from daemon.engine.spec import SettingError
from feeds.file_format import FormatError, load_format
from feeds.kafka import BrokerError, missing_topics
from flash.registry import Registry


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    key: str
    message: str
    ok: bool = True

    def __str__(self) -> str:
        return f"{'ok   ' if self.ok else 'WRONG'} {self.key}: {self.message}"


def check_all(config: Config) -> Iterator[Finding]:
    """Look at model and tokenizer, questions, topics, files and sockets of a valid configuration."""
    for warning in exposure_warnings(config):
        key, _, message = warning.partition(": ")
        yield Finding(key, f"warning: {message}")
    yield from _model(config)
    yield from _feeds(config)
    yield from _sockets(config)


def _model(config: Config) -> Iterator[Finding]:
    try:
        built = build(config, {})
    except SettingError as error:
        yield Finding(error.key, error.message, ok=False)
        return
    untrained = ", untrained" if built.loaded.untrained else ""
    yield Finding("model.path", f"{built.loaded.name} passes its canary{untrained}")
    pool = built.engine.pool
    yield Finding("pool.blocks", f"{pool.total_blocks} blocks, {pool.bytes / 2**20:.0f} MiB")
    registry = Registry(built.prepare)
    asked = 0
    for declared in questions_of(config):
        try:
            tokens = len(register(registry, declared).prepared.prompt_tokens)
        except SettingError as error:
            yield Finding(error.key, error.message, ok=False)
            continue
        asked += 1
        if tokens > config.scheduler.max_prompt_tokens:
            limit = config.scheduler.max_prompt_tokens
            yield Finding(
                "scheduler.max_prompt_tokens",
                f"question {declared.question.name} has {tokens} tokens, the limit is {limit}",
                ok=False,
            )
    yield Finding("questions", f"{asked} standing questions over {len(config.sessions)} sessions")


def _feeds(config: Config) -> Iterator[Finding]:
    source, sink = config.source, config.sink
    if source.kind == "kafka" and source.kafka is not None:
        yield from _topics("source.kafka", source.kafka.bootstrap, source.kafka.topics)
    if sink.kafka is not None:
        yield from _topics("sink.kafka", sink.kafka.bootstrap, (sink.kafka.topic, sink.kafka.dlq))
    if source.kind == "replay" and source.replay is not None:
        exists = Path(source.replay.file).is_file()
        yield Finding("source.replay.file", source.replay.file if exists else "no such file", ok=exists)
        try:
            load_format(source.replay.format)
            yield Finding("source.replay.format", source.replay.format)
        except FormatError as error:
            yield Finding("source.replay.format", str(error), ok=False)


def _topics(key: str, bootstrap: str, topics: tuple[str, ...]) -> Iterator[Finding]:
    try:
        missing = asyncio.run(missing_topics(bootstrap, topics))
    except BrokerError as error:
        yield Finding(f"{key}.bootstrap", str(error), ok=False)
        return
    yield Finding(f"{key}.bootstrap", f"{bootstrap} answers")
    for topic in topics:
        there = topic not in missing
        yield Finding(f"{key}.topic", f"{topic} {'exists' if there else 'does not exist'}", ok=there)


def _sockets(config: Config) -> Iterator[Finding]:
    if config.query.endpoint:
        yield _bindable_endpoint("query.endpoint", config.query.endpoint)
    if config.sink.zeromq is not None and config.sink.zeromq.bind:
        yield _bindable_endpoint("sink.zeromq.endpoint", config.sink.zeromq.endpoint)
    if config.source.kind == "zeromq" and config.source.zeromq is not None and config.source.zeromq.bind:
        yield _bindable_endpoint("source.zeromq.endpoint", config.source.zeromq.endpoint)
    address = f"{config.http.host}:{config.http.port}"
    try:
        family = socket.AF_INET6 if ":" in config.http.host else socket.AF_INET
        socket.create_server((config.http.host, config.http.port), family=family).close()
        yield Finding("http.port", f"{address} can be bound")
    except OSError as error:
        yield Finding("http.port", f"{address} cannot be bound: {error.strerror}", ok=False)


def _bindable_endpoint(key: str, endpoint: str) -> Finding:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    probe = context.socket(zmq.ROUTER)
    try:
        probe.setsockopt(zmq.IPV6, int("[" in urlsplit(endpoint).netloc))
        probe.bind(endpoint)
        return Finding(key, f"{endpoint} can be bound")
    except zmq.ZMQError as error:
        return Finding(key, f"{endpoint} cannot be bound: {error.strerror}", ok=False)
    finally:
        probe.close(0)
        context.term()
