"""`foretick feed test`: faults in your own recording, or in a generated day, and which of them are found."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date as Date
from itertools import islice
from pathlib import Path

import click
import msgspec
import numpy as np

from daemon.cli import feed_inspect
from daemon.cli.feed_tape import DECODED, Tape, taped
from daemon.cli.options import aligned, refuse
from daemon.gateway.sequence_gaps import Sequences
from feeds.codec import MalformedRecord, decode_record, encode
from feeds.file_format import FormatError, load_format
from feeds.market_data import AnyRecord, Bar, Quote, Trade
from feeds.quality.silence import LEAST, SilenceMonitor
from feeds.recorded_file import read_records
from feeds.synthetic import INSTRUMENTS, SyntheticTape
from ingest.bars import BarBuilder, BarPolicy, one_each
from ingest.fault_injection import FAULTS, Integers, Score, scores
from ingest.record import BAR, QUOTE, RECORD, Records

RECALL = 0.99
MAX_FALSE_ALARMS = 1
"""A day, of each kind."""
_START_S = 1_767_571_200
_MOST = 2_000_000
"""Records of a file that are read."""
_REASONS = {"negative_size": "size", "unit_change": "timestamp_unit", "inconsistent_bar": "bar_ohlc"}
_SIZES = {Trade: "size", Quote: "bid_size", Bar: "volume"}
_COLUMNS = ("records", "kind", "injected", "found", "recall", "false alarms", "in the tape")


@click.group("feed")
def command() -> None:
    """Look at feeds, and test what is found in them."""


command.add_command(feed_inspect.command)


@command.command("test")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--format", "format_name", help="name of a built-in format, or a TOML file")
@click.option("--date", metavar="YYYY-MM-DD", help="day of a file whose times count from midnight")
@click.option("--generated", is_flag=True, help="test a generated day instead of a file")
@click.option("--seed", type=int, default=1, show_default=True, help="where the faults are")
def test(file: Path | None, format_name: str | None, date: str | None, generated: bool, seed: int) -> None:
    """Inject forty faults of each kind, and print which are found; exit status 1 for missed goals.

    The goals are a recall of 99 %, and at most one false alarm a day. What is found in a recording as it is
    counts as no false alarm.
    """
    if generated == (file is not None) or (file is not None and not format_name):
        raise click.UsageError("give a FILE and its --format, or --generated")
    try:
        tapes = generated_day(seed) if file is None else recorded(file, format_name or "", date)
    except (FormatError, OSError, ValueError) as error:
        refuse(error)
    missed, lines = 0, list[tuple[str, ...]]([_COLUMNS])
    for tape in tapes:
        for score in tape_scores(tape, seed):
            alarms = score.false_alarms + (score.before if generated else 0)
            is_met = score.recall >= RECALL and alarms <= MAX_FALSE_ALARMS * tape.days
            missed += not is_met
            share = f"{score.recall:.1%}{'' if is_met else ' MISSED'}"
            counts = score.injected, score.found, share, score.false_alarms, score.before
            lines.append((tape.name, score.kind, *map(str, counts)))
    print("\n".join(aligned(lines)))
    sys.exit(1 if missed else 0)


def generated_day(seed: int, seconds: int = 86_400) -> list[Tape]:
    """A clean day of one symbol: its trades, quotes around them, and bars of a minute."""
    instrument = INSTRUMENTS[-1]
    source = SyntheticTape(instrument, seed)
    trades = [each for n in range(seconds) for each in source.second((_START_S + n) * 10**9)]
    tape = taped("trades", trades)
    rng, quotes = np.random.default_rng(seed), tape.rows.copy()
    quotes["kind"], quotes["token"], quotes["x"] = QUOTE, 0, 0
    quotes["a"] -= rng.integers(1, 4, len(quotes)) * instrument.tick
    quotes["b"] = tape.rows["a"] + rng.integers(1, 4, len(quotes)) * instrument.tick
    quotes["c"], quotes["d"] = (rng.integers(1, 500, len(quotes)) * 10**9 for _ in "cd")
    minutes = BarBuilder(one_each(1, BarPolicy(60 * 10**9))).update(tape.rows, 0)
    bars = np.zeros(len(minutes), RECORD)
    bars["kind"], bars["x"], bars["ts_event"] = BAR, 60 * 10**9, minutes["ts_open"]
    bars["ts_recv"] = bars["ts_event"] + np.uint64(60 * 10**9 + 10**8)
    for own, theirs in zip("abcde", "ohlcv", strict=True):
        bars[own] = minutes[theirs]
    sample = [
        Bar(
            venue="V", symbol="S", ts_event=each.ts_event, ts_recv=each.ts_recv, open=each.price,
            high=each.price, low=each.price, close=each.price, volume=each.size, interval_ns=10**9,
        )
        for each in trades[:DECODED]
    ]  # fmt: skip
    return [tape, Tape("quotes", quotes, []), Tape("bars", bars, sample)]


def recorded(file: Path, format_name: str, date: str | None = None) -> list[Tape]:
    """The records of a file, a tape for each type. Raises FormatError, OSError and ValueError."""
    day = None if date is None else Date.fromisoformat(date)
    records = list(islice(read_records(file, load_format(format_name), day=day), _MOST))
    if not records:
        raise ValueError(f"{file} holds no record of this format")
    named = (("trades", Trade), ("quotes", Quote), ("bars", Bar))
    of_types = [(name, [each for each in records if type(each) is made]) for name, made in named]
    return [taped(name, own) for name, own in of_types if own]


def tape_scores(tape: Tape, seed: int) -> Iterator[Score]:
    """The scores of all kinds of faults in a tape."""
    yield from scores(tape.rows, seed)
    own = tape.rows[tape.rows["symbol"] == 0]
    rng = np.random.default_rng(seed)
    if len(own) > 4 * FAULTS:
        yield _gaps(own, rng)
        yield from _silence(own, rng)
    for kind, reason in _REASONS.items():
        if tape.sample and (kind != "inconsistent_bar" or isinstance(tape.sample[0], Bar)):
            yield _refusals(kind, reason, tape.sample, rng)


def _gaps(own: Records, rng: np.random.Generator) -> Score:
    """Records of a numbered feed that are missing."""
    times = own["ts_event"][: 10 * DECODED].tolist()
    lost = set(rng.choice(np.arange(2, len(times) - 1, 3), FAULTS, replace=False).tolist())

    def found(without: set[int]) -> list[int]:
        sequences, price = Sequences("symbol"), msgspec.json.decode(b'"1"')
        numbered = (
            Trade(venue="V", symbol="S", ts_event=at, ts_recv=at, seq=n + 1, price=price, size=price)
            for n, at in enumerate(times)
            if n not in without
        )
        return [each.seq - 1 for each in numbered if sequences.missing(each)]

    before, seen = found(set()), set(found(lost))
    expected = {each + 1 for each in lost}
    return Score("gap", FAULTS, len(expected & seen), len(seen - expected) - len(before), len(before))


def _silence(own: Records, rng: np.random.Generator) -> Iterator[Score]:
    """Times in which nothing comes of a symbol, on the clock of its records."""
    monitor = SilenceMonitor()
    before = _silent_gaps(own, monitor)
    limits = [3 * monitor.p99_ns("S", hour * 3600 * 10**9) for hour in range(24)]
    first = max(len(own) // 4, LEAST + 1)  # until then it is learnt what is usual
    if min(limits) == 0 or len(own) - first < FAULTS:
        return
    per_pass = max(1, min(FAULTS, len(own) // 400))  # what is one gap in 100 is usual
    injected = found = alarms = 0
    while injected < FAULTS:
        places = np.sort(rng.choice(np.arange(first, len(own)), per_pass, replace=False))
        holes = np.zeros(len(own), np.int64)
        holes[places] = max(max(limits), 10**9) * rng.uniform(1.5, 10, per_pass)
        made = own.copy()
        made["ts_event"] += np.cumsum(holes).astype(np.uint64)
        seen = _silent_gaps(made, SilenceMonitor())
        hits = int(np.isin(places, seen).sum())
        injected, found = injected + per_pass, found + hits
        alarms += max(0, len(seen) - hits - len(before))
    yield Score("silent", injected, found, alarms, len(before))


def _silent_gaps(own: Records, monitor: SilenceMonitor) -> Integers:
    """The records right before which their symbol was silent."""
    rows = own.copy()
    rows["symbol"] = 0
    monitor.read({"S": 0})
    times, found, start = rows["ts_event"].astype(np.int64), list[int](), 0
    for at in (np.flatnonzero(np.diff(times) > 10**9) + 1).tolist():
        monitor.learn(rows[start:at], int(times[at - 1]))
        if monitor.is_silent("S", int(times[at]) - 1, int(times[at]) - 1):
            found.append(at)
        start = at
    monitor.learn(rows[start:], int(times[-1]))
    return np.array(found, np.int64)


def _refusals(kind: str, reason: str, sample: Sequence[AnyRecord], rng: np.random.Generator) -> Score:
    """Records that decoding refuses."""
    chosen = [sample[at] for at in rng.integers(0, len(sample), FAULTS).tolist()]
    found = sum(_reason(_spoilt(kind, each)) == reason for each in chosen)
    before = sum(_reason(msgspec.json.decode(encode(each))) == reason for each in sample)
    return Score(kind, FAULTS, found, 0, before)


def _spoilt(kind: str, record: AnyRecord) -> Mapping[str, object]:
    members = msgspec.json.decode(encode(record))
    if kind == "unit_change":
        return {**members, "ts_event": record.ts_event // 10**6}
    if kind == "negative_size":
        return {**members, _SIZES[type(record)]: "-1"}
    return {**members, "low": members["high"], "high": "0.000000001"}


def _reason(members: Mapping[str, object]) -> str:
    try:
        decode_record(msgspec.json.encode(members), any_price=True)
    except MalformedRecord as error:
        return error.reason
    return ""
