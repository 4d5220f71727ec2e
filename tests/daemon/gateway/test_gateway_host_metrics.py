"""When certificates expire and how much disk is free, from real files."""

import subprocess
import time
from pathlib import Path

import pytest

from daemon.config.schema import Config, HttpConfig, RecoveryConfig, SinkConfig, SourceConfig
from daemon.gateway.host_metrics import HostMetrics, expiry_of, free_ratio
from feeds.connectors import kafka
from feeds.kafka_security import KafkaSecurity
from metrics.store import MetricStore
from tests.kit.programs import need

DAY_S = 86_400
EXPIRY = "foretick_certificate_expiry_timestamp_seconds"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an authority for nine days; one that it signed for three, by itself and before its authority's."""
    folder = tmp_path_factory.mktemp("tls")
    new = [need("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes"]
    authority = ["-days", "9", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem"]
    leaf = ["-days", "3", "-subj", "/CN=leaf", "-CA", "ca.pem", "-CAkey", "ca.key"]
    leaf += ["-addext", "basicConstraints=critical,CA:false", "-keyout", "leaf.key", "-out", "leaf.pem"]
    for arguments in (authority, leaf):
        subprocess.run([*new, *arguments], cwd=folder, check=True, capture_output=True)
    chain = (folder / "leaf.pem").read_text() + (folder / "ca.pem").read_text()
    (folder / "chain.pem").write_text(chain)
    return folder


@pytest.mark.parametrize(("file", "days"), [("ca.pem", 9), ("leaf.pem", 3), ("chain.pem", 3)])
def test_the_first_certificate_of_a_file_counts(certificates: Path, file: str, days: int) -> None:
    assert expiry_of(certificates / file) == pytest.approx(time.time() + days * DAY_S, abs=600)


def test_what_is_no_certificate_expires_at_no_time(certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    assert [expiry_of(each) for each in (certificates / "leaf.key", tmp_path / "empty.pem")] == [0, 0]
    assert expiry_of(tmp_path / "none.pem") == 0


def test_the_gauges_are_of_the_certificates_that_the_daemon_shows(certificates: Path) -> None:
    def security(file: str) -> KafkaSecurity:
        return KafkaSecurity(tls=True, certificate_file=str(certificates / file))

    config = Config(
        source=SourceConfig(kafka=kafka.KafkaSourceConnector("b:9", security=security("ca.pem"))),
        sink=SinkConfig(kafka=kafka.KafkaSinkConnector("b:9", security=security("leaf.pem"))),
    )
    store = MetricStore.local({})
    HostMetrics(config, store)
    assert store.value(EXPIRY, use="kafka") == expiry_of(certificates / "leaf.pem"), "the first that ends"
    assert store.value(EXPIRY, use="http") == 0
    shown = HttpConfig(tls_certificate_file=str(certificates / "chain.pem"), tls_key_file="a key")
    HostMetrics(Config(http=shown), store)
    assert store.value(EXPIRY, use="http") == expiry_of(certificates / "leaf.pem")


def test_free_room_is_of_the_disk_of_the_snapshots_before_their_directory_exists(tmp_path: Path) -> None:
    store = MetricStore.local({})
    HostMetrics(Config(recovery=RecoveryConfig(directory=str(tmp_path / "a" / "b"))), store).note()
    found = store.value("foretick_snapshot_disk_free_ratio")
    assert found == pytest.approx(free_ratio(tmp_path), abs=0.05)
    assert 0 < found <= 1
