"""All facts of a deployment, gathered at once, and the judgement on them."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from daemon.config.schema import Config
from daemon.doctor.brokers import Cluster, judge_cluster, read_clusters
from daemon.doctor.diagnosis import Diagnosis
from daemon.doctor.machine import Machine, judge_machine, read_machine
from daemon.doctor.running import Daemon, http_fetch, judge_daemon, read_daemon
from daemon.doctor.service_log import judge_log, read_log
from daemon.doctor.smells import judge_settings
from daemon.doctor.storage import Directory, judge_directory, read_directories
from daemon.doctor.validity import judge_certificates
from daemon.gateway.connectors import held_ns


@dataclass(frozen=True)
class Facts:
    """What was seen of the machine, the brokers and the daemon. ``log``: None where there is no journal."""

    machine: Machine
    directories: tuple[Directory, ...]
    clusters: tuple[Cluster, ...]
    daemon: Daemon
    log: tuple[str, ...] | None


def gather(config: Config, unit: str) -> Facts:
    """Look at everything; a running daemon goes on. ``unit``: systemd's, whose log is read."""
    clusters = asyncio.run(read_clusters(config))
    daemon = read_daemon(config, http_fetch(config))
    return Facts(read_machine(), read_directories(config), clusters, daemon, read_log(unit))


def judge(facts: Facts, config: Config, now: datetime) -> Iterator[Diagnosis]:
    """All diagnoses, but for those of `foretick check`."""
    yield from judge_machine(facts.machine, config, facts.daemon.running)
    yield from map(judge_directory, facts.directories)
    yield from judge_settings(config)
    yield from judge_certificates(config, now)
    for cluster in facts.clusters:
        yield from judge_cluster(cluster, held_ns(config), now)
    yield from judge_daemon(facts.daemon, config)
    yield judge_log(facts.log)
