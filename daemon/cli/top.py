"""`foretick top`: a running daemon's sessions, queues and latencies in the terminal."""

import asyncio
import ssl
import sys
from pathlib import Path
from typing import Any

import click

from daemon.cli.options import EXIT_CONFIG
from feeds.connector import SettingError
from feeds.secret_files import read_secret

_TIMEOUT_S = 10.0
"""Of connecting, and of waiting for the next part of a reply."""


@click.command("top")
@click.option(
    "--http",
    "url",
    metavar="URL",
    default="http://127.0.0.1:7800",
    show_default=True,
    help="the daemon's HTTP address",
)
@click.option(
    "--key-file",
    type=click.Path(path_type=Path),
    help="a file with your API key, where the daemon has tenants; metrics are for operators",
)
@click.option(
    "--ca-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="authorities of an https address, in PEM  [default: the system's]",
)
@click.option(
    "--interval", type=click.FloatRange(min=0.2), default=2.0, show_default=True, help="seconds between polls"
)
def command(url: str, key_file: Path | None, ca_file: Path | None, interval: float) -> None:
    """Show a running daemon's sessions, answers, feeds, queues, pool and latencies; it changes nothing."""
    # of the extra `top`
    import httpx2

    from daemon.top.app import TopApp
    from daemon.top.reader import HttpReader

    try:
        address = httpx2.URL(url)
        context = ssl.create_default_context(cafile=ca_file)
    except httpx2.InvalidURL as error:
        raise click.BadParameter(f"{url!r}: {error}", param_hint="--http") from None
    except ssl.SSLError as error:
        raise click.BadParameter(f"{ca_file}: {error.reason or error}", param_hint="--ca-file") from None
    if address.scheme not in ("http", "https") or not address.host or (address.port or 0) >= 1 << 16:
        raise click.BadParameter(f"{url!r} is no address such as http://127.0.0.1:7800", param_hint="--http")
    headers = {} if key_file is None else {"authorization": f"Bearer {_key(key_file)}"}
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError("it needs a terminal")

    async def show() -> None:
        # without proxies and passwords of ~/.netrc: a daemon is inside the network
        options: dict[str, Any] = {"base_url": address, "headers": headers, "verify": context}
        async with httpx2.AsyncClient(**options, timeout=_TIMEOUT_S, trust_env=False) as client:
            await TopApp(HttpReader(client), interval, url).run_async()

    asyncio.run(show())


def _key(path: Path) -> str:
    try:
        return read_secret("--key-file", path).strip()
    except SettingError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_CONFIG)
