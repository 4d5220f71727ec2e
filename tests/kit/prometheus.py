"""A real Prometheus scraping one target, and the check that a dashboard's panels find their series in it."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tests.kit.ready_server import ReadyServer

# What Grafana fills in; far above the scrape interval.
_VARIABLES = {
    "$__rate_interval": "30s",
    "$__range": "60s",
    "$__interval": "5s",
    "$instance": ".*",
    "$session": ".*",
    "$tenant": ".*",
}


class PrometheusServer(ReadyServer):
    """Scrapes `http://TARGET/metrics`, by default four times a second."""

    def __init__(
        self, program: str, target: str, rules: str = "", *, alertmanager: str = "", every: str = "250ms"
    ) -> None:
        """``target``, ``alertmanager``: host:port. ``rules``: text of a rules file; ``every``: of scrapes."""
        super().__init__(program)
        self._scraped, self._rules = target, rules
        self._alertmanager, self._every = alertmanager, every

    def arguments(self) -> list[str]:
        """See `ReadyServer`."""
        (self._folder / "rules.yml").write_text(self._rules)
        return [
            f"--config.file={self._configure({'targets': [self._scraped]})}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self.target}",
        ]

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
                raise TimeoutError(f"{self._scraped}: {expression} found nothing in {timeout_s:g} s")
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

    def leave(self) -> None:
        """Scrape nothing from now on, until the next `watch`: what is closed does not count as down."""
        assert self._process is not None, "only inside its block"
        self._configure({"targets": []})
        self._process.send_signal(signal.SIGHUP)

    def _configure(self, group: dict[str, Any], scheme: str = "http") -> Path:
        config = self._folder / "prometheus.yml"
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
