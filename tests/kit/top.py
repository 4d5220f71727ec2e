"""Sessions and answers as a daemon lists them."""

from typing import Any

from daemon.api.messages import SessionInfo
from feeds.market_data import Answer, Latency


def session_info(name: str, **members: Any) -> SessionInfo:
    """A session with data that is well."""
    known = {"symbol": f"V:{name.upper()}", "data_version": 7, "live_tokens": 100, "live_records": 5}
    known |= {"as_of": 1, "staleness_ns": 2_000_000, "questions": ("up",)}
    return SessionInfo(name, **(known | members))


def listed_answer(question: str, **members: Any) -> Answer:
    """An answer that took 8 ms, 2 of which in no stage."""
    latency = Latency(ring_wait_ns=1_000_000, queue_ns=2_000_000, forward_ns=3_000_000, total_ns=8_000_000)
    known: dict[str, Any] = {"session": "aaa", "data_version": 7, "as_of": 1, "symbol": "V:AAA"}
    known |= {"question_hash": "", "text": " UP", "model": "m", "model_revision": "r", "latency": latency}
    return Answer(question=question, reused_tokens=0, computed_tokens=1, **(known | members))
