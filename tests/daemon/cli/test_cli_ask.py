"""What `foretick ask` prints of a reply."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq
from click.testing import CliRunner

from daemon.api.messages import Ask, AskReply, decode_request, encode
from daemon.cli.ask import command, shown


def up(**members: Any) -> AskReply:
    given = {"id": 1, "session": "aaa", "data_version": 7, "choice": "UP", "logit_gap": 1.25} | members
    return AskReply(text="UP", **given)


def test_an_answer_is_shown_with_what_it_is_worth() -> None:
    assert shown(up(untrained=True, staleness_ns=10**9, latency_ns=2_500_000), "aaa") == (
        "UP\n  version 7, logit gap 1.250, 1.000 s since the event, 2.50 ms, computed now, untrained model"
    )
    kept = shown(up(cached=True, flags=("kept_reply", "stale")), "aaa")
    assert kept.endswith("0.00 ms, kept from the same ask")
    judged = shown(up(cached=True, probability=0.8125, choice_set=("UP", "DOWN")), "aaa")
    assert "logit gap 1.250, probability 0.812, choice set {UP, DOWN}, 0.000 s since" in judged
    assert judged.endswith("answered ahead")
    assert ", act, 0.000 s since" in shown(up(act=True), "aaa")
    unknown = shown(up(uncalibrated="ready_exit"), "aaa")
    assert "1.250, no probability (ready_exit: ask with early_exit = 0), 0.000 s since" in unknown
    why = shown(up(act=False, abstain_reason="low_confidence"), "aaa")
    assert ", do not act (low_confidence), 0.000 s since" in why
    other = shown(up(session="aaa-words", model="chat"), "aaa")
    assert other.startswith("UP\n  aaa-words answered, by chat: version 7, logit gap")


def test_the_gap_of_an_early_exit_and_the_age_of_data_are_asked_for() -> None:
    """By a socket that answers like the daemon's."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, ThreadPoolExecutor() as pool:
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> Ask:
            *envelope, body = router.recv_multipart()
            asked = decode_request(body)
            assert isinstance(asked, Ask)
            router.send_multipart([*envelope, encode(up(id=asked.id))])
            return asked

        asked = pool.submit(answer)
        options = ["--endpoint", f"tcp://127.0.0.1:{port}", "--early-exit", "0.5", "--max-age", "2"]
        result = CliRunner().invoke(command, ["aaa", "trend", *options])
    assert result.exit_code == 0, result.output
    assert (asked.result().early_exit, asked.result().max_age_s) == (0.5, 2.0)
