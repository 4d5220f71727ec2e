"""`foretick check`: find configuration errors before the daemon runs."""

import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from urllib.parse import urlsplit

import click
import zmq

from daemon.cli.options import EXIT_CONFIG, config_option, read_config, set_option, tell_if_cold
from daemon.config.by_model import by_model
from daemon.config.checks import bound_endpoints, connectors_of, exposure_warnings
from daemon.config.derived_limits import DerivedLimits, rules
from daemon.config.schema import Config, SessionConfig
from daemon.config.signals import unmet_clauses
from daemon.config.standing import questions_of
from daemon.config.symbols import Names
from daemon.cores import cores_of, usable
from daemon.engine.build import Built, build, register
from daemon.engine.confidence_metrics import Confidence, check_error
from daemon.engine.memory_budget import shown_bytes
from daemon.gateway.credentials import query_keys, tenants_of, tls_of
from engine.device import unused_gpu
from feeds.connector import Finding, SettingError, settings_in
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.kafka_client import BrokerError
from feeds.topic_sample import TopicSample
from feeds.webhook_signatures import read_keys
from flash.registry import Registry
from metrics.store import MetricStore
from regions.kv_tensors import KVPool
from support.plugins import installed

_NAMED = 5
"""Symbols that a finding names."""


@click.command("check")
@config_option
@set_option
@click.option(
    "--group", type=click.IntRange(min=1), help="daemons of the consumer group: are there enough partitions?"
)
def command(config_path: Path, settings: tuple[str, ...], group: int | None) -> None:
    """Check file, model, tokenizer, topics and sockets; exit with status 2 if anything is wrong."""
    problems = 0
    tell_if_cold()
    for found in check_all(read_config(config_path, settings), group or 1):
        click.echo(f"{'ok   ' if found.ok else 'WRONG'} {found.key}: {found.message}")
        problems += not found.ok
    sys.exit(EXIT_CONFIG if problems else 0)


def check_all(config: Config, group: int = 1) -> Iterator[Finding]:
    """Check model, questions, connectors and sockets of a valid configuration, for ``group`` daemons."""
    for each in installed():
        yield Finding("plug-in", f"{each.package} {each.version}: {', '.join(each.adds)}")
    for warning in exposure_warnings(config):
        yield Finding(warning.key, f"warning: {warning.message}")
    yield from limit_findings(config)
    yield from findings(config, group)


def findings(config: Config, group: int = 1, *, running: bool = False) -> Iterator[Finding]:
    """The same without warnings. ``running``: a daemon has loaded the model and bound the sockets."""
    model, partitions = partial(_model, group=group), partial(_partitions, group=group)
    for check in (_cores, model, _connectors, partitions, _access, _sockets):
        if running and check in (model, _sockets):
            continue
        try:
            yield from check(config)
        except SettingError as error:
            yield Finding(error.key, error.message, ok=False)


def _cores(config: Config) -> Iterator[Finding]:
    cores = cores_of(config, usable())
    if cores is not None:
        yield Finding("process.reserve_core", str(cores))


def _model(config: Config, group: int) -> Iterator[Finding]:
    built = build(config, {})
    asked, unjudged = 0, dict[tuple[str, str], str]()
    for number, (part, each) in enumerate(zip(by_model(config), built.all, strict=True)):
        table = f"models[{number - 1}]" if number else "model"
        untrained = ", untrained" if each.loaded.untrained else ""
        yield Finding(f"{table}.path", f"{each.loaded.name} passes its canary{untrained}")
        if (unused := unused_gpu(part.model.device)) is not None:
            yield Finding(f"{table}.device", f"warning: {unused}")
        choice = each.loaded.choice
        yield Finding(f"{table}.layers", f"{each.loaded.layers_run}{f': {choice}' if choice else ''}")
        if each.loaded.weights != "float":
            yield Finding(
                f"{table}.weights", f"{each.loaded.weights}: {shown_bytes(each.loaded.packed_bytes)}"
            )
        pool = each.engine.pool
        if each.loaded.kv is not None:
            token = KVPool.block_bytes(pool.layers, 1, pool.dtype)
            yield Finding(f"{table}.kv_dtype", f"{part.model.kv_dtype}: {token:,} bytes a token")
        place = table if number else "pool"
        yield Finding(f"{place}.{part.pool.size_key.removeprefix('pool.')}", _size(pool))
        if each.tiers.host is not None:
            yield Finding(f"{place}.host_blocks", _size(each.tiers.host.pool))
        if part.opens_by_partition and part.sessions:
            yield _room(each, part, group)
        registry = Registry(each.prepare)
        store = MetricStore.local({"session": [session.name for session in part.all_sessions]})
        confidence = Confidence(part, each.prompt, each.calibration, store, packs=each.packs)
        unjudged |= confidence.unjudged(part, each.prefixes.by_number)
        for declared in questions_of(part):
            try:
                tokens = len(register(registry, declared).prepared.prompt_tokens)
                check_error(confidence, declared)
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
    for unmet in unmet_clauses(config, unjudged):
        yield Finding(unmet.key, f"warning: {unmet.message}")


