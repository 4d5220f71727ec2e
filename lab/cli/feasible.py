"""`foretick feasible`: find a schedule for a trace that meets a TTFT bound, or certify that none exists."""

import sys
from pathlib import Path

import click
import msgspec

from daemon.cli.options import refuse
from lab.theory.feasible import Feasibility, feasible
from lab.theory.query_stream import read_trace


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
    "--c-attn", default=0.0, show_default=True, help="attention cost of a token, relative to the rest"
)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def command(trace: Path, ttft: float, p: float, c_attn: float, as_json: bool) -> None:
    """Find a schedule of TRACE whose (1 - p) percentile TTFT meets a bound, or certify that none exists.

    Exit status 0 with a schedule, 1 with a certificate only, 2 when there is no answer.
    """
    try:
        with trace.open("rb") as lines:
            found = feasible(read_trace(lines), ttft, p, c_attn=c_attn)
    except ValueError as error:
        refuse(error)
    click.echo(msgspec.json.encode(found).decode() if as_json else table(found))
    sys.exit(0 if found.order is not None else 1)


def table(found: Feasibility) -> str:
    """The verdict, then one row per query in processing order."""
    if found.order is None or found.ttfts is None:
        return (
            f"no schedule meets a TTFT of {found.ttft:g} for all {found.queries} queries; none was found "
            f"with {found.allowed_late} or fewer late"
        )
    promise = ", and no schedule meets it for all" if found.none_meets_all else ""
    lines = [
        f"{found.queries - (found.late or 0)} of {found.queries} queries within {found.ttft:g} "
        f"(P{100 * (1 - found.p):g} is {found.percentile_ttft:g}){promise}",
        f"{'query':>8}  {'ttft':>12}",
    ]
    for query in found.order:
        late = "  late" if found.ttfts[query] > found.ttft else ""
        lines.append(f"{query:>8}  {found.ttfts[query]:>12g}{late}")
    return "\n".join(lines)
