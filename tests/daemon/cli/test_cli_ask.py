"""What `foretick ask` prints of a reply."""

from __future__ import annotations

from daemon.api.messages import AskReply
from daemon.cli.ask import shown


def test_an_answer_is_shown_with_what_it_is_worth() -> None:
    plain = AskReply(1, "aaa", 7, "UP", "UP", 1.25, False, True, staleness_ns=10**9, latency_ns=2_500_000)
    assert shown(plain) == (
        "UP\n  version 7, logit gap 1.250, stale 1.000 s, 2.50 ms, computed now, untrained model"
    )
    sure = {"probability": 0.8125, "choice_set": ("UP", "DOWN")}
    judged = AskReply(1, "aaa", 7, "UP", "UP", 1.25, True, False, **sure)
    assert "logit gap 1.250, probability 0.812, choice set {UP, DOWN}, stale" in shown(judged)
