"""Clients over HTTP and ZeroMQ, measured small."""

import json
import math
import sys
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from bench.query import cached, decisions, events, fresh, scrape, webhooks
from bench.run import MeasurementFailed, SuiteRun
from daemon.api.systemone import Choice, DecisionRequest
from daemon.config.schema import UNTRAINED, ModelConfig
from metrics.export import exposition
from metrics.store import MetricStore


@pytest.mark.rotated(3, "benchmarks in their smallest size")
def test_every_client_gets_every_event() -> None:
    figures = list(events.measure(SuiteRun(quick=True)))
    (delivered,) = (figure for figure in figures if figure.name == "delivery P50")
    assert delivered.n == delivered.setting["clients"] * events.QUICK.events
    assert all(figure.ours > 0 and figure.ratio for figure in figures if figure.unit == "ms")


@pytest.mark.rotated(3, "benchmarks in their smallest size")
def test_cached_answers_are_beside_bare_servers_of_the_same_loop() -> None:
    figures = list(cached.measure(SuiteRun(quick=True)))
    trips = [figure for figure in figures if figure.name.startswith("cached")]
    assert {(figure.setting["over"], figure.setting["condition"]) for figure in trips} == {
        (over, condition)
        for over in ("ZeroMQ", "HTTP")
        for condition in ("engine idle", "other sessions flooded")
    }
    assert all(figure.ratio for figure in trips)


def test_a_signal_of_every_other_bar_reaches_its_receiver_beside_a_bare_post() -> None:
    figures = {figure.name: figure for figure in webhooks.measure(SuiteRun(quick=True))}
    whole, behind = (figures[f"{name} P50"] for name in ("bar close to webhook", "answers to webhook"))
    assert whole.n == behind.n > 0
    assert whole.ratio
    assert behind.ratio
    assert whole.ours > behind.ours > 0
    assert figures["bar close to webhook P99"].goal is not None


def test_ten_typed_questions_are_beside_a_bare_route_and_one_pass() -> None:
    figures = {figure.name: figure for figure in decisions.measure(SuiteRun(threads=1, quick=True))}
    assert all(figure.ours > 0 and figure.ratio for figure in figures.values())
    assert figures["ready P99"].goal is not None
    assert figures["right after a bar P50"].goal is not None
    assert (figures["ready P50"].n, figures["right after a bar P50"].n) == (20, 3)
    alone, bound = figures["right after a bar P50"], figures["right after a bar, bound P50"]
    assert isinstance(alone.reference, float)
    assert bound.ours == alone.ours
    assert bound.reference == pytest.approx(alone.reference + figures["ready P50"].ours)


LLAMA = """
import json, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

class CommonParams:
    def __init__(self):
        self.model, self.cpuparams, self.cpuparams_batch = (SimpleNamespace() for _ in range(3))

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        # a token is the number of characters, and "YES" has two; even ones are e times as likely
        done = [
            {
                "index": n,
                "tokens_evaluated": len(each),
                "completion_probabilities": [
                    {"top_logprobs": [{"id": id, "logprob": -1.0 if id % 2 else 0.0} for id in range(9)]}
                ],
            }
            for n, each in reversed([*enumerate(asked.get("prompt", ()))])
        ]
        said = {"prompt": asked["messages"][0]["content"]} if "messages" in asked else done
        if "content" in asked:
            said = {"tokens": [len(asked["content"]), 1][: 1 + (asked["content"] == "YES")]}
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

class Server:
    def __init__(self, settings):
        assert (settings.model.path, settings.n_parallel, settings.port) == ("untrained", 1, 0)
        print("loading")
        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{server.server_port}"
"""


def test_fresh_text_is_beside_a_server_with_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.py").write_text(LLAMA)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    asked = [decisions.request_about(text) for text in fresh.texts(3, 1)]
    model = ModelConfig(path=UNTRAINED, threads=1)
    figures = {each.name: each for each in fresh.beside_llama(model, python, asked, decisions.SESSION)}
    assert figures["ten questions P50"].n == 2
    assert figures["ten questions P50"].ratio
    assert figures["same option"].reference == 20
    assert 0 <= figures["same option"].ours <= 20
    assert 0 < figures["largest difference of a probability"].ours < 1
    (tmp_path / "xllamacpp.py").write_text("raise RuntimeError('no such file')")
    with pytest.raises(MeasurementFailed, match="RuntimeError: no such file"):
        list(fresh.beside_llama(model, python, asked, decisions.SESSION))


def test_probabilities_of_llama_cpp_are_of_whole_options() -> None:
    choice = Choice(instructions="Up?", criteria={"YES": None, "NO": None})
    asked = DecisionRequest("m", "", {"a": choice})
    first, further = fresh.Prompts({(0, ()): "p"}), fresh.Prompts({(0, (3,)): ["p", 3]})

    def reply(**logs: float) -> bytes:
        likeliest = [{"id": int(name[1:]), "logprob": log} for name, log in logs.items()]
        return json.dumps([{"index": 0, "completion_probabilities": [{"top_logprobs": likeliest}]}]).encode()

    replies = reply(t3=math.log(0.5), t2=math.log(0.1)), reply(t4=math.log(0.6))
    (found,) = fresh.completed(asked, {"YES": (3, 4), "NO": (2,)}, (first, further), replies)
    assert found == pytest.approx({"YES": 0.75, "NO": 0.25})
    (found,) = fresh.completed(asked, {"YES": (3, 9), "NO": (2,)}, (first, further), replies)
    assert found == pytest.approx({"YES": 0.0, "NO": 1.0})


def test_a_scrape_is_beside_the_same_series() -> None:
    figures = {figure.name: figure for figure in scrape.measure(SuiteRun(quick=True))}
    assert figures["scrape P50"].ratio
    store = MetricStore.local({"session": ["a", "b"], "source": ["kafka"], "sink": ["kafka"]})
    ours, other = scrape.series(exposition(store)), scrape.series(generate_latest(scrape.registry_of(store)))
    alike = [sorted(line for line in each if b"_bucket{" not in line) for each in (ours, other)]
    assert alike[0] == alike[1]
