"""`foretick feasible`: find a schedule for a trace that meets a TTFT bound, or certify that none exists."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from daemon.cli.options import refuse
from scheduler.theory.feasible import feasible
from scheduler.theory.query_stream import read_trace


@click.command("feasible")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--ttft", type=float, required=True, help="bound T on the TTFT, in units of one token's compute time"
)
@click.option(
    "--percentile",
    "p",
    type=float,
    required=True,
    help="share p of the queries that may be late: 0.05 is P95",
)
@click.option(
    "--c-attn",
    type=float,
    default=0.0,
    show_default=True,
    help="attention cost of a token, relative to the rest",
)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def command(trace: Path, ttft: float, p: float, c_attn: float, as_json: bool) -> None:
    """Find a schedule of TRACE whose (1 - p) percentile TTFT meets a bound, or certify that none exists.

    Exit status 0 with a schedule, 1 with a certificate only, 2 when there is no answer.
    """
    try:
        found = answer(trace, ttft, p, c_attn)
    except ValueError as error:
        refuse(error)
    click.echo(found.json() if as_json else found.table())
    sys.exit(0 if found.order is not None else 1)


class Feasibility(msgspec.Struct, frozen=True):
    """What the command prints. Queries are numbered from 0 in the trace's order; times are in tokens.

    `order` and the fields after it are null when only the certificate is known.
    """

    queries: int
    ttft: float
    p: float
    none_meets_all: bool
    allowed_late: int
    late: int | None
    percentile_ttft: float | None
    order: tuple[int, ...] | None
    ttfts: tuple[float, ...] | None

    def json(self) -> str:
        """One JSON object."""
        return msgspec.json.encode(self).decode()

    def table(self) -> str:
        """The verdict, then one row per query in processing order."""
        if self.order is None or self.ttfts is None:
            return (
                f"no schedule meets a TTFT of {self.ttft:g} for all {self.queries} queries; none was found "
                f"with {self.allowed_late} or fewer late"
            )
        promise = ", and no schedule meets it for all" if self.none_meets_all else ""
        lines = [
            f"{self.queries - (self.late or 0)} of {self.queries} queries within {self.ttft:g} "
            f"(P{100 * (1 - self.p):g} is {self.percentile_ttft:g}){promise}",
            f"{'query':>8}  {'ttft':>12}",
        ]
        for query in self.order:
            late = "  late" if self.ttfts[query] > self.ttft else ""
            lines.append(f"{query:>8}  {self.ttfts[query]:>12g}{late}")
        return "\n".join(lines)


def answer(trace: Path, ttft: float, p: float, c_attn: float) -> Feasibility:
    """Theorem 4's answer for a trace file.

    Raises ValueError: TraceError for an unusable line, TooWide when the search does not end, or a number out
    of range.
    """
    with trace.open("rb") as lines:
        stream = read_trace(lines)
    found = feasible(stream, ttft, p, c_attn=c_attn)
    percentile = None
    if found.ttfts is not None:
        percentile = sorted(found.ttfts)[len(stream) - found.allowed - 1]
    return Feasibility(
        queries=len(stream),
        ttft=ttft,
        p=p,
        none_meets_all=found.none_meets_all,
        allowed_late=found.allowed,
        late=found.late,
        percentile_ttft=percentile,
        order=found.order,
        ttfts=found.ttfts,
    )
