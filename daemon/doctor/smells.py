"""Settings that are valid and rarely meant."""

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from daemon.config.checks import connectors_of, exposure_warnings, is_loopback
from daemon.config.schema import UNTRAINED, Config
from daemon.doctor.diagnosis import Diagnosis, fine
from daemon.doctor.leaves import named
from feeds.connectors.kafka import KafkaSinkConnector, KafkaSourceConnector

UNIT_STOP_NS = 30_000_000_000
"""`TimeoutStopSec` of the unit in `systemd/`."""
_KEYS = "operations.md#keys-and-passwords"


def judge_settings(config: Config) -> Iterator[Diagnosis]:
    """Each setting that other machines can abuse, or that is rarely meant."""
    found = [
        Diagnosis(
            each.key, "warning", each.message, "bind loopback, or set keys and a certificate", "tenants.md"
        )
        for each in exposure_warnings(config)
    ]
    found += [Diagnosis(key, "warning", *shown) for key, holds, *shown in SMELLS if holds(config)]
    for key, url in named(config, "url", "proxy", "endpoint"):
        if urlsplit(url).password:
            step = "move it into a file that only the daemon's user may read"
            found.append(Diagnosis(key, "warning", "a password stands in the configuration", step, _KEYS))
    for table in _in_the_clear(config):
        seen, step = "records cross the network in the clear", "set tls = true, and the TLS listener's port"
        found.append(Diagnosis(f"{table}.security", "warning", seen, step, _KEYS))
    yield from found or [fine("settings", f"none of {len(SMELLS)} unusual ones")]


def _in_the_clear(config: Config) -> Iterator[str]:
    for table, each in connectors_of(config).items():
        if isinstance(each, KafkaSourceConnector | KafkaSinkConnector) and not each.security.tls:
            hosts = (broker.strip().rpartition(":")[0].strip("[]") for broker in each.bootstrap.split(","))
            if not all(map(is_loopback, hosts)):
                yield table


SMELLS: tuple[tuple[str, Callable[[Config], object], str, str, str], ...] = (
    ("source.kind", lambda config: not config.feeds, "there is no source: sessions stay empty",
     "add a [source.NAME] table, or let `foretick init` write one", "quickstart.md#from-a-sample"),
    ("sink", lambda config: not config.sink.connectors,
     "there is no sink: answers go to clients only, and refused records are only counted",
     "add [sink.kafka] or [sink.zeromq]", "delivery.md"),
    ("sessions", lambda config: not config.all_sessions, "there is no session: nothing is read or answered",
     "add a [[sessions]] table", "configuration.md"),
    ("model.path", lambda config: any(each.path == UNTRAINED for each in (config.model, *config.models)),
     "the untrained model's answers are noise",
     'set a model, or "" for the tape model', "models.md"),
    ("process.mode", lambda config: config.process.mode == "inproc",
     "if the engine dies, the daemon does, too", 'set "two"', "configuration.md"),
    ("process.drain", lambda config: config.process.drain >= UNIT_STOP_NS,
     "the unit kills the daemon after 30 s (TimeoutStopSec), before the drain ends",
     "lower it, or raise TimeoutStopSec in a drop-in", "operations.md#systemd"),
    ("recovery.interval", lambda config: not config.recovery.interval,
     "there are no snapshots: after a restart all windows are read again from the source",
     'set it, such as to "1m"', "operations.md#recovery"),
    ("scheduler.stream_share", lambda config: not config.scheduler.stream_share,
     "prompts may take whole passes, and new bars wait", "set 0.25", "scheduling.md"),
    ("log.level", lambda config: config.log.level == "debug", "the log takes time and disk",
     'set "info"', "configuration.md"),
)  # fmt: skip
"""The key, whether it is so, what that means, the next step, and the guide."""
