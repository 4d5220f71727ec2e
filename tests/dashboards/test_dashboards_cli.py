"""`dashboards build` and `dashboards push`, the latter against a small Grafana on loopback."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dashboards import cli
from dashboards.boards import BOARDS

NAMES = [board.name for board in BOARDS]
COMMITTED = {name: json.loads((cli.FOLDER / f"{name}.json").read_text()) for name in NAMES}


class FakeGrafana(ThreadingHTTPServer):
    """Accepts dashboards like Grafana's HTTP API: POST /api/dashboards/db with a bearer token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[dict[str, Any]] = []
        self.boards: dict[str, dict[str, Any]] = {}
        """As a Grafana keeps them: with a number and a version of its own."""
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeGrafana
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "Bearer right":
            return self._answer(401, {"message": "Invalid API key"})
        board = self.server.boards.get(self.path.removeprefix("/api/dashboards/uid/"))
        if board is None:
            return self._answer(404, {"message": "Dashboard not found"})
        return self._answer(200, {"dashboard": board, "meta": {}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != "Bearer right":
            return self._answer(401, {"message": "Invalid API key"})
        if self.path != "/api/dashboards/db":
            return self._answer(404, {"message": "Not found"})
        if body.get("folderUid") == "full":
            return self._answer(412, {"message": "a dashboard with the same name exists"})
        self.server.received.append(body)
        board = body["dashboard"]
        self.server.boards[board["uid"]] = board | {"id": 7, "version": len(self.server.received)}
        return self._answer(200, {"status": "success", "url": f"/d/{body['dashboard']['uid']}/x"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    pytest.importorskip("grafana_client", reason="the extra `grafana` is not installed")
    server = FakeGrafana()
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments: str, **environment: str):
    return CliRunner().invoke(cli.dashboards, list(arguments), env=environment)


def test_push_sends_the_committed_dashboards_and_says_where_they_are(grafana):
    result = run("push", "--url", grafana.url, "--token", "right", "--folder", "ops")
    assert result.exit_code == 0, result.output
    assert [body["dashboard"] for body in grafana.received] == [COMMITTED[name] for name in sorted(NAMES)]
    assert {(body["overwrite"], body["folderUid"]) for body in grafana.received} == {(True, "ops")}
    assert f"Foretick: latency: {grafana.url}/d/foretick-latency/x\n" in result.output


def test_a_second_push_changes_nothing_and_a_dry_run_shows_what_would_change(grafana):
    push = ("push", "--url", grafana.url, "--token", "right")
    first = run(*push, "--dry-run")
    assert "Foretick: latency: would change\n  it is not there yet\n" in first.output
    assert not grafana.received
    run(*push)
    again = run(*push)
    assert again.output.count("as it is there") == len(grafana.received) == len(NAMES)
    grafana.boards["foretick-latency"]["refresh"] = "1m"
    different = run(*push, "--dry-run")
    assert '- "refresh": "1m"' in different.output.replace("-  ", "- ")
    assert different.output.count("as it is there") == len(NAMES) - 1
    run(*push)
    assert grafana.received[-1]["dashboard"] == COMMITTED["latency"]


def test_the_address_and_the_token_may_come_from_the_environment(grafana):
    assert run("push", GRAFANA_URL=grafana.url, GRAFANA_TOKEN="right").exit_code == 0
    assert "folderUid" not in grafana.received[0]


@pytest.mark.parametrize(
    ("token", "folder", "message"),
    [("wrong", "", "Unauthorized"), ("right", "full", "same name exists")],
)
def test_a_refusal_is_one_message(grafana, token, folder, message):
    result = run("push", "--url", grafana.url, "--token", token, "--folder", folder)
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output
    assert token not in result.output or token == "right"


def test_an_address_without_grafana_is_reported(grafana):
    result = run("push", "--url", "http://127.0.0.1:1", "--token", "right")
    assert result.exit_code == 1
    assert result.output.startswith("Error: cannot reach http://127.0.0.1:1")


def test_build_writes_what_check_accepts(tmp_path: Path):
    tmp_path = tmp_path / "dashboards"
    tmp_path.mkdir()
    build = ("build", "--directory", str(tmp_path))
    assert run(*build, "--check").exit_code == 1
    assert run(*build).exit_code == 0
    assert json.loads((tmp_path / "latency.json").read_text()) == COMMITTED["latency"]
    assert run(*build, "--check").exit_code == 0
    (tmp_path / "latency.json").write_text("{}")
    stale = run(*build, "--check")
    assert stale.exit_code == 1
    assert "out of date" in stale.output
