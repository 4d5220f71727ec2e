"""`foretick dashboards`: build the committed files, or push the dashboards to a Grafana."""

import contextlib
import difflib
import json
from pathlib import Path
from typing import Any

import click

FOLDER = Path(__file__).parent
_RUNBOOK = Path("../docs/runbook.md")


@click.group()
def dashboards() -> None:
    """Grafana dashboards as code."""


@dashboards.command()
@click.option("--check", is_flag=True, help="Write nothing; fail if a committed file is out of date.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=FOLDER,
    help="Directory of the files; default: the committed ones.",
)
def build(check: bool, directory: Path) -> None:
    """Render dashboards, alerts and runbook into their committed files (for developers)."""
    for name, text in _render().items():
        path = directory / name
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            raise click.ClickException(f"{path.name} is out of date: run `foretick dashboards build`")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            click.echo(f"wrote {path}")


@dashboards.command()
@click.option(
    "--url", required=True, envvar="GRAFANA_URL", help="Grafana's address, such as http://127.0.0.1:3000."
)
@click.option("--token", required=True, envvar="GRAFANA_TOKEN", help="Token of a Grafana service account.")
@click.option("--folder", default="", help="Uid of the Grafana folder; default: the general folder.")
@click.option("--timeout", default=10.0, show_default=True, help="Time limit of a request, in seconds.")
@click.option("--dry-run", is_flag=True, help="Push nothing; show what would change.")
def push(url: str, token: str, folder: str, timeout: float, dry_run: bool) -> None:
    """Push the committed dashboards to a Grafana: those that differ from what it has under the same uid."""
    grafana = _connect(url, token, timeout)
    # GrafanaApi has no close of its own; its session does.
    with contextlib.closing(grafana.client.s):
        for path in sorted(FOLDER.glob("*.json")):
            ours = json.loads(path.read_text(encoding="utf-8"))
            there = _get(grafana, ours["uid"], url)
            changed = changes(there, ours)
            if not changed:
                click.echo(f"{ours['title']}: as it is there")
            elif dry_run:
                click.echo(f"{ours['title']}: would change\n" + "\n".join(changed))
            else:
                click.echo(f"{ours['title']}: {url.rstrip('/')}{_push(grafana, ours, folder, url)}")


@dashboards.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
def export(directory: Path) -> None:
    """Copy dashboards and alerts into a directory, for Grafana's and Prometheus' own provisioning."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted((*FOLDER.glob("*.json"), *FOLDER.glob("*.yml"))):
        (directory / path.name).write_bytes(path.read_bytes())
        click.echo(f"wrote {directory / path.name}")


def changes(there: dict[str, Any] | None, ours: dict[str, Any]) -> list[str]:
    """How our dashboard differs from Grafana's, as lines of a diff; what Grafana numbers does not count."""
    if there is None:
        return ["  it is not there yet"]
    return list(difflib.unified_diff(_lines(there), _lines(ours), "there", "ours", lineterm="", n=1))


def _lines(dashboard: dict[str, Any]) -> list[str]:
    return json.dumps({**dashboard, "id": None, "version": None}, sort_keys=True, indent=1).splitlines()


def _render() -> dict[str, str]:
    """The files by their names, beside this one."""
    try:
        from dashboards import alerts
        from dashboards.boards import BOARDS
    except ImportError as error:
        raise click.ClickException(
            f"building dashboards needs grafana-foundation-sdk and pyyaml ({error.name} is missing)"
        ) from None
    found = alerts.read()
    return {
        **{f"{board.name}.json": board.build() for board in BOARDS},
        "alerts.yml": alerts.prometheus(found),
        "grafana-alerts.yml": alerts.grafana(found),
        str(_RUNBOOK): alerts.runbook(found),
    }


def _connect(url: str, token: str, timeout: float) -> Any:
    """A GrafanaApi. Imported here: grafana-client is an extra, because it replaces the urllib3 module."""
    from grafana_client import GrafanaApi

    return GrafanaApi.from_url(url, credential=token, timeout=timeout)


def _get(grafana: Any, uid: str, url: str) -> dict[str, Any] | None:
    """The dashboard of this uid on the server; None where there is none."""
    from grafana_client.client import GrafanaClientError, GrafanaException
    from niquests.exceptions import RequestException

    try:
        found: dict[str, Any] = grafana.dashboard.get_dashboard(uid)["dashboard"]
    except GrafanaClientError as error:
        if error.status_code == 404:
            return None
        raise click.ClickException(f"{url} refuses dashboard {uid}: {error.message}") from None
    except GrafanaException as error:
        raise click.ClickException(f"{url} refuses dashboard {uid}: {error.message}") from None
    except RequestException as error:
        raise click.ClickException(f"cannot reach {url}: {error}") from None
    return found


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
