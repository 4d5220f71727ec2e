"""`foretick dashboards`: build the committed JSON, or push it to a Grafana."""

import contextlib
import json
from pathlib import Path
from typing import Any

import click

FOLDER = Path(__file__).parent
NAMES = ("latency",)


@click.group()
def dashboards() -> None:
    """Grafana dashboards as code."""


@dashboards.command()
@click.option("--check", is_flag=True, help="Write nothing; fail if a committed file is out of date.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=FOLDER,
    help="Directory of the JSON files; default: the committed ones.",
)
def build(check: bool, directory: Path) -> None:
    """Render the dashboards into their committed JSON files (for developers)."""
    for name, text in _render().items():
        path = directory / f"{name}.json"
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            raise click.ClickException(f"{path.name} is out of date: run `foretick dashboards build`")
        if not check:
            path.write_text(text, encoding="utf-8")
            click.echo(f"wrote {path}")


@dashboards.command()
@click.option(
    "--url", required=True, envvar="GRAFANA_URL", help="Grafana's address, such as http://127.0.0.1:3000."
)
@click.option("--token", required=True, envvar="GRAFANA_TOKEN", help="Token of a Grafana service account.")
@click.option("--folder", default="", help="Uid of the Grafana folder; default: the general folder.")
@click.option("--timeout", default=10.0, show_default=True, help="Time limit of a request, in seconds.")
def push(url: str, token: str, folder: str, timeout: float) -> None:
    """Push the committed dashboards to a Grafana; replaces dashboards with the same uid."""
    grafana = _connect(url, token, timeout)
    # GrafanaApi has no close of its own; its session does.
    with contextlib.closing(grafana.client.s):
        for name in NAMES:
            dashboard = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
            click.echo(f"{dashboard['title']}: {url.rstrip('/')}{_push(grafana, dashboard, folder, url)}")


def _render() -> dict[str, str]:
    try:
        from dashboards import latency
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"building dashboards needs the package grafana-foundation-sdk ({error.name} is missing)"
        ) from None
    return {"latency": latency.build()}


def _connect(url: str, token: str, timeout: float) -> Any:
    """A GrafanaApi. Imported here: grafana-client is an extra, because it replaces the urllib3 module."""
    from grafana_client import GrafanaApi

    return GrafanaApi.from_url(url, credential=token, timeout=timeout)


def _push(grafana: Any, dashboard: dict[str, Any], folder: str, url: str) -> str:
    """Create or replace; returns the dashboard's path on the server."""
    from grafana_client.client import GrafanaException
    from niquests.exceptions import RequestException

    body = {"dashboard": dashboard, "overwrite": True, "message": "pushed by foretick"}
    if folder:
        body["folderUid"] = folder
    try:
        answer = grafana.dashboard.update_dashboard(body)
    except GrafanaException as error:
        raise click.ClickException(f"{url} refused {dashboard['title']!r}: {error.message}") from None
    except RequestException as error:
        raise click.ClickException(f"cannot reach {url}: {error}") from None
    return str(answer.get("url", ""))
