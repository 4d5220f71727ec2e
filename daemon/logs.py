"""Log lines on standard error: one line an event, as text with keys or as a JSON object.

What belongs to a request or an answer has its `trace_id`. Where standard error is systemd's journal, each
line begins with its priority, which the journal takes away (sd-daemon(3)).
"""

import json
import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

from pythonjsonlogger.core import RESERVED_ATTRS, LogData
from pythonjsonlogger.json import JsonFormatter

from daemon.config.schema import LogConfig
from daemon.traces.trace_context import current

log = logging.getLogger(__name__)

_OURS = frozenset((*RESERVED_ATTRS, "message", "asctime"))
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}


class JsonLines(JsonFormatter):
    """One object: time, level, process, logger, message, further keys, and the traceback if there is one."""

    def __init__(self, process: str) -> None:
        names = {"levelname": "level", "name": "logger", "exc_info": "traceback", "stack_info": "stack"}
        fields = ["levelname", "name", "message"]
        super().__init__(fields, rename_fields=names, static_fields={"process": process}, timestamp="time")

    def process_log_record(self, log_data: LogData) -> LogData:
        """Write the level in lower case."""
        return super().process_log_record(log_data | {"level": log_data["level"].lower()})


class KeyValueLines(logging.Formatter):
    """Time, level and event, then ``key=value``: what has blanks is quoted, as JSON quotes it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, also of an event with a traceback."""
        seconds, rest = divmod(record.created, 1)
        at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(rest * 1000):03}Z"
        keys = {"process": self._process, "logger": record.name}
        keys |= {key: value for key, value in vars(record).items() if key not in _OURS}
        if record.exc_info:
            keys["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            keys["stack"] = record.stack_info
        told = " ".join(f"{key}={_quoted(str(value))}" for key, value in keys.items())
        return f"{at} {record.levelname} {_on_one_line(record.getMessage())} {told}"


class Priorities(logging.Formatter):
    """The lines of ``of``, each with its priority before it."""

    def __init__(self, of: logging.Formatter) -> None:
        super().__init__()
        self._of = of

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        return f"<{_PRIORITIES.get(record.levelno, 5)}>{self._of.format(record)}"


def set_up_logging(settings: LogConfig, process: str) -> None:
    """Configure the root logger of this process; uncaught errors and warnings become lines, too."""
    handler = logging.StreamHandler(sys.stderr)
    lines = JsonLines(process) if settings.json else KeyValueLines(process)
    handler.setFormatter(Priorities(lines) if is_journal(sys.stderr) else lines)
    handler.addFilter(add_trace)
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    for noisy in ("numba", "asyncio", "transformers"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # it repeats itself at every attempt; `feeds.kafka_client.ConnectionLog` logs changes
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    for talkative in ("uvicorn", "httpx2"):  # each WebSocket, and each request with its URL, at INFO
        logging.getLogger(talkative).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_thread


def add_trace(record: logging.LogRecord) -> bool:
    """Name the trace of the request that is being answered, unless the record names one."""
    context = current.get()
    if context is not None and not hasattr(record, "trace_id"):
        record.trace_id = context.trace_id
    return True


def is_journal(stream: TextIO) -> bool:
    """Whether lines go to systemd's journal (JOURNAL_STREAM in systemd.exec(5))."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # of tests, which have no file
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        log.critical("an error ended the process", exc_info=(kind, error, traceback))


def _log_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None:
        name = "a thread" if ended.thread is None else ended.thread.name
        log.error("%s ended by an error", name, exc_info=ended.exc_value)


def _quoted(value: str) -> str:
    is_plain = bool(value) and value.isprintable() and not any(each in value for each in ' "=\\')
    return value if is_plain else _on_one_line(json.dumps(value, ensure_ascii=False))


def _on_one_line(text: str) -> str:
    """With escapes for what would break the line, or a terminal would obey."""
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)
