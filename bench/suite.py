"""One run of everything: the parts that need no torch first, so that its threads disturb none of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import msgspec

from bench import hits, kafka_rate, machine, ring_rate
from bench.kafka_rate import Miscounted
from bench.questions_result import Disagreement, Questions
from bench.report import Report
from feeds.mock_broker import MockUnavailable

__all__ = ["Disagreement", "Miscounted", "MockUnavailable", "measure"]

QUICK_RING = ring_rate.Plan(records=200_000, batched=50_000, queued=1000, repeats=2)
QUICK_KAFKA = kafka_rate.Plan(records=5000, markets=4, repeats=1)
QUICK_HITS = hits.Plan(threads=(1,), seconds=2.0, records=100_000)


def measure(
    command: str,
    started: str,
    threads: int,
    models: Sequence[str],
    parts: Collection[str],
    *,
    quick: bool,
    say: Callable[[str], None],
    keep: Callable[[Report], None],
) -> Report:
    """Run ``parts`` for ``models``; ``say`` tells what is under way, ``keep`` gets what there is after each.

    Raises Disagreement, Miscounted, MockUnavailable.
    """
    report = Report(command, started, threads, machine.describe())

    def done(**found: object) -> None:
        nonlocal report
        report = msgspec.structs.replace(report, load_at_end=os.getloadavg()[0], **found)
        keep(report)

    if "ring" in parts:
        say("ring ...")
        done(ring=ring_rate.run(QUICK_RING if quick else ring_rate.Plan()))
    if "kafka" in parts:
        say("Kafka to bars ...")
        done(kafka=kafka_rate.run(QUICK_KAFKA if quick else kafka_rate.Plan()))
    if "hits" in parts:
        say("flash hits ...")
        done(hits=hits.run(QUICK_HITS if quick else hits.Plan()))
    if "questions" in parts:
        for model in models:
            done(questions=[*report.questions, _questions(model, threads, quick, say)])
    return report


def _questions(model: str, threads: int, quick: bool, say: Callable[[str], None]) -> Questions:
    # here, because it imports torch
    from bench import questions
    from bench.scenario import Size

    plan = {"embedded": questions.EMBEDDED, "80m": questions.EIGHTY}[model]
    if quick:
        plan = replace(plan, size=Size(20, 3, 11), repeats=3, dense_rounds=(0, 2))
    say(f"questions, {model} model ...")
    return questions.run(plan, threads)
