"""A session's bars, made again from its records: as far back as Kafka keeps them, or of a recorded file."""

from collections.abc import Callable

import msgspec

from daemon.audit.recorded_history import is_file, of_config
from daemon.audit.session_replay import alone
from daemon.audit.stepped_engine import SteppedEngine
from daemon.config.schema import UNTRAINED, Config, ModelConfig
from daemon.engine.build import build
from ingest.bar_kernel import Bars
from ingest.plane import BarConsumer, Made


class _Seen(BarConsumer):
    def __init__(self, write: Callable[[Bars], None]) -> None:
        self._write = write

    def submit(self, made: Made) -> None:
        """Their lines are for a model."""

    def watch(self, session: str, bars: Bars) -> None:
        """See `BarConsumer`."""
        self._write(bars)


async def make_again(config: Config, name: str, write: Callable[[Bars], None]) -> None:
    """Write the closed bars of a session, and corrections of earlier ones, BAR [n], in order.

    A topic's last bar is open until the next record closes it. Raises as `of_config`, and SettingError.
    """
    unasked = {"model": ModelConfig(path=UNTRAINED, threads=1), "standing": "none", "questions": ()}
    lone = msgspec.structs.replace(alone(config, name), **unasked)
    engine = SteppedEngine(lone, build(lone, {}, opens_all=True), lambda event: None)
    with engine:
        plane = engine.bars_only(name, _Seen(write))
        async for _ in engine.read(of_config(lone, 0), lambda: not plane.step()):
            pass
        if is_file(lone):
            plane.flush()
