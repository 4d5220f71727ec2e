"""`foretick doctor` on certificates: dates of real ones, judged by a clock that is passed in."""

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from daemon.config.schema import Config, HttpConfig, SinkConfig
from daemon.doctor.validity import judge_certificates
from feeds.connectors.kafka import KafkaSinkConnector
from feeds.kafka_security import KafkaSecurity
from support.certificates import validities_in
from tests.kit.programs import need

DAY = timedelta(days=1)


def certificate(folder: Path, name: str, days: int) -> Path:
    """A certificate of this many days from now on, in PEM."""
    path = folder / name
    new = [need("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    named = [
        "-days",
        str(days),
        "-subj",
        "/CN=a name/O=of some length",
        "-keyout",
        f"{path}.key",
        "-out",
        str(path),
    ]
    subprocess.run([*new, *named], check=True, capture_output=True)
    return path


def config(own: Path | str = "", authorities: Path | str = "") -> Config:
    sink = KafkaSinkConnector("127.0.0.1:1", security=KafkaSecurity(tls=True, ca_file=str(authorities)))
    http = HttpConfig(tls_certificate_file=str(own))
    return Config(http=http, sink=SinkConfig(kafka=sink))


@pytest.mark.parametrize("days", [1, 400, 20000])  # the last one ends after 2049: in the other form of DER
def test_dates_are_those_of_the_certificate(tmp_path: Path, days: int) -> None:
    (found,) = validities_in(certificate(tmp_path, "own.pem", days))
    assert found.end - found.begin == days * DAY
    assert abs(found.begin - datetime.now(UTC)) < timedelta(minutes=5)


def test_a_certificate_is_judged_by_the_time(tmp_path: Path) -> None:
    path = certificate(tmp_path, "own.pem", 400)
    begin, end = validities_in(path)[0]
    for now, verdict in (
        (begin - DAY, "problem"),
        (begin, "ok"),
        (end - 31 * DAY, "ok"),
        (end - 29 * DAY, "warning"),
        (end + timedelta(seconds=1), "problem"),
    ):
        (found,) = judge_certificates(config(path), now)
        assert (found.check, found.verdict) == ("http.tls_certificate_file", verdict)


def test_of_a_chain_the_first_to_end_counts_and_of_authorities_the_last(tmp_path: Path) -> None:
    chain = tmp_path / "chain.pem"
    chain.write_text("".join(certificate(tmp_path, f"{days}.pem", days).read_text() for days in (400, 10)))
    now = validities_in(chain)[0].begin + 20 * DAY
    found = {each.check: each.verdict for each in judge_certificates(config(chain, chain), now)}
    assert found == {"http.tls_certificate_file": "problem", "sink.kafka.security.ca_file": "ok"}


def test_files_without_a_certificate_are_problems(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    whole = certificate(tmp_path, "own.pem", 10).read_text().splitlines()
    (tmp_path / "cut.pem").write_text("\n".join([*whole[:2], whole[-1]]))
    for name in ("missing.pem", "empty.pem", "cut.pem"):
        (found,) = judge_certificates(config(tmp_path / name), datetime.now(UTC))
        assert found.verdict == "problem"
        assert name in found.seen
