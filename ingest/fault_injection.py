"""Seeded faults for tapes of records, and which of them the rules find: `foretick feed test`.

A tape is RECORD [n] of one kind in order of arrival; its symbols are numbered from 0. Each kind of fault is
injected into a copy of its own, and the records where it has to be found are known.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ingest.bar_kernel import JUMP
from ingest.bars import BarBuilder, BarPolicy, Feeds
from ingest.feed_rules import BITS, SPLITS, actions_code
from ingest.record import BAR, FLAG_GAP, FLAG_SKEWED, QUOTE, TRADE, Records
from metrics.feed_faults import RULED

FAULTS = 40
"""Of each kind."""
_APART = 100
"""Records of a symbol between two faults, and before the first one."""
_SECOND = 10**9
_FACTORS = np.array([2, 3, 4, 5, 10, 20])

Integers = npt.NDArray[np.int64]
Splits = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Injected:
    """A tape with faults of one kind: ``expected``, the records in which they are found.

    ``splits``: those that are announced, of symbol 0.
    """

    tape: Records
    expected: Integers
    splits: Splits = ()


@dataclass(frozen=True)
class Score:
    """Of one kind: faults that were injected and found, and what was found besides.

    ``before``: found in the tape as it was. ``false_alarms``: found in the other one, and neither injected
    nor there before.
    """

    kind: str
    injected: int
    found: int
    false_alarms: int
    before: int

    @property
    def recall(self) -> float:
        """The part of the injected faults that was found."""
        return self.found / self.injected


def find(tape: Records, kind: str, splits: Splits = ()) -> Integers:
    """The numbers of the records in which bars find faults of a kind."""
    bit = JUMP if kind == "price_jump" else BITS[kind]
    return np.flatnonzero(faults_of(tape, splits) & np.uint32(bit))


def faults_of(tape: Records, splits: Splits = ()) -> npt.NDArray[np.uint32]:
    """The faults that bars find in each record: `BITS`, and `JUMP` for a price jump."""
    symbols = int(tape["symbol"].max()) + 1
    actions = actions_code({each.name: "flag" for each in RULED})
    policy = BarPolicy(_SECOND, price_jump=10.0, ready="any", actions=actions)
    finer = int(tape["price_finer"][0])
    sessions = [Feeds((n,), policy, price_scale=9 + finer, splits=(splits,)) for n in range(symbols)]
    builder, found = BarBuilder(sessions), []
    for start in range(0, len(tape), 1 << 16):
        builder.update(tape[start : start + (1 << 16)], 0)
        found.append(builder.newest_faults)
    return np.concatenate(found)


def scores(tape: Records, seed: int, faults: int = FAULTS) -> Iterator[Score]:
    """The scores of all kinds that there can be in a tape of these records."""
    rng = np.random.default_rng(seed)
    for kind, (record_kinds, inject) in _INJECTORS.items():
        if int(tape["kind"][0]) not in record_kinds:
            continue
        plain = _without_tokens(tape) if kind == "duplicate_content" else tape
        name = kind.removesuffix("_content")
        before = find(plain, name)
        injected = found = alarms = 0
        per_pass = SPLITS if kind == "split" else faults
        while injected < faults:
            places = _places(plain, rng, min(per_pass, faults - injected))
            if not len(places):
                break  # the tape is too short
            made = inject(plain, places, rng)
            seen = find(made.tape, name, made.splits)
            hits = int(np.isin(made.expected, seen).sum())
            injected, found = injected + len(made.expected), found + hits
            alarms += max(0, len(seen) - hits - len(before))
        if injected:
            yield Score(kind, injected, found, alarms, len(before))


def _places(tape: Records, rng: np.random.Generator, count: int) -> Integers:
    """Records of symbol 0 at which faults are to be, apart from each other.

    Each is newer than the one before: nothing tells records of one moment apart.
    """
    own = np.flatnonzero(tape["symbol"] == 0)
    newer = own[1:][np.diff(tape["ts_event"][own].astype(np.int64)) > 0]
    blocks = np.arange(_APART, len(own) - _APART, _APART)
    starts = own[np.sort(rng.choice(blocks, min(count, len(blocks)), replace=False))]
    within = own[np.searchsorted(own, starts) + rng.integers(0, _APART // 2, len(starts))]
    return np.unique(newer[np.minimum(np.searchsorted(newer, within), len(newer) - 1)])


def _next(tape: Records, places: Integers) -> Integers:
    """The next record of the same symbol after each of these."""
    own = np.flatnonzero(tape["symbol"] == 0)
    found: Integers = own[np.searchsorted(own, places) + 1]
    return found


def _without_tokens(tape: Records) -> Records:
    plain = tape.copy()
    plain["token"] = 0
    return plain


def _edit(change: Callable[[Any, Integers, np.random.Generator], None]) -> "_Inject":
    """An injector that changes the records at the places, which are found there."""

    def inject(tape: Records, places: Integers, rng: np.random.Generator) -> Injected:
        made = tape.copy()
        change(made, places, rng)
        return Injected(made, places)

    return inject


def _reorder(made: Records, at: Integers, rng: np.random.Generator) -> None:
    own = np.flatnonzero(made["symbol"] == 0)
    before = own[np.searchsorted(own, at) - 1]
    made["ts_event"][at] = made["ts_event"][before] - rng.integers(1, 5 * _SECOND, len(at)).astype(np.uint64)


def _cross(made: Records, at: Integers, rng: np.random.Generator) -> None:
    made["a"][at] = made["b"][at] + np.maximum(1, made["b"][at] // rng.integers(10_000, 100_000, len(at)))


def _lock(made: Records, at: Integers, rng: np.random.Generator) -> None:
    made["a"][at] = made["b"][at]


def _empty_a_side(made: Records, at: Integers, rng: np.random.Generator) -> None:
    made["c"][at], made["d"][at] = 0, rng.integers(1, 100, len(at)) * _SECOND


def _empty(made: Records, at: Integers, rng: np.random.Generator) -> None:
    made["b"][at] = 0


def _skew(made: Records, at: Integers, rng: np.random.Generator) -> None:
    made["ts_recv"][at] = made["ts_event"][at] - rng.integers(1, 10 * _SECOND, len(at)).astype(np.uint64)
    made["flags"][at] |= FLAG_SKEWED


def _stamp_close(made: Records, at: Integers, rng: np.random.Generator) -> None:
    delays = rng.integers(1, made["x"][at] // 2)
    made["ts_recv"][at] = made["ts_event"][at] + delays.astype(np.uint64)


def _overlap(tape: Records, places: Integers, rng: np.random.Generator) -> Injected:
    """A bar lasts for longer than until the next one."""
    made, following = tape.copy(), _next(tape, places)
    longer = (tape["ts_event"][following] - tape["ts_event"][places]).astype(np.int64)
    made["x"][places] = longer + rng.integers(1, longer)
    return Injected(made, following)


def _repeat(tape: Records, places: Integers, rng: np.random.Generator) -> Injected:
    """Records that have a number or an id come again, soon after."""
    later = places + rng.integers(1, 50, len(places))
    made = np.insert(tape, later, tape[places])
    return Injected(made, later + np.arange(len(later)))


def _reconnect(tape: Records, places: Integers, rng: np.random.Generator) -> Injected:
    """A connection breaks, and the last records come again, without a number or an id."""
    kept, expected, start, size = list[Records](), list[int](), 0, 0
    own = np.flatnonzero(tape["symbol"] == 0)
    for place, at in zip(places.tolist(), np.searchsorted(own, places).tolist(), strict=True):
        again = tape[own[at - int(rng.integers(1, 9)) : at]].copy()
        again["flags"][0] |= FLAG_GAP
        kept += [tape[start:place], again]
        size += place - start
        expected += range(size, size + len(again))
        start, size = place, size + len(again)
    return Injected(np.concatenate([*kept, tape[start:]]), np.array(expected))


def _spoil(made: Records, at: Integers, factors: npt.NDArray[np.float64]) -> None:
    """Multiply the prices of records."""
    names = {TRADE: "a", QUOTE: "ab", BAR: "abcd"}[int(made["kind"][0])]
    for name in names:
        made[name][at] = np.maximum(1, (made[name][at] * factors).astype(np.int64))


def _bad_ticks(tape: Records, places: Integers, rng: np.random.Generator) -> Injected:
    made = tape.copy()
    _spoil(made, places, 1 + rng.choice([-1, 1], len(places)) * rng.uniform(0.05, 0.4, len(places)))
    return Injected(made, _next(tape, places))


def _jumps(tape: Records, places: Integers, rng: np.random.Generator) -> Injected:
    made = tape.copy()
    _spoil(made, places, rng.uniform(11, 100, len(places)) ** rng.choice([-1, 1], len(places)))
    return Injected(made, np.concatenate([places, _next(tape, places)]))  # there and back


def _split(tape: Records, places: Integers, rng: np.random.Generator, announced: bool = True) -> Injected:
    """Splits and their reversals by turns, so that prices stay in range."""
    factors, made = rng.choice(_FACTORS, len(places)).astype(np.float64), tape.copy()
    factors[1::2] = 1 / factors[: len(factors[1::2]) * 2 : 2]
    total = 1 / np.cumprod(factors)
    own = np.flatnonzero(tape["symbol"] == 0)
    since = np.searchsorted(places, own, side="right") - 1
    _spoil(made, own[since >= 0], total[since[since >= 0]])
    if not announced:
        return Injected(made, _next(tape, places))
    times = tape["ts_event"][places].astype(np.int64).tolist()
    return Injected(made, places, tuple(zip(times, factors.tolist(), strict=True)))


def _unannounced(tape: Records, places: Integers, rng: np.random.Generator) -> Injected:
    return _split(tape, places, rng, announced=False)


_Inject = Callable[[Records, Integers, np.random.Generator], Injected]
_TICKS, _EACH = (TRADE, QUOTE), (TRADE, QUOTE, BAR)
_INJECTORS: dict[str, tuple[tuple[int, ...], _Inject]] = {
    "reordered": (_TICKS, _edit(_reorder)),
    "crossed": ((QUOTE,), _edit(_cross)),
    "locked": ((QUOTE,), _edit(_lock)),
    "one_sided": ((QUOTE,), _edit(_empty_a_side)),
    "zero_size": ((TRADE,), _edit(_empty)),
    "overlapping": ((BAR,), _overlap),
    "close_stamped": ((BAR,), _edit(_stamp_close)),
    "skewed_clock": (_EACH, _edit(_skew)),
    "duplicate": ((TRADE,), _repeat),
    "duplicate_content": (_TICKS, _reconnect),
    "bad_tick": (_EACH, _bad_ticks),
    "split_like": (_EACH, _unannounced),
    "split": (_EACH, _split),
    "price_jump": (_EACH, _jumps),
}
