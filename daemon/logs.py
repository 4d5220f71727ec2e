"""Log lines on standard error: text, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from daemon.config.schema import LogConfig
from feeds.kafka_client import quiet_client_log


class JsonFormatter(logging.Formatter):
    """One object: time, level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(settings: LogConfig, process: str) -> None:
    """Configure the root logger of this process."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.json:
        handler.setFormatter(JsonFormatter())
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
