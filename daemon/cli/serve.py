"""Running a daemon in this process: the loop, the signals, the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator

import uvloop

from daemon.config.load import exposure_warnings
from daemon.config.schema import Config
from daemon.engine.spec import SettingError
from daemon.front.wiring import make_front
from daemon.logs import set_up_logging

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_FORCED = 130


def serve(config: Config) -> int:
    """Run until SIGTERM or SIGINT, drain, and return the exit status (0: nothing was left behind)."""
    set_up_logging(config.log, "front")
    for warning in exposure_warnings(config):
        log.warning(warning)
    try:
        return uvloop.run(_serve(config))
    except SettingError as error:  # before there was anything to stop
        log.error("%s", error)
        return EXIT_CONFIG


async def _serve(config: Config) -> int:
    stop = asyncio.Event()
    with stopping_on_signals(stop):
        front = make_front(config)
        status = 0
        starting = asyncio.ensure_future(front.start())
        stopped = asyncio.ensure_future(stop.wait())
        try:
            # a signal during start-up ends it, whatever it waits for
            await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await front.run(stop)
        except SettingError as error:
            log.error("%s", error)
            status = EXIT_CONFIG
        except Exception as error:
            log.error("%s: %s", type(error).__name__, error)
            status = EXIT_FAILED
        finally:
            starting.cancel()
            stopped.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)
        clean = await front.stop()
        return status or (0 if clean else EXIT_FAILED)


@contextlib.contextmanager
def stopping_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C set ``stop``; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(EXIT_FORCED)
        stop.set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
