"""What `foretick bench gpu` found, and its table."""

from __future__ import annotations

from statistics import median

import msgspec

from bench.figures import Latency
from bench.tables import ms, table
from daemon.cli.profile import by_size
from engine.profile.timing import Samples
from scheduler.costs import CostModel


class Device(msgspec.Struct, frozen=True):
    """The hardware, and what it reaches on plain work in the same run."""

    name: str
    torch: str
    copy_gb_s: float
    """Bytes read plus bytes written by a large copy on the device."""
    matrix_tflop_s: float
    """A large matrix product in the model's type."""


class Question(msgspec.Struct, frozen=True):
    """One way of asking: a question with one answer token, then single tokens behind it."""

    how: str
    latency: Latency
    decode: Latency
    question_over_floor: float
    decode_over_floor: float


class AttentionPoint(msgspec.Struct, frozen=True):
    """The attention backend alone: KV bytes over its time, against the copy bandwidth."""

    rows: int
    context: int
    gb_s: float
    of_copy: float


class GpuReport(msgspec.Struct, frozen=True):
    """One run."""

    command: str
    started: str
    device: Device
    model: str
    context: int
    question_tokens: int
    attention: str
    questions: list[Question]
    standing: int
    standing_over_one: float
    ingest_tokens_s: float
    ingest_of_floor: float
    samples: Samples
    profile: CostModel
    attention_points: list[AttentionPoint]
    seconds: float


GOALS = (
    "goals: question at most 1.30x its memory floor, 25 standing questions at most 3x one, ingest at least "
    "60 % of the matrix floor's rate, attention at least 75 % of the copy bandwidth at 16k"
)


def render(report: GpuReport) -> str:
    """The tables in Markdown."""
    device = report.device
    head = (
        f"`{report.command}`, {report.started}: {device.name}, torch {device.torch}; copies "
        f"{device.copy_gb_s:,.0f} GB/s, matrix products {device.matrix_tflop_s:,.1f} TFLOP/s. "
        f"{report.model}, {report.context:,} tokens of context, {report.question_tokens} of a question, "
        f"attention backend {report.attention}. {report.seconds:.0f} s in all ({GOALS})."
    )
    questions = table(
        ("", "question p50, ms", "p99, ms", "p50 / floor", "token p50, ms", "p50 / floor"),
        [
            (
                q.how,
                ms(q.latency.p50_ms),
                ms(q.latency.p99_ms),
                f"{q.question_over_floor:.2f}",
                ms(q.decode.p50_ms),
                f"{q.decode_over_floor:.2f}",
            )
            for q in report.questions
        ],
    )
    rest = table(
        ("", ""),
        [
            (f"{report.standing} standing questions / one", f"{report.standing_over_one:.2f}"),
            ("ingest, tokens a second", f"{report.ingest_tokens_s:,.0f}"),
            ("ingest, share of the matrix floor's rate", f"{report.ingest_of_floor:.2f}"),
        ],
    )
    found = report.samples
    recompute, out, back = map(by_size, (found.prefills, found.swap_out, found.swap_in))
    curve = table(
        ("tokens", "recompute, ms", "swap out, ms", "swap in, ms"),
        [
            (f"{tokens:,}", *(ms(1e3 * median(seconds)) for seconds in measured))
            for tokens, *measured in zip(
                recompute, recompute.values(), out.values(), back.values(), strict=True
            )
        ],
    )
    errors = table(
        ("cost model", "median error", "worst error"),
        [(name, f"{e.median:.1%}", f"{e.worst:.1%}") for name, e in report.profile.errors.items()],
    )
    points = table(
        ("rows", "context", "GB/s", "of copy"),
        [
            (str(p.rows), f"{p.context:,}", f"{p.gb_s:,.0f}", f"{p.of_copy:.2f}")
            for p in report.attention_points
        ],
    )
    return f"{head}\n\n{questions}\n\n{rest}\n\n{curve}\n\n{errors}\n\nAttention alone:\n\n{points}\n"
