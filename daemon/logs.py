"""Log lines on standard error: text, or one JSON object per line."""

import logging
import sys

from pythonjsonlogger.core import LogData
from pythonjsonlogger.json import JsonFormatter

from daemon.config.schema import LogConfig
from feeds.kafka_client import quiet_client_log


class JsonLines(JsonFormatter):
    """One object: time, level, logger, message, and the traceback if there is one."""

    def __init__(self) -> None:
        names = {"levelname": "level", "name": "logger", "exc_info": "traceback"}
        super().__init__(["levelname", "name", "message"], rename_fields=names, timestamp="time")

    def process_log_record(self, log_data: LogData) -> LogData:
        """Write the level in lower case."""
        return super().process_log_record(log_data | {"level": log_data["level"].lower()})


def set_up_logging(settings: LogConfig, process: str) -> None:
    """Configure the root logger of this process."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.json:
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s {process} %(levelname)-7s %(name)s: %(message)s")
        )
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    quiet_client_log()
    for noisy in ("numba", "asyncio", "transformers"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # it says at INFO that each WebSocket was accepted
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
