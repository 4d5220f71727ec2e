"""`foretick feed inspect`: what comes of the configured sources, how often, and what is wrong with it."""

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from daemon.cli.feed_tape import taped
from daemon.cli.options import aligned, config_option, read_config, refuse, set_option
from feeds.codec import MalformedRecord
from feeds.connector import SettingError, SourceConnector, settings_in
from feeds.market_data import AnyRecord, VenueHeartbeat
from feeds.payloads.payload_decoder import PayloadDecoder
from feeds.proposals.live_sample import next_of
from feeds.proposals.observed import Refusals
from feeds.source import Incoming
from ingest.bar_kernel import JUMP
from ingest.fault_injection import Integers, faults_of
from ingest.feed_rules import BITS

_MOST = 500_000
"""Messages of a source."""
_STOP_S = 1.0
_COLUMNS = ("symbol", "records", "a second", "gap P50", "P99", "longest", "behind P50", "faults")
_BITS = {**BITS, "price_jump": JUMP}


@dataclass
class Sample(Refusals):
    """What came of a source. ``received``: when each record came, ns."""

    records: list[AnyRecord] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    heartbeats: int = 0
    events: int = 0

    def take(self, message: Incoming, payloads: PayloadDecoder) -> None:
        """One more message."""
        if message.fault is not None:
            self.refuse(MalformedRecord(message.fault.reason, message.fault.message))
            return
        for part in payloads.parts(message).parts if message.payload else ():
            if isinstance(part.record, MalformedRecord):
                self.refuse(part.record)
            elif isinstance(part.record, VenueHeartbeat):
                self.heartbeats += 1
            elif not isinstance(part.record, AnyRecord):
                self.events += 1
            else:
                self.records.append(part.record)
                self.received.append(message.ts_recv_ns)


@click.command("inspect")
@config_option
@set_option
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="how long")
@click.option("--source", "only", help="listen to this source alone, where there are several")
def command(config_path: Path, settings: tuple[str, ...], seconds: float, only: str | None) -> None:
    """Listen to the sources beside a daemon that reads them, and print rates, gaps and faults by symbol.

    No consumer group is joined, and nothing is committed. Gaps are between arrivals; a record is behind by
    what it arrives after its event time; both in ms. Exit status 1 where a source sent nothing.
    """
    config = read_config(config_path, settings)
    feeds = {table: each for table, each in config.feeds.items() if only in (None, each[0])}
    if not feeds:
        raise click.UsageError(f"there is no source {only!r}" if only else "no source is configured")
    silent = False
    for table, (name, connector) in feeds.items():
        try:
            with settings_in(table):
                sample = asyncio.run(_listen(name, connector, seconds, config.source.max_message_bytes))
        except (SettingError, OSError) as error:
            refuse(error)
        silent |= not sample.records
        print("\n".join(_lines(name, sample, seconds)))
    sys.exit(1 if silent else 0)


async def _listen(name: str, connector: SourceConnector, seconds: float, max_bytes: int) -> Sample:
    payloads, sample = connector.payloads(max_bytes), Sample()
    messages = await next_of(connector.listen(name, _STOP_S), _MOST, seconds)
    await payloads.prepare(messages)
    for message in messages:
        sample.take(message, payloads)
    return sample


def _lines(name: str, sample: Sample, seconds: float) -> list[str]:
    counts = f"{len(sample.records)} records, {sample.heartbeats} heartbeats, {sample.events} events"
    lines = [f"source {name}: {counts}, {sample.refused.total()} refused in {seconds:g} s"]
    if sample.records:
        lines += aligned([_COLUMNS, *_rows(sample)])
    return lines + [
        f"refused, {why} {count}: {sample.examples[why]}" for why, count in sample.refused.items()
    ]


def _rows(sample: Sample) -> list[tuple[str, ...]]:
    """A row for each symbol, those with the most records first."""
    tape = taped("", sample.records).rows
    faults, received = faults_of(tape), np.array(sample.received, np.int64)
    places = dict[str, list[int]]()
    for at, record in enumerate(sample.records):
        places.setdefault(record.key, []).append(at)
    events = tape["ts_event"].astype(np.int64)
    ordered = sorted(places.items(), key=lambda each: -len(each[1]))
    return [(key, *_row(received[own], events[own], faults[own])) for key, own in ordered]


def _row(received: Integers, events: Integers, faults: npt.NDArray[np.uint32]) -> tuple[str, ...]:
    gaps = np.diff(np.sort(received)) / 1e6
    span_s = max(1e-3, float(np.ptp(received)) / 1e9)
    quantiles = np.quantile(gaps, [0.5, 0.99, 1.0]) if len(gaps) else np.zeros(3)
    behind = float(np.median(received - events)) / 1e6
    counts = {kind: int(np.count_nonzero(faults & np.uint32(bit))) for kind, bit in _BITS.items()}
    named = ", ".join(f"{kind} {count}" for kind, count in counts.items() if count) or "-"
    numbers = [f"{len(received) / span_s:.1f}", *(f"{each:.1f}" for each in (*quantiles, behind))]
    return (str(len(received)), *numbers, named)
