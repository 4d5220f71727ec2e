"""The kinds of faults of a feed: their names, what may be done about each, and where each is counted.

This table is the one place that names a kind. Configuration, metrics, flags of answers, dead-letter records
and `docs/quality.md` follow from it. `ingest.feed_rules` finds the kinds of `RULED` in records, and
`feeds.quality.silence` finds silence; of the others the table says who does.
"""

from dataclasses import dataclass
from typing import Literal

Action = Literal["count", "flag", "hold", "drop", "dead_letter"]
ACTIONS: tuple[Action, ...] = ("count", "flag", "hold", "drop", "dead_letter")
"""From the mildest to the strictest: of a record with several faults the strictest counts."""
COMMON = "foretick_feed_faults_total{source,kind}"
_KEPT: tuple[Action, ...] = ("flag", "count")
_ANY: tuple[Action, ...] = (*_KEPT, "drop", "dead_letter")


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault.

    ``actions``: what may be configured, the default first; empty: there is no choice, and ``outcome`` says
    what happens. ``flag``: of answers. ``metric``: what counts it.
    """

    name: str
    rule: str
    actions: tuple[Action, ...] = ()
    outcome: str = ""
    flag: str = ""
    metric: str = COMMON


RULED: tuple[FaultKind, ...] = (
    FaultKind(
        "reordered",
        "its event time is before that of an earlier record of its symbol",
        ("flag", "count", "hold", "drop", "dead_letter"),
        flag="reordered",
    ),
    FaultKind("crossed", "the bid of a quote is above its ask", _ANY, flag="crossed"),
    FaultKind("locked", "the bid of a quote is its ask", _ANY, flag="locked"),
    FaultKind(
        "one_sided", "one side of a quote has a size and the other one has none", _ANY, flag="one_sided"
    ),
    FaultKind("zero_size", "a trade of size 0", _ANY, flag="zero_size"),
    FaultKind(
        "overlapping", "a ready-made bar opens before the one before it ends", _ANY, flag="overlapping"
    ),
    FaultKind(
        "close_stamped",
        "a ready-made bar came in the first half of the time that it covers: it is stamped at its close",
        _ANY,
        flag="close_stamped",
    ),
    FaultKind(
        "skewed_clock",
        "it was received before its event time",
        ("flag", "drop", "dead_letter"),
        flag="skewed_clock",
    ),
    FaultKind(
        "duplicate",
        "it came before: the same number or id and content; without either, the same content again after a "
        "reconnect",
        ("drop", "flag", "count"),
        flag="duplicate",
    ),
    FaultKind(
        "bad_tick",
        "a price beyond the band of its symbol, from which the next record comes back",
        ("flag", "count", "hold"),
        flag="bad_tick",
    ),
    FaultKind(
        "split_like",
        "two records in a row at a price that is a small whole multiple, or part, of the one before, without "
        "an entry in `[[quality.splits]]` or a record of kind `action`",
        _KEPT,
        flag="split_like",
    ),
    FaultKind("split", "the same with such an entry or record", _KEPT, flag="split"),
    FaultKind(
        "venue_behind",
        "it is late only because another venue of its session is ahead by more than `bars.venue_lag`",
        outcome="as `bars.late` says",
        flag="late",
    ),
)
"""In the order of their bits."""
SILENT = FaultKind(
    "silent",
    "nothing, not even a heartbeat, for `silence_factor` times the P99 of the gaps between the symbol's "
    "records at that time of day, while its venue is open",
    _KEPT,
    flag="silent",
)
ELSEWHERE: tuple[FaultKind, ...] = (
    FaultKind(
        "gap",
        "a number is missing from the venue's, offsets were skipped or deleted unread, or a connection broke",
        outcome="flag",
        flag="gap",
        metric="foretick_records_lost_upstream_total{source}",
    ),
    FaultKind(
        "price_jump",
        "a price more than `bars.price_jump` times the one before it, or less than that part of it",
        outcome="as `bars.on_price_jump` says",
        flag="price_jump",
        metric="foretick_price_jumps_total{session}",
    ),
    FaultKind(
        "negative_size",
        "a size or volume below 0",
        outcome="dead_letter",
        flag="incomplete",
        metric='foretick_records_malformed_total{reason="size"}',
    ),
    FaultKind(
        "unit_change",
        "its time is in another unit, such as ms instead of ns",
        outcome="dead_letter",
        flag="incomplete",
        metric='foretick_records_malformed_total{reason="timestamp_unit"}',
    ),
    FaultKind(
        "inconsistent_bar",
        "the open or close of a ready-made bar lies outside low and high, or high is below low",
        outcome="dead_letter",
        flag="incomplete",
        metric='foretick_records_malformed_total{reason="bar_ohlc"}',
    ),
)
CONFIGURED: tuple[FaultKind, ...] = tuple(kind for kind in (*RULED, SILENT) if kind.actions)
"""The kinds with a key of `[quality]`."""
ALL_KINDS: tuple[FaultKind, ...] = (*RULED, SILENT, *ELSEWHERE)
FAULT_NAMES: tuple[str, ...] = tuple(kind.name for kind in (*RULED, SILENT))
"""Values of the label `kind`."""
