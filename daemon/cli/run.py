"""`foretick run`: a daemon in this process, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import uvloop

from daemon.cli.options import (
    EXIT_CONFIG,
    EXIT_FAILED,
    calling_on_hangup,
    config_option,
    overrides_of,
    read_config,
    reason_of,
    set_option,
    stopping_on_signals,
)
from daemon.collector import freeze_startup
from daemon.config.checks import exposure_warnings
from daemon.config.load import load_config
from daemon.config.schema import Config
from daemon.cores import cores_of, usable
from daemon.gateway.engine_processes import EngineProcesses
from daemon.logs import set_up_logging
from feeds.backoff import until
from feeds.connector import SettingError
from support import numba_kernel

if TYPE_CHECKING:
    from daemon.gateway.gateway import Gateway

log = logging.getLogger(__name__)


@click.command("run")
@config_option
@set_option
def command(config_path: Path, settings: tuple[str, ...]) -> None:
    """Run the daemon until SIGTERM."""
    config = read_config(config_path, settings)
    sys.exit(serve(config, partial(load_config, config_path, None, overrides_of(settings))))


def serve(config: Config, read_again: Callable[[], Config]) -> int:
    """Run until SIGTERM or SIGINT, drain, and return the exit status (0: nothing was left behind).

    At SIGHUP the sessions and standing questions of ``read_again()`` are taken over.
    """
    set_up_logging(config.log, "gateway")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each session has two files for its metrics
    if not numba_kernel.compiled_before():
        log.info("compiling, once for this version and place: this takes a minute or more")
    for warning in exposure_warnings(config):
        log.warning("%s", warning)
    try:
        return uvloop.run(_serve(config, read_again))
    except SettingError as error:  # the signal came before start-up
        log.error("%s", error)
        return EXIT_CONFIG


async def _serve(config: Config, read_again: Callable[[], Config]) -> int:
    stop, reading = asyncio.Event(), asyncio.Lock()

    async def reload() -> None:
        async with reading:
            await gateway.reload(read_again)

    with stopping_on_signals(stop), calling_on_hangup(reload):
        gateway = await _made(config)
        status = 0
        try:
            # a signal during start-up cancels it
            if await until(stop, gateway.start()):
                freeze_startup()
                await gateway.run(stop)
        except SettingError as error:
            log.error("%s", error)
            status = EXIT_CONFIG
        except Exception as error:
            log.error("%s", reason_of(error))
            status = EXIT_FAILED
        clean = await gateway.stop()
        return status or (0 if clean else EXIT_FAILED)


async def _made(config: Config) -> Gateway:
    """The gateway; meanwhile an engine in a process of its own loads. Raises SettingError."""
    processes = EngineProcesses(config, cores_of(config, usable()))
    if config.process.mode == "two":
        await processes.load()
    try:
        # imported here: an engine begins to load before, which takes longest
        from daemon.gateway.wiring import make_gateway

        return make_gateway(config, processes=processes)
    except BaseException:
        processes.abandon()
        raise
