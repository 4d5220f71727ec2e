"""System One on text that was never seen: ten typed questions, beside llama.cpp's server."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, inf
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench.figures import Figure, Setting, latency
from bench.query import llama_server
from bench.query.clients import decide_fresh
from bench.run import MeasurementFailed
from bench.stream.processes import child
from bench.stream.serving import config, serving
from daemon.api.systemone import DecisionRequest, generate, text_of
from daemon.config import schema
from lab.queued_source import QueuedSource

CONTEXT = 4_096
_PATH, _TEMPLATE, _TOKENS = "/completion", "/apply-template", "/tokenize"
_WAIT_S = 300.0
_PROBABLE = 100
"""Tokens whose probabilities are asked for: those of the options are among them, but for odd models."""
Reply = tuple[bytes, int]
_Node = tuple[int, tuple[int, ...]]
"""A question's number, and the tokens behind its prompt."""
_Probabilities = Mapping[str, float]


@dataclass(frozen=True)
class Prompts:
    """Prompts of one request to llama.cpp's server, by what they ask."""

    of: Mapping[_Node, str | Sequence[str | int]]

    @property
    def body(self) -> bytes:
        """The request; empty without a prompt."""
        settings = {"n_predict": 1, "n_probs": _PROBABLE, "temperature": 0}
        return json.dumps({"prompt": [*self.of.values()], **settings}).encode() if self.of else b""

    def read(self, reply: bytes) -> dict[_Node, dict[int, float]]:
        """Log probabilities of the likeliest tokens behind each prompt."""
        found = sorted(json.loads(reply or b"[]"), key=lambda each: each["index"])
        likeliest = (each["completion_probabilities"][0]["top_logprobs"] for each in found)
        tokens = ({token["id"]: token["logprob"] for token in each} for each in likeliest)
        return dict(zip(self.of, tokens, strict=True))


def beside_llama(
    model: schema.ModelConfig, python: Path, asked: Sequence[DecisionRequest], session: schema.SessionConfig
) -> Iterator[Figure]:
    """Requests to a daemon and to llama.cpp's server, which has the model's file, in turn. The first pair is
    not measured. Raises MeasurementFailed.
    """
    with _serving_llama(python, model) as port:
        prompts = [_prompts(port, each) for each in asked]
        bodies = [
            (msgspec.json.encode(each), first.body, further.body)
            for each, (first, further) in zip(asked, prompts, strict=True)
        ]
        options = {o: _tokens(port, o) for each in asked[0].questions.values() for o in each.options}
        replies = uvloop.run(_replies(model, session, port, bodies))[1:]
    ours, theirs = ([reply[side][1] for reply in replies] for side in (0, 1))
    read = json.loads(replies[0][1][0])[0]["tokens_evaluated"]
    setting: Setting = {"model": Path(model.path).stem, "tokens of a prompt": read}
    table = "On fresh text"
    yield from latency("ten questions", ours, setting, table, "llama.cpp's server", theirs, at=(0.5, 1.0))
    pairs = [
        pair
        for each, whole, (said, first, behind) in zip(asked[1:], prompts[1:], replies, strict=True)
        for pair in _pairs(said[0], completed(each, options, whole, (first[0], behind[0])))
    ]
    equal = [_likeliest(one) == _likeliest(other) for one, other in pairs]
    yield Figure("same option", sum(equal), "", table, setting, "compared", float(len(equal)))
    largest = max(abs(p - other[option]) for one, other in pairs for option, p in one.items())
    yield Figure("largest difference of a probability", largest, "", table, setting, n=len(pairs))


def texts(count: int, lines: int) -> list[str]:
    """Bars in words, which no two texts share."""
    draw = random.Random(7)

    def line(at: int) -> str:
        opened = draw.uniform(90, 110)
        prices = [opened, opened + draw.random(), opened - draw.random(), opened + draw.uniform(-0.9, 0.9)]
        told = " ".join(f"{n} {p:.2f}" for n, p in zip(("open", "high", "low", "close"), prices, strict=True))
        return f"{9 + at // 60:02d}:{at % 60:02d} {told} volume {draw.randint(100, 9_999)}"

    return ["\n".join(line(at) for at in range(lines)) for _ in range(count)]


