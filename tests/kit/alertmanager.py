"""A real Alertmanager with the configuration that ships, its clock as fast as the rules', and a receiver."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self

import yaml

import dashboards
from tests.kit.ready_server import ReadyServer

CONFIG = Path(dashboards.__file__).with_name("alertmanager.yml")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Told:
    """An alert as a receiver got it. ``at``: when, Unix time; ``receiver``: who."""

    alert: str
    receiver: str
    instance: str
    summary: str
    severity: str
    firing: bool
    at: float


class Receiver:
    """An HTTP server that keeps what Alertmanager posts. ``told``: all of it, in order."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                receiver.told += told_by(body, time.time())
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, name="receiver")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def fired(self) -> dict[str, dict[str, Told]]:
        """The first notification of each alert, by instance and alert."""
        found: defaultdict[str, dict[str, Told]] = defaultdict(dict)
        for each in self.told:
            if each.firing:
                found[each.instance].setdefault(each.alert, each)
        return dict(found)


def told_by(body: dict[str, Any], at: float) -> list[Told]:
    """The alerts of one notification. One without an instance has its job's name in place of it."""
    return [
        Told(
            each["labels"]["alertname"],
            body["receiver"],
            each["labels"].get("instance", each["labels"].get("job", "")),
            each["annotations"]["summary"],
            each["labels"]["severity"],
            each["status"] == "firing",
            at,
        )
        for each in body["alerts"]
    ]


def scaled(value: Any, faster: float) -> Any:
    """A configuration whose times are ``faster``."""
    match value:
        case dict():
            return {
                name: duration(each, faster)
                if name.endswith(("_wait", "_interval"))
                else scaled(each, faster)
                for name, each in value.items()
            }
        case list():
            return [scaled(each, faster) for each in value]
    return value


def duration(text: str, faster: float) -> str:
    """Of a duration in Alertmanager's form, one so much shorter."""
    seconds = sum(int(number) * UNITS[unit] for number, unit in re.findall(r"(\d+)([smhd])", text))
    return f"{max(1, round(seconds / faster * 1000))}ms"


def committed(url: str, faster: float) -> str:
    """The committed configuration, whose receivers are at ``url``."""
    config = scaled(yaml.safe_load(CONFIG.read_text()), faster)
    for each in config["receivers"]:
        each["webhook_configs"] = [{"url": f"{url}/{each['name']}", "send_resolved": True}]
    return json.dumps(config)  # JSON is YAML


class AlertmanagerServer(ReadyServer):
    """Alertmanager with a configuration."""

    def __init__(self, program: str, config: str) -> None:
        super().__init__(program)
        self._config = config

    def arguments(self) -> list[str]:
        """See `ReadyServer`."""
        (self._folder / "config.yml").write_text(self._config)
        return [
            f"--config.file={self._folder / 'config.yml'}",
            f"--storage.path={self._folder / 'data'}",
            f"--web.listen-address={self.target}",
            "--cluster.listen-address=",
        ]
