"""What tests share. The names here need neither PyTorch nor a broker; the modules hold the rest."""

from tests.kit.config import inproc_config, log_source, sessions
from tests.kit.fakes import MemorySink, QueueSource
from tests.kit.records import SECOND, START, TOPIC, incoming, trade
from tests.kit.waiting import until, until_slowly

__all__ = [
    "SECOND",
    "START",
    "TOPIC",
    "MemorySink",
    "QueueSource",
    "incoming",
    "inproc_config",
    "log_source",
    "sessions",
    "trade",
    "until",
    "until_slowly",
]
