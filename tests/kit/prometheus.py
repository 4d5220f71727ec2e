"""A real Prometheus scraping one target, and the check that a dashboard's panels find their series in it."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.kit.kafka import free_ports

_START_S = 30.0
_STOP_S = 10.0
_ATTEMPTS = 3
# What Grafana fills in; far above the scrape interval.
_VARIABLES = {
    "$__rate_interval": "30s",
    "$__range": "60s",
    "$__interval": "5s",
    "$instance": ".*",
    "$session": ".*",
    "$tenant": ".*",
}


class PrometheusServer:
    """Scrapes `http://TARGET/metrics` four times a second into a folder of its own; loopback, free port."""

    def __init__(
        self, program: str, target: str, rules: str = "", *, alertmanager: str = "", every: str = "250ms"
    ) -> None:
        """``target``, ``alertmanager``: host:port. ``rules``: text of a rules file; ``every``: of scrapes."""
        self._program = program
        self._target = target
        self._rules = rules
        self._alertmanager, self._every = alertmanager, every
        self._folder = tempfile.TemporaryDirectory(prefix="foretick-prometheus-")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> PrometheusServer:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process this object started, and remove its folder."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._folder.cleanup()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of a PromQL expression; RuntimeError: Prometheus refuses it."""
        url = f"{self.url}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        return _vector(url, expression)

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=10) as response:
            found = json.load(response)["data"]["alerts"]
        return {each["labels"]["alertname"] for each in found if each["state"] == "firing"}

    def wait_for(self, expression: str, timeout_s: float = 30.0) -> None:
        """Until a PromQL expression finds series, such as a comparison that holds."""
        deadline = time.monotonic() + timeout_s
        while not self.query(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._target}: {expression} found nothing in {timeout_s:g} s")
            time.sleep(0.1)

    def wait_for_panels(self, dashboard: dict[str, Any], timeout_s: float = 30.0, but: str = "") -> None:
        """Until `check_panels` finds none without series, ``but`` those with that; rates need two scrapes."""
        deadline = time.monotonic() + timeout_s
        while empty := [each for each in check_panels(self.url, dashboard) if not but or but not in each]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no series in {timeout_s:g} s: {'; '.join(empty)}")
            time.sleep(0.1)

    def watch(self, target: str, instance: str, scheme: str = "http", timeout_s: float = 60.0) -> None:
        """Scrape ``target`` from now on, as an instance of another name: no window has anything of it."""
        assert self._process is not None, "only inside its block"
        self._configure({"targets": [target], "labels": {"instance": instance}}, scheme)
        self._process.send_signal(signal.SIGHUP)
        self.wait_for(f'count_over_time(up{{instance="{instance}"}}[1m]) > 2', timeout_s)

    def _configure(self, group: dict[str, Any], scheme: str = "http") -> Path:
        folder = Path(self._folder.name)
        config = folder / "prometheus.yml"
        job = {"job_name": "foretick", "static_configs": [group], "scheme": scheme}
        job |= {"tls_config": {"insecure_skip_verify": True}} if scheme == "https" else {}
        # JSON is YAML.
        times = {"scrape_interval": self._every, "scrape_timeout": self._every}
        whole: dict[str, Any] = {"global": times, "scrape_configs": [job]}
        if self._rules:
            whole["rule_files"] = ["rules.yml"]
        if self._alertmanager:
            whole["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [self._alertmanager]}]}]}
        config.write_text(json.dumps(whole))
        return config

    def _start(self) -> None:
        folder = Path(self._folder.name)
        (folder / "rules.yml").write_text(self._rules)
        config = self._configure({"targets": [self._target]})
        for attempt in range(1, _ATTEMPTS + 1):
            # The port may be taken between asking for it and Prometheus binding it: then try another.
            if self._launch(folder, config, *free_ports(1)):
                return
            if attempt == _ATTEMPTS:
                raise RuntimeError(f"Prometheus did not start:\n{(folder / 'log').read_text()[-2000:]}")

    def _launch(self, folder: Path, config: Path, port: int) -> bool:
        self.url = f"http://127.0.0.1:{port}"
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1):
                    return True
            except OSError:
                time.sleep(0.05)
        return False


def check_panels(prometheus_url: str, dashboard: dict[str, Any]) -> list[str]:
    """Run every panel's expressions; returns "panel: expression" of those that find no series.

    RuntimeError when Prometheus does not understand an expression, ValueError when no panel has any.
    """
    targets = list(expressions(dashboard))
    if not targets:
        raise ValueError("the dashboard has no expressions")
    empty = []
    for title, expression in targets:
        query = urllib.parse.urlencode({"query": fill_in(expression)})
        if not _vector(f"{prometheus_url}/api/v1/query?{query}", expression):
            empty.append(f"{title}: {expression}")
    return empty


def expressions(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """(panel title, expression) of every target, collapsed rows included."""
    found = []
    for panel in dashboard["panels"]:
        found += expressions(panel) if panel.get("panels") else []
        found += [(panel["title"], target["expr"]) for target in panel.get("targets", [])]
    return found


def fill_in(expression: str) -> str:
    """The expression with Grafana's variables replaced; ValueError when one is left over."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    if "$" in expression:
        raise ValueError(f"there is no value for a variable in {expression}")
    return expression


def _vector(url: str, expression: str) -> list[dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            result: list[dict[str, Any]] = json.load(response)["data"]["result"]
    except urllib.error.HTTPError as error:
        with error:
            raise RuntimeError(f"Prometheus refuses {expression}: {error.read().decode()}") from None
    return result