def _size(pool: KVPool) -> str:
    return f"{pool.capacity} blocks, {pool.bytes / 2**20:.0f} MiB"


def limit_findings(config: Config) -> Iterator[Finding]:
    """What follows from the keys that others depend on."""
    limits = DerivedLimits.of(config)
    for key, group in groupby(rules(), lambda each: each[1].key):
        found = [f"{getattr(limits, name):,} {rule.about}" for name, rule in group]
        yield Finding(key, f"{attrgetter(key)(config):,}; from it follow {', '.join(found)}")


def _room(built: Built, config: Config, group: int) -> Finding:
    """Whether ``group`` daemons like this one have room for all sessions."""
    sessions = len(config.sessions)
    at_a_time = min(sessions, built.limit.at_a_time)
    least = -(-sessions // max(1, at_a_time))
    found = f"a daemon has room for {at_a_time} of {sessions} sessions at a time"
    if group >= least:
        return Finding("sessions", found)
    why = f"{found}: at least {least} daemons are needed, and {group} was said (--group)"
    return Finding("sessions", why, ok=False)


def _connectors(config: Config) -> Iterator[Finding]:
    for table, connector in connectors_of(config).items():
        for found in connector.check():
            yield replace(found, key=f"{table}.{found.key}")


def _partitions(config: Config, group: int) -> Iterator[Finding]:
    """Each session's symbols are in one partition, and there are enough partitions for the group."""
    for table, (_, connector) in config.feeds.items():
        if isinstance(connector, KafkaSourceConnector):
            try:
                sample = connector.sample().renamed(Names(config.symbols).newest)
            except (BrokerError, SettingError):  # reported already
                continue
            yield from placement_findings(f"{table}.topics", config.sessions, sample, group)


def placement_findings(
    key: str, sessions: Iterable[SessionConfig], sample: TopicSample, group: int
) -> Iterator[Finding]:
    """What a sample of the topics says of these sessions in a group of ``group`` daemons."""
    count, seen = len(sample.rates), set[str]()
    if count < group:
        why = f"{count} partitions keep {count} of {group} daemons busy: make more partitions"
        yield Finding(key, why, ok=False)
    for session in sessions:
        where = {symbol: found for symbol in session.symbols if (found := sample.partitions_of(symbol))}
        seen |= where.keys()
        if len(set().union(*where.values())) > 1:
            places = "; ".join(f"{symbol} in {_listed(found)}" for symbol, found in where.items())
            why = "is split between daemons: give all its records one key"
            yield Finding(key, f"session {session.name} {why} ({places})", ok=False)
    wanted = {symbol for session in sessions for symbol in session.symbols}
    text = f"{count} partitions; {len(seen)} symbols of the sessions are in their newest records"
    if unseen := sorted(wanted - seen):
        more = f" and {len(unseen) - _NAMED} others" if len(unseen) > _NAMED else ""
        text += f"; which partition has {', '.join(unseen[:_NAMED])}{more} is not known"
    yield Finding(key, text)


def _listed(partitions: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{topic}/{number}" for topic, number in partitions)


def _access(config: Config) -> Iterator[Finding]:
    tenants = tenants_of(config, query_keys(config.query))
    for number, webhook in enumerate(config.webhooks):
        with settings_in(f"webhooks[{number}]"):
            keys = read_keys("secret_file", webhook.secret_file)
        yield Finding(f"webhooks[{number}].secret_file", f"{len(keys)} secrets can be used")
    if tls_of(config.http) is not None:
        yield Finding("http.tls_certificate_file", "the certificate and its key can be used")
    if tenants.required:
        yield Finding("tenants.file", f"{len(tenants.names)} tenants: {', '.join(tenants.names)}")


def _sockets(config: Config) -> Iterator[Finding]:
    if config.query.endpoint:
        yield _bindable_endpoint("query.endpoint", config.query.endpoint)
    for key, endpoint in bound_endpoints(config).items():
        yield _bindable_endpoint(key, endpoint)
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
