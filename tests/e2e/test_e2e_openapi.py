"""What the daemon's HTTP API does is what its OpenAPI document says: schemathesis, against a real daemon.

Schemathesis has an environment of its own, made by the first run: its urllib3 is the module that
grafana-client replaces.
"""

import asyncio
import json
from pathlib import Path

import pytest

from daemon.config.schema import QueryConfig, SchedulerConfig
from feeds.connectors.http import HttpSourceConnector
from feeds.durations import Duration
from tests.kit import SECOND, QueueSource, inproc_config
from tests.kit.environments import environment
from tests.kit.inproc import running

STREAMS = ("/v1/events", "/v1/ws")
"""They do not end, so nothing that waits for a reply can test them."""
_MESSAGES, _OPENAI = ("/v1/messages",), ("/v1/chat/completions", "/v1/completions", "/v1/responses")
RUNS = (
    ([word for path in _MESSAGES for word in ("--include-path", path)], 20),
    ([word for path in _OPENAI for word in ("--include-path", path)], 30),
    ([word for path in (*STREAMS, *_MESSAGES, *_OPENAI) for word in ("--exclude-path", path)], 30),
)
"""Arguments that choose paths, and seconds: so that each endpoint gets its turn on a busy machine."""
REFUSED_LATER = "positive_data_acceptance"
"""Not checked: settings, names and prompts that fit the schema may still be refused for what they say."""


SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]

[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "429", "5xx"]
"""
"""A deadline of a few milliseconds, which the document allows, may pass: 504. A list that is longer than
allowed may also be longer than a body may be: 413.
"""
VERSION = "4.32.5"
ENVIRONMENT = Path(__file__).parents[2] / ".cache" / f"schemathesis-{VERSION}"


@pytest.fixture(scope="module")
def schemathesis() -> Path:
    """Its command. Skips, but not in CI, where there is no package registry."""
    return environment(ENVIRONMENT, f"schemathesis=={VERSION}") / "schemathesis"


@pytest.mark.timeout(600)
async def test_the_daemon_does_what_its_document_says(tmp_path: Path, schemathesis: Path) -> None:
    config = inproc_config(
        query=QueryConfig("tcp://127.0.0.1:*", max_wait=Duration(2 * SECOND)),
        scheduler=SchedulerConfig(max_new_tokens=12),  # so that many requests are answered in time
    )
    async with running(config, [QueueSource(), HttpSourceConnector().open("http", 1.0)]) as daemon:
        await daemon.advance()
        described = (await daemon.http("GET", "/openapi.json")).json
        for schema in described["components"]["schemas"].values():  # any other model is a 404
            if "model" in schema.get("properties", {}) and schema["title"].endswith("Request"):
                schema["properties"]["model"] = {"enum": [daemon.gateway.status.model, "session:aaa"]}
        (tmp_path / "openapi.json").write_text(json.dumps(described), encoding="utf-8")
        (tmp_path / "schemathesis.toml").write_text(SETTINGS, encoding="utf-8")
        for chosen, seconds in RUNS:
            arguments = [
                "run", "openapi.json", "--url", f"http://127.0.0.1:{daemon.port}",
                "--seed", "1", "--max-examples", "8",
                "--phases", "coverage,fuzzing", "--exclude-checks", REFUSED_LATER,
                "--no-shrink", "--max-failures", "8",
                "--request-timeout", "20", "--max-time", str(seconds), "--continue-on-failure", *chosen,
            ]  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                str(schemathesis), *arguments,
                cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            told, _ = await process.communicate()
            assert process.returncode == 0, told.decode()[-20_000:]
        assert daemon.count("api_requests", outcome="done") >= 4
