"""The alerts under promtool: each fires on its fault and by itself, and a healthy daemon has none."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

import dashboards
from daemon.cli.main import COMMANDS
from daemon.config.key_reference import configuration_reference
from dashboards import alerts
from metrics.catalogue import BY_NAME
from tests.dashboards.test_dashboards_boards import SELECTOR, family
from tests.kit.programs import need


def _keys() -> set[str]:
    """Every key of the configuration, with its table."""
    found, table = set(), ""
    for line in configuration_reference().splitlines():
        if heading := re.match(r"## (?:`\[+([\w.]+)\]+`)?", line):
            table = f"{heading[1]}." if heading[1] else ""
        elif row := re.match(r"\| `(\w+)` \|", line):
            found.add(table + row[1])
    return found


FOUND = alerts.read()
NAMES = [each.name for each in FOUND.alerts]
KEYS = _keys()
TOPICS = {"foretick.progress.v1", "transaction.timeout.ms"}
FOLDER = Path(dashboards.__file__).parent
MINUTES = 20
"""When alerts are looked at; a fault begins after ten minutes where a case does not say otherwise."""
SAMPLES = MINUTES * 4
NEVER = f"0x{SAMPLES}"
GROWS = f"0+10x{SAMPLES}"
STOPS = "0+10x40 400x40"
BEGINS = "0x40 0+10x40"
Series = Mapping[str, str]
"""Values by series, four a minute, as promtool writes them; the label `instance` is added."""
HEALTHY: Series = {
    'up{job="foretick"}': f"1x{SAMPLES}",
    "foretick_engine_up": f"1x{SAMPLES}",
    "foretick_engine_restarts_total": NEVER,
    'foretick_source_up{source="kafka"}': f"1x{SAMPLES}",
    'foretick_symbols_silent{source="kafka"}': NEVER,
    'foretick_records_total{source="kafka"}': GROWS,
    'foretick_session_records_total{session="btc"}': GROWS,
    'foretick_bars_total{session="btc"}': GROWS,
    'foretick_versions_total{session="btc"}': GROWS,
    'foretick_freshness_misses_total{session="btc"}': NEVER,
    'foretick_consumer_lag_seconds{partition="t/0"}': f"0.2x{SAMPLES}",
    'foretick_checkpoints_total{source="kafka",outcome="done"}': GROWS,
    'foretick_checkpoints_total{source="kafka",outcome="failed"}': NEVER,
    'foretick_answers_failed_total{reason="publish"}': NEVER,
    'foretick_answers_failed_total{reason="engine"}': NEVER,
    'foretick_pool_blocks{state="free"}': f"300x{SAMPLES}",
    'foretick_pool_blocks{state="used"}': f"700x{SAMPLES}",
    'foretick_preemptions_total{class="pool",by_class="flash"}': NEVER,
    "foretick_utilisation_ratio": f"0.4x{SAMPLES}",
    'foretick_gap_ratio{session="btc"}': f"1.02x{SAMPLES}",
    'foretick_adapted_coverage{session="btc"}': f"0.92x{SAMPLES}",
    'foretick_certificate_expiry_timestamp_seconds{use="http"}': f"7776000x{SAMPLES}",
    'foretick_certificate_expiry_timestamp_seconds{use="kafka"}': NEVER,
    "foretick_snapshot_disk_free_ratio": f"0.6x{SAMPLES}",
    "foretick_standby": NEVER,
    'foretick_partitions_warming{source="kafka"}': NEVER,
    'foretick_feed_faults_total{source="kafka",kind="crossed"}': "0+0.1x80",
    'foretick_unauthenticated_total{reason="unknown"}': "0x40 1x40",
    'foretick_records_late_total{session="btc"}': "0x40 0+0.05x40",
}
LOST_SHARE = "0x40 0+2x40"
FAULTS: dict[str, Series] = {
    "ForetickDown": {'up{job="foretick"}': "1x40 0x40"},
    "ForetickEngineDown": {
        "foretick_engine_up": "1x40 0x40",
        "foretick_engine_restarts_total": "0x60 1x20",
        'foretick_versions_total{session="btc"}': STOPS,
    },
    "ForetickEngineRestarted": {
        "foretick_engine_restarts_total": "0x60 1x20",
        'foretick_freshness_misses_total{session="btc"}': BEGINS,
    },
    "ForetickSourceDown": {
        'foretick_source_up{source="kafka"}': "1x40 0x40",
        'foretick_bars_total{session="btc"}': STOPS,
        'foretick_versions_total{session="btc"}': STOPS,
        'foretick_checkpoints_total{source="kafka",outcome="done"}': STOPS,
        'foretick_checkpoints_total{source="kafka",outcome="failed"}': BEGINS,
        'foretick_publish_retries_total{sink="kafka"}': BEGINS,
    },
    "ForetickFeedSilent": {'foretick_symbols_silent{source="kafka"}': "0x40 1x40"},
    "ForetickFeedGap": {'foretick_records_lost_upstream_total{source="kafka"}': "0x60 3x20"},
    "ForetickFeedFaults": {'foretick_feed_faults_total{source="kafka",kind="crossed"}': "0x40 0+1x40"},
    "ForetickDeadLetters": {'foretick_dead_letters_total{stage="read"}': "0x60 1x20"},
    "ForetickRecordsDropped": {
        'foretick_ring_dropped_total{source="kafka"}': "0x60 100x20",
        'foretick_freshness_misses_total{session="btc"}': f"0+5x{SAMPLES}",
    },
    "ForetickFreshnessBurnsFast": {'foretick_freshness_misses_total{session="btc"}': f"0+5x{SAMPLES}"},
    "ForetickFreshnessBurnsSlowly": {'foretick_freshness_misses_total{session="btc"}': f"0+1x{SAMPLES}"},
    "ForetickSessionStale": {'foretick_versions_total{session="btc"}': STOPS},
    "ForetickLagGrowing": {'foretick_consumer_lag_seconds{partition="t/0"}': "0x40 0+15x40"},
    "ForetickCheckpointStalled": {
        'foretick_checkpoints_total{source="kafka",outcome="done"}': STOPS,
        'foretick_checkpoints_total{source="kafka",outcome="failed"}': BEGINS,
    },
    "ForetickPublishingFails": {'foretick_publish_retries_total{sink="kafka"}': BEGINS},
    "ForetickTransactionsAborted": {'foretick_transactions_total{outcome="aborted"}': BEGINS},
    "ForetickQuestionsFail": {'foretick_answers_failed_total{reason="engine"}': "0x60 1x20"},
    "ForetickOutOfMemory": {'foretick_oom_total{outcome="failed"}': "0x60 1x20"},
    "ForetickPoolNearFull": {
        'foretick_pool_blocks{state="free"}': "300x40 10x40",
        'foretick_preemptions_total{class="pool",by_class="flash"}': BEGINS,
    },
    "ForetickSaturated": {"foretick_utilisation_ratio": "0.99x80"},
    "ForetickConfidenceDrifts": {
        'foretick_gap_ratio{session="btc"}': "0.5x80",
        'foretick_versions_total{session="btc"}': f"0+1x{SAMPLES}",
    },
    "ForetickCoverageLost": {'foretick_adapted_coverage{session="btc"}': "0.999x80"},
    "ForetickCertificateExpires": {'foretick_certificate_expiry_timestamp_seconds{use="http"}': "90000x80"},
    "ForetickCertificateExpiresSoon": {
        'foretick_certificate_expiry_timestamp_seconds{use="kafka"}': "900000x80"
    },
    "ForetickSnapshotsFail": {'foretick_snapshot_write_failures_total{reason="no_room"}': "0x60 1x20"},
    "ForetickSnapshotDiskFull": {
        "foretick_snapshot_disk_free_ratio": "0.6x40 0.03x40",
        'foretick_snapshot_write_failures_total{reason="disk"}': "0x60 1x20",
    },
    "ForetickProgressNotWritten": {
        "foretick_snapshot_disk_free_ratio": "0.6x40 0.03x40",
        'foretick_snapshot_write_failures_total{reason="disk"}': "0x60 1x20",
        "foretick_recovery_progress_failed_total": BEGINS,
    },
    "ForetickIdleSessionsNotSpilled": {"foretick_spill_failures_total": "0x60 1x20"},
    "ForetickClockSkewed": {'foretick_clock_skew_records_total{source="kafka"}': BEGINS},
    "ForetickTaskEnded": {'foretick_tasks_ended_total{outcome="failed"}': "0x60 1x20"},
    "ForetickDefect": {"foretick_integrity_failures_total": "0x60 1x20"},
    "ForetickConfigurationRefused": {'foretick_config_reloads_total{outcome="refused"}': "0x60 1x20"},
    "ForetickNoDaemonAnswers": {"foretick_standby": "0x40 1x40"},
    "ForetickWarmingStuck": {'foretick_partitions_warming{source="kafka"}': "0x40 2x40"},
    "ForetickUnplannedHandOver": {'foretick_hand_overs_total{kind="unplanned"}': "0x60 4x20"},
    "ForetickPeersFail": {'foretick_peer_requests_total{outcome="failed"}': BEGINS},
    "ForetickUnauthenticated": {'foretick_unauthenticated_total{reason="unknown"}': BEGINS},
    "ForetickRecordsLate": {'foretick_records_late_total{session="btc"}': LOST_SHARE},
    "ForetickSymbolsRefused": {'foretick_records_unopened_total{reason="limit"}': BEGINS},
    "ForetickRefreshFails": {'foretick_refresh_failures_total{session="btc"}': "0x60 1x20"},
    "ForetickSchemaRegistryFails": {'foretick_schema_requests_failed_total{source="kafka"}': BEGINS},
    "ForetickListenersTooSlow": {'foretick_events_dropped_total{transport="sse"}': "0x60 5x20"},
    "ForetickWebhookFails": {
        'foretick_webhook_attempts_total{webhook="desk",outcome="given_up"}': "0x60 1x20"
    },
}


def test_the_committed_files_are_what_the_table_says():
    assert (FOLDER / "alerts.yml").read_text() == alerts.prometheus(FOUND)
    assert (FOLDER / "grafana-alerts.yml").read_text() == alerts.grafana(FOUND)
    assert (FOLDER.parent / "docs/runbook.md").read_text() == alerts.runbook(FOUND)


@pytest.mark.parametrize("alert", FOUND.alerts, ids=NAMES)
def test_an_alert_uses_names_labels_and_values_of_the_catalogue(alert: alerts.Alert):
    expression = FOUND.expression(alert)
    for name, selector in SELECTOR.findall(expression):
        metric = BY_NAME[family(name)]
        for label, _, pattern in re.findall(r'(\w+)(=~|!~|=)"([^"]*)"', selector):
            assert label in metric.labels
            allowed = metric.values.get(label)
            assert allowed is None or set(pattern.split("|")) <= set(allowed)
    labels = {label for name, _ in SELECTOR.findall(expression) for label in BY_NAME[family(name)].labels}
    assert set(re.findall(r"\$labels\.(\w+)", alert.summary)) <= labels | {"instance", "job"}


@pytest.mark.parametrize("alert", FOUND.alerts, ids=NAMES)
def test_what_the_runbook_names_exists(alert: alerts.Alert):
    text = alert.look + alert.do
    for command in re.findall(r"`foretick (\w+)", text):
        assert command in {*COMMANDS, "doctor", "dump"}
    for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", text):
        if key not in TOPICS:
            assert key in KEYS, key
    for name in re.findall(r"`(foretick_\w+)`", text):
        assert name in BY_NAME


def test_the_example_for_alertmanager_names_alerts_and_labels_that_exist():
    config = yaml.safe_load((FOLDER / "alertmanager.yml").read_text())
    receivers = {each["name"] for each in config["receivers"]}
    routes = [config["route"], *config["route"]["routes"]]
    assert {each["receiver"] for each in routes} == receivers
    assert config["route"]["routes"][0]["matchers"] == ["severity = page"]
    text = json.dumps(config["inhibit_rules"])
    assert set(re.findall(r"Foretick\w+", text)) <= set(NAMES)
    labels = {label for metric in BY_NAME.values() for label in metric.labels}
    assert {each for rule in config["inhibit_rules"] for each in rule["equal"]} <= labels | {
        "instance",
        "job",
    }


@pytest.mark.prometheus
def test_alertmanager_takes_the_example():
    command = [need("amtool"), "check-config", FOLDER / "alertmanager.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_fault_and_an_id_of_its_own_in_grafana():
    assert list(FAULTS) == NAMES
    rules = yaml.safe_load(alerts.grafana(FOUND))["groups"][0]["rules"]
    uids = [rule["uid"] for rule in rules]
    assert len(set(uids)) == len(uids)
    assert max(map(len, uids)) <= 40  # Grafana's limit


@pytest.mark.prometheus
def test_each_fault_fires_its_alert_and_no_other(tmp_path: Path):
    """All cases at once, each an instance of its own."""
    (tmp_path / "rules.yml").write_text(alerts.prometheus(FOUND))
    cases = {"healthy": HEALTHY} | {name: {**HEALTHY, **series} for name, series in FAULTS.items()}
    test = {
        "interval": "15s",
        "input_series": [
            {"series": _of(instance, each), "values": values}
            for instance, series in cases.items()
            for each, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, instance, job) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES}m",
                "exp_samples": [{"labels": _firing(name), "value": 1} for name in FAULTS],
            }
        ],
    }
    file = tmp_path / "test.yml"
    what = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [test]}
    file.write_text(yaml.safe_dump(what))
    command = [need("promtool"), "test", "rules", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _firing(name: str) -> str:
    job = "foretick" if name == "ForetickDown" else name if name == "ForetickNoDaemonAnswers" else ""
    instance = "" if name == "ForetickNoDaemonAnswers" else name
    labels = {"alertname": name, "instance": instance, "job": job}
    return "{" + ",".join(f'{label}="{value}"' for label, value in labels.items() if value) + "}"


def _of(instance: str, series: str) -> str:
    """The series of an instance. A group of standbys is one job."""
    name, _, labels = series.partition("{")
    job = f'job="{instance}",' if name == "foretick_standby" else ""
    return f'{name}{{instance="{instance}",{job}' + (labels or "}")
