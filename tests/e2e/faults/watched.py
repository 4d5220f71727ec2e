"""A daemon that alerts watch."""

import asyncio
from pathlib import Path

from tests.kit import until_slowly
from tests.kit.daemon import Daemon

SETTLE_S = 1.5
"""Until what was sent last is counted."""


class Watched:
    """``scheme``: of its metrics; ``target``: host:port of them; ``config``: for the doctor."""

    scheme = "http"

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.daemon.http_port}"

    @property
    def config(self) -> Path:
        return self.daemon.config

    async def healthy(self) -> None:
        """Wait until it is as before a fault, unless that was its end."""
        if self.daemon.poll() is not None:
            return
        await self.daemon.ready()
        before = self.daemon.metric("foretick_answers_total")
        await until_slowly(lambda: self.daemon.metric("foretick_answers_total") > before, 180, "answers")
        await asyncio.sleep(SETTLE_S)
