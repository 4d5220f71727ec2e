"""Kafka over TLS with a login, on a real Apache Kafka that demands both; and what is said of mistakes."""

import asyncio
import logging
import re
import uuid
from pathlib import Path
from typing import Literal

import pytest

from feeds.connector import SettingError
from feeds.connectors.kafka import KafkaSinkConnector, KafkaSourceConnector
from feeds.kafka_client import quiet_client_log
from feeds.kafka_security import KafkaSecurity, Mechanism
from feeds.kafka_source import KafkaSource
from feeds.source import CommitPoint
from tests.kit import until
from tests.kit.kafka import PASSWORD, USER, KafkaServer, create_topics, make_certificates


def credentials(folder: Path, user: str = USER, password: str = PASSWORD) -> str:
    path = folder / "credentials"
    path.write_text(f"{user}\n{password}\n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.sampled(2)
@pytest.mark.kafka
@pytest.mark.parametrize(
    ("sasl", "delivery"),
    [
        ("plain", "at_least_once"),
        ("scram-sha-256", "at_least_once"),
        ("scram-sha-512", "at_least_once"),
        ("scram-sha-512", "exactly_once"),
    ],
)
async def test_records_cross_a_broker_that_demands_tls_and_a_login(
    secured_kafka: KafkaServer,
    tmp_path: Path,
    sasl: Mechanism,
    delivery: Literal["at_least_once", "exactly_once"],
) -> None:
    quiet_client_log()
    topic = f"trades.{uuid.uuid4().hex[:8]}"
    await create_topics(secured_kafka.bootstrap, {topic: 1})
    security = KafkaSecurity(
        tls=True, ca_file=str(secured_kafka.ca_file), sasl=sasl, credentials_file=credentials(tmp_path)
    )
    target = KafkaSinkConnector(
        bootstrap=secured_kafka.secure, topic=topic, dlq=topic, security=security, delivery=delivery
    )
    found = await asyncio.to_thread(lambda: list(target.check()))
    assert all(finding.ok for finding in found), found
    route = target.open("out", 2.0)
    await route.sink.start()
    await asyncio.wait_for(route.sink.publish(topic, b"k", b"answer", {}), 60)
    await route.sink.stop()
    feed = KafkaSourceConnector(
        bootstrap=secured_kafka.secure, topics=(topic,), group=topic, security=security
    ).open("in", 2.0)
    await asyncio.wait_for(feed.start(), 60)
    async with asyncio.timeout(60):
        async for batch in feed.batches():
            assert [message.payload for message in batch] == [b"answer"]
            await feed.commit({(topic, 0): CommitPoint(1)})
            break
    await feed.stop()


TRIES = 3
"""A broker closes the connection behind its refusal, which a busy client may notice first."""


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("password", "refuses user name and password: .*[Aa]uthentication failed"),
        ("authority", "certificate is not trusted .*security.ca_file.*: "),
        ("clear", "does not answer: it may want TLS"),
        ("anonymous", "does not answer: it may want a login"),
        ("tls", "no TLS with the broker, whose port may be for connections in the clear"),
    ],
)
async def test_a_refused_connection_says_what_is_wrong(
    secured_kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str, says: str
) -> None:
    quiet_client_log()
    caplog.set_level(logging.DEBUG)
    authority, user = str(secured_kafka.ca_file), credentials(tmp_path)
    if wrong == "authority":
        make_certificates(tmp_path)
        authority = str(tmp_path / "ca.pem")
    if wrong == "password":
        user = credentials(tmp_path, password="tock tick")
    security = KafkaSecurity(tls=True, ca_file=authority, sasl="scram-sha-512", credentials_file=user)
    if wrong == "clear":
        security = KafkaSecurity()
    if wrong == "anonymous":
        security = KafkaSecurity(tls=True, ca_file=authority)
    bootstrap = secured_kafka.bootstrap if wrong == "tls" else secured_kafka.secure
    connector = KafkaSourceConnector(bootstrap=bootstrap, topics=("t",), group="g", security=security)
    for _ in range(TRIES):
        found = await asyncio.to_thread(lambda: list(connector.check()))
        assert found[-1].key == "bootstrap"
        assert not found[-1].ok
        source = connector.open("in", 1.0)
        assert isinstance(source, KafkaSource)
        if wrong != "clear":  # there the client itself waits for an answer, for forty seconds
            starting = asyncio.ensure_future(source.start())
            await until(lambda source=source: source.connection.retries > 0)
            await source.stop()
            await starting
        if re.search(says, found[-1].message) and (wrong == "clear" or re.search(says, caplog.text)):
            break
    assert re.search(says, found[-1].message), found[-1].message
    if wrong != "clear":
        assert re.search(says, caplog.text)
    assert PASSWORD not in caplog.text
    assert "tock tick" not in caplog.text + found[-1].message


@pytest.mark.parametrize(
    ("settings", "key", "says"),
    [
        ({"sasl": "plain", "credentials_file": "C"}, "sasl", "plain sends the password as it is"),
        ({"sasl": "scram-sha-256"}, "credentials_file", "belong together"),
        ({"credentials_file": "C"}, "credentials_file", "belong together"),
        ({"ca_file": "x"}, "ca_file", "is for TLS"),
        ({"tls": True, "ca_file": "none.pem"}, "ca_file", "none.pem cannot be used: No such file"),
        ({"tls": True, "certificate_file": "x"}, "key_file", "belong together"),
        ({"tls": True, "certificate_file": "x", "key_file": "K"}, "certificate_file", "cannot be used"),
        ({"tls": True, "ca_file": "K"}, "ca_file", "cannot be used"),
        ({"sasl": "scram-sha-256", "credentials_file": "none"}, "credentials_file", "No such file"),
        ({"sasl": "scram-sha-256", "credentials_file": "K"}, "credentials_file", "two lines.*it has 1"),
        ({"sasl": "scram-sha-256", "credentials_file": "B"}, "credentials_file", "not text in UTF-8"),
        ({"sasl": "scram-sha-256", "credentials_file": "O"}, "credentials_file", "mode 0640.*chmod 600"),
    ],
)
def test_unusable_settings_name_their_key(
    tmp_path: Path, settings: dict[str, object], key: str, says: str
) -> None:
    files = {"C": b"desk\nsecret\n", "K": b"not a key\n", "B": b"\xff\xfe\n\n", "O": b"desk\nsecret\n"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o640 if name == "O" else 0o600)
    given = {k: str(tmp_path / v) if isinstance(v, str) and v in files else v for k, v in settings.items()}
    connector = KafkaSourceConnector(bootstrap="127.0.0.1:1", security=KafkaSecurity(**given))  # type: ignore[arg-type]  # as parametrized
    with pytest.raises(SettingError, match=says) as raised:
        connector.open("in", 1.0)
    assert raised.value.key == f"security.{key}"
    assert "secret" not in str(raised.value)
    (found,) = connector.check()
    assert (found.key, found.ok) == (f"security.{key}", False)


def test_a_credential_of_systemd_is_read_whatever_its_mode_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kafka"
    path.write_text("desk\nsecret\n")
    path.chmod(0o440)
    security = KafkaSecurity(sasl="scram-sha-256", credentials_file=str(path))
    assert not next(security.check()).ok
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert security.client_options()["sasl_plain_password"] == "secret"
