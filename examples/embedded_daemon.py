"""A daemon inside your own program: `python examples/embedded_daemon.py CONFIG SESSION QUESTION`."""

import asyncio
import sys

from foretick import Daemon, load_config


async def main(config: str, session: str, question: str) -> None:
    """Start a daemon, ask it one question, and stop it."""
    async with Daemon(load_config(config)) as daemon, daemon.client() as client:
        print(f"ready: http://127.0.0.1:{daemon.http_port}/")
        # before its first bar there is nothing to ask about
        await client.answers(session, min_version=1)
        reply = await client.ask(session, question, choices=("YES", "NO"))
        print(f"{session}: {reply.choice} at data version {reply.data_version}")


asyncio.run(main(*sys.argv[1:]))
