"""Rules that find faults in the records of a symbol, compiled; `metrics.feed_faults` names the kinds.

They run where bars are made, and their state is the symbol's in its session: so a snapshot has it, and a
record that is read again after a restart, or to reproduce an answer, is judged as it was the first time. The
rules know no clock but the times in records.

**Bad ticks.** A symbol's typical move is the mean of its price moves, each cut at four times the mean, over
about the last 64. A price further from the one before than ``band`` typical moves, and than `LEAST_MOVE` of
the price, is suspect. If the next record comes back, the suspect was a bad tick. If not, its level is the new
one.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ingest.identity import content_of
from ingest.record import BAR as READY_BAR
from ingest.record import FLAG_GAP, FLAG_SKEWED, QUOTE
from metrics.feed_faults import ACTIONS, RULED, Action
from support.numba_kernel import kernel

FIRST_BIT = 12
"""Of the flags of bars: those below are of `ingest.bar_kernel`."""
BITS: dict[str, int] = {kind.name: 1 << (FIRST_BIT + n) for n, kind in enumerate(RULED)}
REORDERED, CROSSED, LOCKED, ONE_SIDED, ZERO_SIZE = (BITS[each.name] for each in RULED[:5])
OVERLAPPING, CLOSE_STAMPED = BITS["overlapping"], BITS["close_stamped"]
SKEWED_CLOCK, DUPLICATE = BITS["skewed_clock"], BITS["duplicate"]
BAD_TICK, SPLIT_LIKE, SPLIT = BITS["bad_tick"], BITS["split_like"], BITS["split"]
VENUE_BEHIND = BITS["venue_behind"]
SUSPECT = 1 << 31
"""The record may be a bad tick: the next one says."""
KINDS = len(RULED)
COUNT, FLAG, HOLD, DROP, DEAD_LETTER = range(len(ACTIONS))
"""Codes of actions, the strictest one last."""

RECENT = 64
"""Records before a gap that are compared with those behind it, and how many of those."""
SPLITS = 4
"""Announced splits of a symbol that are known."""
LEAST_MOVE = 0.002
"""Part of a price: a smaller move is never suspect."""
_WARM = 64
"""Moves before prices are judged."""
ROLLS = 64
"""Rolls of a symbol that are known."""
_CUT, _RATE = 4.0, 1 / 64
_NEAR = 0.03
"""How near a ratio of prices is to that of a split."""
_NEAR_ANNOUNCED = 0.2
"""The same of one that was announced: the market moves as well."""
_MOST_FOR_ONE = 20
"""The largest split that is guessed; larger ratios are near a whole number anyway."""

QUALITY = np.dtype(
    [
        ("newest", "i8"),  # event time of its newest record; of ready-made bars, their opening
        ("bar_end", "i8"),  # of the newest ready-made bar
        # prices
        ("price", "i8"),  # the newest one that is not suspect; `moves` 0: none
        ("price_event", "i8"),
        ("move", "f8"),  # the typical one
        ("moves", "i8"),  # seen, and the first price
        ("suspect", "i8"),
        ("suspect_event", "i8"),
        ("suspects", "i8"),  # the newest record may be a bad tick
        # of its newest records without a number or an id: content, as a hash
        ("recent", "u8", (RECENT,)),
        ("recent_at", "i8"),  # how many there were
        ("gap_at", "i8"),  # and before the newest gap
        ("after_gap", "i8"),  # records behind it that are still compared
        # announced splits: when, and how many new units are one old unit; 0: none
        ("split_at", "i8", (SPLITS,)),
        ("split_factor", "f8", (SPLITS,)),
        # the split that the newest prices are behind, while the bar of the first of them is open: the time of
        # that one, ns, and the factor; 0: none
        ("behind_at", "i8"),
        ("behind_factor", "f8"),
        ("rolls", "i8"),
        ("roll_at", "i8", (ROLLS,)),  # when another contract follows, `rolls` of them
        # the same of the newest one that a record announced
        ("told_at", "i8"),
        ("told_factor", "f8"),
    ]
)
"""State of a symbol in a session."""


def actions_code(actions: Mapping[str, Action]) -> int:
    """One number that has the action of each kind of `RULED`; kinds that are not named have the default."""
    found = (actions.get(kind.name, kind.actions[0] if kind.actions else "count") for kind in RULED)
    return sum(ACTIONS.index(action) << (3 * n) for n, action in enumerate(found))


@kernel
def action_of(actions: Any, faults: Any) -> int:
    """The strictest action of these faults."""
    strictest = COUNT
    for kind in range(KINDS):
        if faults >> (FIRST_BIT + kind) & 1:
            strictest = max(strictest, actions >> (3 * kind) & 7)
    return strictest


@kernel
def flags_of(actions: Any, faults: Any) -> int:
    """The faults among these that flag the bar of a record that is kept."""
    flags = 0
    for kind in range(KINDS):
        bit = 1 << (FIRST_BIT + kind)
        if faults & bit and actions >> (3 * kind) & 7 == FLAG and bit != SKEWED_CLOCK:
            flags |= bit
    return flags


@kernel
def rolls_between(state: Any, one: int, other: int) -> bool:
    """Whether two moments are of two contracts."""
    first, last, found = min(one, other), max(one, other), False
    for n in range(state["rolls"]):
        found |= first < state["roll_at"][n] <= last
    return found


@kernel
def repeats(state: Any, record: Any) -> bool:
    """Whether a record without a number or an id is one from before a gap, sent again. Call it in order."""
    if record["flags"] & FLAG_GAP:
        state["gap_at"] = state["recent_at"]
        state["after_gap"] = RECENT
    content, recent = content_of(record), state["recent"]
    if state["after_gap"] > 0:
        gap_at, at = state["gap_at"], state["recent_at"]
        for back in range(1, min(gap_at, RECENT - (at - gap_at)) + 1):
            if recent[(gap_at - back) % RECENT] == content:
                return True
        state["after_gap"] -= 1
    recent[state["recent_at"] % RECENT] = content
    state["recent_at"] += 1
    return False


@kernel
def judge(state: Any, record: Any, price: int, actions: int, band: float) -> int:
    """The faults of a record of a symbol, as bits, but for repeats and late ones. Call it in order.

    ``price``: a trade's, a quote's mid or a bar's close. `BAD_TICK` is of the record before it. A record that
    is not kept changes nothing of the state.
    """
    event: Any = np.int64(record["ts_event"])
    is_bar = record["kind"] == READY_BAR
    faults = SKEWED_CLOCK if record["flags"] & FLAG_SKEWED else 0
    if is_bar:
        faults |= _judge_bar(state, record)
    elif record["kind"] == QUOTE:
        faults |= _judge_quote(record)
    elif record["b"] == 0:
        faults |= ZERO_SIZE
    if event < state["newest"]:
        return faults | REORDERED
    if action_of(actions, faults) >= DROP:
        return faults
    state["newest"] = event
    if is_bar:
        state["bar_end"] = event + record["x"]
    return faults if faults & CROSSED else faults | _judge_price(state, price, event, band)


@kernel
def _judge_bar(state: Any, record: Any) -> int:
    event: Any = np.int64(record["ts_event"])
    received: Any = np.int64(record["ts_recv"]) - event
    faults = CLOSE_STAMPED if 0 < received < record["x"] // 2 else 0
    if state["newest"] < event < state["bar_end"]:
        faults |= OVERLAPPING
    return faults


@kernel
def _judge_quote(record: Any) -> int:
    faults = 0
    if record["a"] > record["b"]:
        faults |= CROSSED
    elif record["a"] == record["b"]:
        faults |= LOCKED
    if (record["c"] == 0) != (record["d"] == 0):
        faults |= ONE_SIDED
    return faults


@kernel
def _judge_price(state: Any, price: int, event: int, band: float) -> int:
    if state["moves"] == 0:
        return _settle(state, price, event, 0.0)
    before, faults = state["price"], 0
    if rolls_between(state, state["price_event"], event):
        state["suspects"] = 0
        return _settle(state, price, event, 0.0)
    if _is_announced(state, price, event):
        state["suspects"] = 0
        return SPLIT | _settle(state, price, event, 0.0)
    limit = max(band * state["move"], LEAST_MOVE * abs(float(before)))
    move = abs(float(price) - float(before))
    if state["suspects"]:
        state["suspects"] = 0
        if move <= limit:
            return BAD_TICK | _settle(state, price, event, move)
        suspect = state["suspect"]
        move = abs(float(price) - float(suspect))
        if before != 0:  # moves are larger at a higher level
            scale = abs(float(suspect) / float(before))
            limit *= scale
            state["move"] *= scale
        if move <= limit and _is_split(before, suspect):
            faults = SPLIT_LIKE
        state["price"] = suspect
    if state["moves"] < _WARM or move <= limit:
        return faults | _settle(state, price, event, move)
    state["suspect"] = price
    state["suspect_event"] = event
    state["suspects"] = 1
    return faults | SUSPECT


@kernel
def _settle(state: Any, price: int, event: int, move: float) -> int:
    """Take a price that is not suspect; no fault."""
    cut = _CUT * state["move"] + 1.0
    state["move"] += (min(move, cut) - state["move"]) * max(_RATE, 1.0 / (state["moves"] + 1))
    state["price"] = price
    state["price_event"] = event
    state["moves"] += 1
    return 0


@kernel
def _is_split(before: int, after: int) -> bool:
    """Whether the ratio of two prices is near that of a usual split, in either direction."""
    if before <= 0 or after <= 0:
        return False
    ratio = max(before, after) / min(before, after)
    if ratio > _MOST_FOR_ONE * (1 + _NEAR):
        return False
    if abs(ratio - 1.5) < _NEAR * 1.5:
        return True
    whole = min(round(ratio), _MOST_FOR_ONE)
    return bool(whole >= 2 and abs(ratio - whole) < _NEAR * whole)


@kernel
def _is_announced(state: Any, price: int, event: int) -> bool:
    """Whether this is the first price behind an announced split, and fits it."""
    factor = _announced_between(state, event)
    if price <= 0 or factor <= 0 or abs(state["price"] / price / factor - 1.0) >= _NEAR_ANNOUNCED:
        return False
    state["behind_at"] = event
    state["behind_factor"] = factor
    return True


@kernel
def _announced_between(state: Any, event: int) -> float:
    """The factor of a split behind the newest price and not behind this one's time; 0: there is none."""
    for n in range(SPLITS):
        factor: float = state["split_factor"][n]
        if factor > 0 and state["price_event"] < state["split_at"][n] <= event:
            return factor
    told: float = state["told_factor"]
    if told > 0 and state["price_event"] < state["told_at"] <= event:
        return told
    return 0.0


@kernel
def announce_split(state: Any, at: int, factor: int) -> None:
    """From the time ``at`` on, ns, prices are divided by a factor, in 1e-9."""
    state["told_at"] = at
    state["told_factor"] = factor / 1e9
