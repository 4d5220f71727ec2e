"""`foretick mcp`: a running daemon as an MCP server over stdio, for agents that start their servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import click

from daemon.api.client import AsyncQueryClient
from daemon.api.messages import ClientRequest, Reply
from daemon.api.subscriptions import SubscriptionUpdate
from daemon.cli.options import endpoint_option, exiting_on_refusal, given_keys
from feeds.curve import Keys

if TYPE_CHECKING:
    from daemon.api.mcp_server import Context


@click.command("mcp")
@endpoint_option
@click.option("--timeout", type=float, default=30.0, show_default=True, help="seconds")
def command(endpoint: str, timeout: float) -> None:
    """Serve a running daemon to an agent over stdin and stdout."""
    with exiting_on_refusal():
        asyncio.run(_serve(endpoint, timeout, given_keys()))


async def _serve(endpoint: str, timeout_s: float, keys: Keys | None) -> None:
    from mcp.server.stdio import stdio_server

    from daemon.api.mcp_server import McpServer

    async with AsyncQueryClient(endpoint, timeout_s, keys=keys) as client:

        async def ask(request: ClientRequest, _: Context) -> Reply:
            return await client.request(request)

        async def flashes() -> AsyncIterator[str]:
            stream = await client.subscribe(events=("flash_ready",))
            async with stream:
                async for item in stream:
                    yield item.message.session if isinstance(item, SubscriptionUpdate) else ""

        server = McpServer(ask, flashes).sdk
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())
