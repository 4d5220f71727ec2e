"""`foretick feasible`: read a trace, ask for a schedule or a certificate, and write the answer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from scheduler.theory.feasible import feasible
from scheduler.theory.query_stream import read_trace


class Answer(msgspec.Struct, frozen=True):
    """What the command prints. Queries are numbered from 0 in the trace's order; times are in tokens.

    `order` and what follows it are null where only the certificate is known.
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
        """The verdict, then a row per query in the order of processing."""
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


def answer(trace: Path, ttft: float, p: float, c_attn: float) -> Answer:
    """Theorem 4's answer for a trace file.

    Raises ValueError: TraceError for a line that cannot be used, TooWide when the search does not end, and
    for numbers out of range.
    """
    with trace.open("rb") as lines:
        stream = read_trace(lines)
    found = feasible(stream, ttft, p, c_attn=c_attn)
    percentile = None
    if found.ttfts is not None:
        percentile = sorted(found.ttfts)[len(stream) - found.allowed - 1]
    return Answer(
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