@contextmanager
def _serving_llama(python: Path, model: schema.ModelConfig) -> Iterator[int]:
    """The port of the server. Raises MeasurementFailed where it does not start."""
    command = [str(python.absolute()), llama_server.__file__, model.path, str(model.threads), str(CONTEXT)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert process.stdout is not None
            # the package prints lines of its own
            port = next((line.split()[1] for line in process.stdout if line.startswith("port ")), None)
            if port is None:
                log.seek(0)
                said = log.read().decode(errors="replace").strip().splitlines()[-1:]
                raise MeasurementFailed(f"{python} does not serve {model.path}: {' '.join(said)}")
            yield int(port)
        finally:
            process.kill()
            process.communicate()


async def _replies(
    model: schema.ModelConfig,
    session: schema.SessionConfig,
    port: int,
    bodies: Sequence[tuple[bytes, bytes, bytes]],
) -> list[tuple[Reply, Reply, Reply]]:
    settings = config(model, [session])
    async with serving(settings, QueuedSource("bars")) as gateway:
        with child(decide_fresh, gateway.http.port, port, _PATH, bodies) as client:
            return [await asyncio.to_thread(client.recv) for _ in bodies]


def _prompts(port: int, asked: DecisionRequest) -> tuple[Prompts, Prompts]:
    """The same questions in the model's chat format, whose prompts take turns; and those prompts again behind
    what options of several tokens begin with.
    """
    state = text_of(asked.state)
    first, further = dict[_Node, str](), dict[_Node, list[str | int]]()
    for number, each in enumerate(asked.questions.values()):
        (turn,) = generate(each, state, "").turns
        message = {"messages": [{"role": "user", "content": turn.text}]}
        prompt: str = _post(port, _TEMPLATE, message)["prompt"]
        first[number, ()] = prompt
        for tokens in (_tokens(port, option) for option in each.options):
            further |= {(number, tokens[:n]): [prompt, *tokens[:n]] for n in range(1, len(tokens))}
    return Prompts(first), Prompts(further)


def _tokens(port: int, text: str) -> tuple[int, ...]:
    return tuple(_post(port, _TOKENS, {"content": text})["tokens"])


def _post(port: int, path: str, body: Mapping[str, Any]) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_WAIT_S) as reply:
        return json.load(reply)


def _pairs(reply: bytes, theirs: Sequence[_Probabilities]) -> Iterator[tuple[_Probabilities, _Probabilities]]:
    """The daemon's answers and llama.cpp's, by question."""
    return zip((each["probabilities"] for each in json.loads(reply)["answers"].values()), theirs, strict=True)


def completed(
    asked: DecisionRequest,
    options: Mapping[str, tuple[int, ...]],
    prompts: tuple[Prompts, Prompts],
    replies: tuple[bytes, bytes],
) -> list[_Probabilities]:
    """llama.cpp's answers: the probability of each option's tokens, over the options of its question."""
    found, rows = list[_Probabilities](), dict[_Node, dict[int, float]]()
    for each, reply in zip(prompts, replies, strict=True):
        rows |= each.read(reply)
    for number, question in enumerate(asked.questions.values()):
        own = {option: options[option] for option in question.options}
        logs = {
            option: sum(rows[number, tokens[:n]].get(token, -inf) for n, token in enumerate(tokens))
            for option, tokens in own.items()
        }
        total = sum(map(exp, logs.values())) or 1.0
        found.append({option: exp(log) / total for option, log in logs.items()})
    return found


def _likeliest(probabilities: _Probabilities) -> str:
    return max(probabilities, key=lambda option: probabilities[option])
