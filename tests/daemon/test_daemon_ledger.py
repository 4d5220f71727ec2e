"""The ledger adds up, and names whose records are nowhere."""

from daemon.ledger import ledger
from metrics.store import MetricStore


def store() -> MetricStore:
    made = MetricStore.local({"session": ["a", "b"], "source": ["x", "y"], "sink": []})
    made.inc("foretick_records_total", 10, source="x")
    made.inc("foretick_records_total", 8, source="y")
    made.inc("foretick_records_passed_over_total", 3, source="y")
    made.inc("foretick_records_passed_total", 9, source="x")
    made.inc("foretick_records_malformed_total", 2, reason="price")
    made.inc("foretick_records_unknown_symbol_total", 1)
    made.inc("foretick_records_repeated_total", 1, source="y")
    made.inc("foretick_heartbeats_total", 1, source="y")
    made.inc("foretick_messages_empty_total", 1, source="y", kind="tombstone")
    made.inc("foretick_session_records_total", 9, session="a")
    for name, n in (("in_bars", 3), ("late", 2), ("amended", 1), ("duplicate", 1), ("ignored", 1)):
        made.inc(f"foretick_records_{name}_total", n, session="a")
    made.inc("foretick_records_refused_total", 1, session="a", reason="late")
    made.inc("foretick_records_refused_total", 2, session="a", reason="price_jump")
    return made


def test_every_reason_counts_once() -> None:
    found = ledger(store())
    assert found.unaccounted == {}
    assert found.read.malformed == {"price": 2}
    a, b = found.sessions
    assert (a.session, a.records, a.refused, b.records) == ("a", 9, {"price_jump": 2}, 0)
    assert (a.late_share, b.late_share) == (1 / 9, 0.0)


def test_records_that_are_nowhere_are_named() -> None:
    made = store()
    made.inc("foretick_session_records_total", 4, session="b")
    made.inc("foretick_records_total", 3, source="x")
    assert ledger(made).unaccounted == {"": 3, "b": 4}
