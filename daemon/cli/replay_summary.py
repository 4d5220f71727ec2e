"""What became of a replayed file's records, for people: a line on reading it, and a line for each session."""

from collections.abc import Mapping

from daemon.cli.options import aligned
from daemon.ledger import Kept, Ledger, RecordsRead
from metrics.catalogue import BY_NAME
from metrics.store import MetricStore

_COLUMNS = ("session", "records", "in bars", "late", "repeated", "dropped", "refused", "other kinds")


def summary_lines(found: Ledger) -> list[str]:
    """The ledger as text."""
    lines = [_read(found.read), *aligned([_COLUMNS, *map(_row, found.sessions)])]
    refusing = [each for each in found.sessions if each.refused]
    lines += [f"refused by {each.session}: {_reasons(each.refused)}" for each in refusing]
    lost = found.lost + sum(found.unaccounted.values())
    return [*lines, f"{lost} records did not reach a session's bars"] if lost else lines


def answered_line(store: MetricStore, kept: Ledger) -> str:
    """How many bars were read, and have answers of their own or not, and how many records were late."""

    def total(name: str) -> int:
        full = f"foretick_{name}_total"
        return sum(int(store.value(full, **labels)) for labels in store.series(BY_NAME[full]))

    bars, joined, skipped = total("bars"), total("flash_coalesced"), total("bars_skipped")
    late = sum(each.late - each.amended for each in kept.sessions)
    passed = joined + skipped
    found = f"{bars} bars read: {bars - passed} answered, {passed} passed by, {late} records late"
    if not passed:
        return found
    return f"{found}; a bar that is passed by is answered only with a later one: --every-bar answers each"


def too_late(found: Ledger, max_percent: float, late: Mapping[str, str]) -> list[str]:
    """A line for each session that lacks a larger share of its records than allowed, because they were late.

    ``late``: what each session does with late records.
    """
    return [
        f"{each.session}: {each.late - each.amended} of {each.records} records "
        f"({each.late_share:.1%}) came after their bar had closed and are missing from it "
        f"(bars.late = {late[each.session]}): is the file in order of time, and bars.lateness long enough? "
        f"--max-late allows {max_percent:g} %"
        for each in found.sessions
        if each.late_share * 100 > max_percent
    ]


def _read(read: RecordsRead) -> str:
    parts = [
        (read.unknown_symbol, "of other symbols"),
        (sum(read.malformed.values()), f"malformed ({_reasons(read.malformed)})"),
        (sum(read.unopened.values()), f"of symbols without a session ({_reasons(read.unopened)})"),
        (read.heartbeats, "heartbeats"),
        (sum(read.empty.values()), "empty"),
        (read.repeated, "read before"),
    ]
    others = "".join(f", {count} {what}" for count, what in parts if count)
    return f"{read.received} records read: {read.passed} for sessions{others}"


def _row(each: Kept) -> tuple[str, ...]:
    refused = sum(each.refused.values())
    counts = (each.records, each.in_bars, each.late, each.repeated, each.dropped, refused, each.ignored)
    late = f"{each.late} ({each.amended} amended)" if each.amended else f"{each.late}"
    return (each.session, *map(str, counts[:2]), late, *map(str, counts[3:]))


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items())
