"""The running daemon of a configuration: its health, its sessions, and two scrapes of its metrics."""

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from importlib.metadata import version
from typing import Literal

from daemon.api.client import QueryClient
from daemon.api.messages import QueryError, SessionInfo
from daemon.config.schema import Config
from daemon.doctor.diagnosis import Diagnosis, fine, of_outcome, skipped
from daemon.doctor.metric_rules import Samples, judge_metrics
from daemon.gateway.credentials import query_keys
from daemon.top.scrape import parse
from feeds.connector import SettingError

PATIENCE_S = 5.0
APART_S = 5.0
"""Between two scrapes: what goes wrong every few seconds shows."""
NAMED = 5
"""Sessions that a diagnosis names."""
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1", "[::]": "[::1]"}
"""Addresses that bind all interfaces, and one of this machine that reaches them."""
_GUIDE = "operations.md#start-readiness-stop"

Fetch = Callable[[str], tuple[int, bytes]]
"""Status and body of an HTTP path of the daemon. Raises OSError, HTTPException."""
OpenClient = Callable[[Config], QueryClient]


@dataclass(frozen=True)
class Daemon:
    """``status``: absent where nothing answers, hung where its port is open and does not reply, foreign where
    something else does. ``ready``: also a standby.

    ``before``, ``after``: two scrapes; ``exposition``: the text of the newer one. ``refused``: why these, or
    the sessions, are not known.
    """

    status: Literal["absent", "hung", "alive", "stuck", "foreign"]
    seen: str = ""
    ready: bool = False
    reasons: tuple[str, ...] = ()
    release: str = ""
    sessions: tuple[SessionInfo, ...] = ()
    before: Samples = field(default_factory=dict)
    after: Samples = field(default_factory=dict)
    exposition: str = ""
    refused: str = ""

    @property
    def running(self) -> bool:
        """Whether it has its model and its ports."""
        return self.status in ("alive", "stuck", "hung")


def http_fetch(config: Config) -> Fetch:
    """Of the configured HTTP port, without a proxy; HTTPS is trusted by its own certificate."""
    host = EVERYWHERE.get(config.http.host, config.http.host)
    where = f"{f'[{host}]' if ':' in host else host}:{config.http.port}"

    def fetch(path: str) -> tuple[int, bytes]:
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if config.http.tls_certificate_file:
            context = ssl.create_default_context()
            context.check_hostname = False  # it is of the public name, and this is the machine itself
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(config.http.tls_certificate_file)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        scheme = "https" if config.http.tls_certificate_file else "http"
        opener = urllib.request.build_opener(*handlers)
        try:
            with opener.open(f"{scheme}://{where}{path}", timeout=PATIENCE_S) as reply:
                return int(reply.status), reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    return fetch


def open_client(config: Config) -> QueryClient:
    """A client of the query socket, with the daemon's own key, which is an operator's.

    Raises QueryError, SettingError.
    """
    scheme, _, address = config.query.endpoint.rpartition("//")
    host, colon, port = address.rpartition(":")
    endpoint = f"{scheme}//{EVERYWHERE.get(host, host)}{colon}{port}"
    return QueryClient(endpoint, PATIENCE_S, keys=query_keys(config.query))


def read_daemon(
    config: Config,
    fetch: Fetch,
    client: OpenClient = open_client,
    sleep: Callable[[float], None] = time.sleep,
) -> Daemon:
    """Ask the daemon for all that it says of itself, its metrics twice (`APART_S`); it stays as it is."""
    try:
        code, body = fetch("/healthz")
        alive, ready = json.loads(body), json.loads(fetch("/readyz")[1])
        daemon = Daemon(
            "stuck" if alive["status"] == "stuck" else "alive",
            f"/healthz {code}, /readyz {ready['status']}",
            ready["status"] in ("ready", "standby"),
            tuple(ready["reasons"]),
        )
    except TimeoutError:
        return Daemon("hung", f"its port is open and does not reply within {PATIENCE_S:g} s")
    except OSError as error:
        return Daemon("absent", str(getattr(error, "reason", error)))
    except (ValueError, LookupError, TypeError, HTTPException):
        return Daemon("foreign", "what answers there is no Foretick daemon")
    try:
        first = _metrics(config, fetch, client)
        sleep(APART_S)
        second = _metrics(config, fetch, client)
        daemon = replace(daemon, before=parse(first).values, after=parse(second).values, exposition=second)
        if not config.query.endpoint:
            return daemon
        with client(config) as asked:
            return replace(daemon, release=asked.hello().daemon, sessions=asked.sessions().sessions)
    except (QueryError, SettingError, OSError, ValueError, HTTPException) as error:
        return replace(daemon, refused=str(error))


