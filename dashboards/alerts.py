"""The alerts of `alerts.toml`, as Prometheus' rules, as Grafana's, and as the runbook."""

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

FILE = Path(__file__).with_name("alerts.toml")
_GROUP = "foretick"
_DURATION = re.compile(r"(?<=\[)(\d+)([smh])(?=\])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_HEAD = "# Made by `foretick dashboards build` of dashboards/alerts.toml.\n"


class Alert(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"wait": "for"}):
    """One alert; the file's head says what its members mean."""

    name: str
    severity: Literal["page", "ticket"]
    expr: str
    summary: str
    look: str
    do: str
    wait: str = "0s"
    symptom_of: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        """Where the runbook speaks of it."""
        return f"docs/runbook.md#{self.name.lower()}"


class Alerts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. ``causes``: PromQL of what makes an alert a symptom, by name: `on (labels) (expression)`."""

    causes: dict[str, str]
    alerts: tuple[Alert, ...]

    def expression(self, alert: Alert) -> str:
        """The alert's PromQL on one line, which finds nothing where a cause explains it."""
        if not alert.symptom_of:
            return _line(alert.expr)
        causes = "".join(f" unless {_line(self.causes[each])}" for each in alert.symptom_of)
        return f"({_line(alert.expr)}){causes}"


def read() -> Alerts:
    """The committed alerts. Raises msgspec.ValidationError."""
    return msgspec.toml.decode(FILE.read_bytes(), type=Alerts)


def prometheus(found: Alerts, faster: float = 1.0) -> str:
    """A rules file. ``faster`` divides all windows, and how long alerts wait: for tests."""
    rules = [
        {
            "alert": each.name,
            "expr": _scaled(found.expression(each), faster),
            "for": each.wait if faster == 1 else f"{seconds(each.wait) / faster * 1000:.0f}ms",
            "labels": {"severity": each.severity},
            "annotations": {"summary": _line(each.summary), "runbook": each.page},
        }
        for each in found.alerts
    ]
    group = {"name": _GROUP, "interval": "15s" if faster == 1 else f"{15_000 / faster:.0f}ms", "rules": rules}
    return _HEAD + _yaml({"groups": [group]})


def grafana(found: Alerts) -> str:
    """A file for Grafana's `provisioning/alerting`, over a data source with the uid `prometheus`."""
    rules = [_grafana_rule(each, found.expression(each)) for each in found.alerts]
    group = {"orgId": 1, "name": _GROUP, "folder": "Foretick", "interval": "15s", "rules": rules}
    return _HEAD + _yaml({"apiVersion": 1, "groups": [group]})


def runbook(found: Alerts) -> str:
    """The runbook's page in Markdown: a section for each alert."""
    rows = [
        f"| [{each.name}](#{each.name.lower()}) | {each.severity} | {_sentence(each)} |"
        for each in found.alerts
    ]
    sections = [
        f"## {each.name}\n\n{_sentence(each)}\n\n**Look**: {each.look}\n\n**Do**: {each.do}\n\n"
        f"```promql\n{found.expression(each)}\n```\n"
        for each in found.alerts
    ]
    return (
        "# Runbook\n\nWhat each alert means, what to look at, and what to do. Severity `page`: answers are "
        "missing, late or wrong now.\n`ticket`: it can wait for the morning. An alert is silent where another"
        " names its cause.\n[How to install them](operations.md#alerts). Made by `foretick dashboards build` "
        "of `dashboards/alerts.toml`.\n\n| alert | severity | what it says |\n|---|---|---|\n"
        + "\n".join(rows)
        + "\n\n"
        + "\n".join(sections)
    )


def _grafana_rule(alert: Alert, expression: str) -> dict[str, Any]:
    query = {"refId": "A", "expr": expression, "instant": True}
    summary = _line(alert.summary).replace("$value", "$values.A.Value")
    fires = {"refId": "B", "type": "math", "expression": "is_number($A)"}
    return {
        "uid": re.sub(r"(?<!^)(?=[A-Z])", "-", alert.name).lower(),
        "title": alert.name,
        "condition": "B",
        "data": [
            {
                "refId": "A",
                "relativeTimeRange": {"from": 600, "to": 0},
                "datasourceUid": "prometheus",
                "model": query,
            },
            {"refId": "B", "datasourceUid": "__expr__", "model": fires},
        ],
        "for": alert.wait,
        "noDataState": "OK",
        "execErrState": "Error",
        "labels": {"severity": alert.severity},
        "annotations": {"summary": summary, "runbook": alert.page},
    }


def _line(text: str) -> str:
    return " ".join(text.split())


def _scaled(expression: str, faster: float) -> str:
    """The expression with shorter windows, of whole seconds."""
    if faster == 1:
        return expression
    return _DURATION.sub(
        lambda found: f"{max(1, round(int(found[1]) * _SECONDS[found[2]] / faster))}s", expression
    )


def seconds(duration: str) -> int:
    """Of a Prometheus duration with one unit."""
    return int(duration[:-1]) * _SECONDS[duration[-1]]


def _sentence(alert: Alert) -> str:
    """The summary for a page: its templates as words."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", _line(alert.summary))
    return re.sub(r"\{\{ \$value \|[^}]*\}\}", "*so much*", text)


def _yaml(data: Any) -> str:
    return msgspec.yaml.encode(data).decode()