def _metrics(config: Config, fetch: Fetch, client: OpenClient) -> str:
    """The text of `/metrics`, or where that needs a key, as much of it as the query socket gives."""
    code, text = fetch("/metrics")
    if code == 200:
        return text.decode()
    if not config.query.endpoint:
        raise QueryError("forbidden", f"/metrics replies {code}, and query.endpoint is off")
    with client(config) as asked:
        return "".join(f"{series} {value}\n" for series, value in asked.stats().values.items())


def judge_daemon(daemon: Daemon, config: Config) -> Iterator[Diagnosis]:
    """How the daemon is, by what it says."""
    where = f"{config.http.host}:{config.http.port}"
    if daemon.status == "absent":
        yield skipped(
            "daemon",
            f"not running, or not to be reached at {where}: {daemon.seen}",
            "start it (`foretick run`); if foretick-http.socket holds its port, set http.port as there",
        )
        return
    if daemon.status == "foreign":
        yield Diagnosis(
            "daemon", "problem", f"{where}: {daemon.seen}", "free the port, or set http.port", _GUIDE
        )
        return
    if daemon.status == "hung":
        yield Diagnosis(
            "daemon", "problem", f"{where}: {daemon.seen}", "restart it: its process hangs", _GUIDE
        )
        return
    if daemon.status == "stuck":
        yield Diagnosis("daemon", "problem", daemon.seen, "restart it: a forward pass does not end", _GUIDE)
    else:
        yield fine("daemon", daemon.seen)
    for reason in () if daemon.ready else daemon.reasons or ("not ready; with tenants, /v1/health says why",):
        yield Diagnosis("daemon.ready", "problem", reason, "wait if it is starting, or read its log", _GUIDE)
    if daemon.release:
        installed = version("foretick")
        seen = f"it runs {daemon.release}, {installed} is installed"
        yield of_outcome("daemon.version", daemon.release == installed, seen, "restart the daemon", _GUIDE)
    if daemon.refused:
        step = "run this as the daemon's user, who may read its keys"
        yield skipped("daemon.metrics", f"not all of it is known: {daemon.refused}", step)
    yield from judge_sessions(daemon.sessions, config) if daemon.sessions else ()
    yield from judge_metrics(daemon.before, daemon.after) if daemon.after else ()


def judge_sessions(sessions: Sequence[SessionInfo], config: Config) -> Iterator[Diagnosis]:
    """Sessions that are silent, late, stale or empty, or not served."""
    limits = {each.name: int(each.stale_after) for each in config.sessions}
    stale = {s.name for s in sessions if s.data_version and 0 < limits.get(s.name, 0) < s.staleness_ns}
    kinds = (
        ("silent", [s.name for s in sessions if s.silent], "look at the feed (`foretick feed inspect`)"),
        ("late", [s.name for s in sessions if s.bars_waiting], "see `foretick plan`: bars wait to be read"),
        ("stale", [s.name for s in sessions if s.name in stale], "see whether feed or consumer is behind"),
        ("empty", [s.name for s in sessions if not s.data_version], "see whether records of its symbol come"),
        ("out of reach", [s.name for s in sessions if s.owner_failure], "look at the daemon that owns it"),
    )  # fmt: skip
    for kind, names, step in kinds:
        if names:
            more = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
            seen = f"{len(names)} of {len(sessions)} are {kind}: {', '.join(names[:NAMED])}{more}"
            yield Diagnosis("daemon.sessions", "warning", seen, step, "operations.md#too-much-data")
    if not any(names for _, names, _ in kinds):
        yield fine("daemon.sessions", f"{len(sessions)}, none silent, late, stale or empty")
