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
_PATH, _TEMPLATE = "/completion", "/apply-template"
_WAIT_S = 300.0
_PROBABLE = 100
"""Tokens whose probabilities are asked for: those of the options are among them, but for odd models."""
Reply = tuple[bytes, int]


def beside_llama(
    model: schema.ModelConfig, python: Path, asked: Sequence[DecisionRequest], session: schema.SessionConfig
) -> Iterator[Figure]:
    """Requests to a daemon and to llama.cpp's server, which has the model's file, in turn. The first pair is
    not measured. Raises MeasurementFailed.
    """
    with _serving_llama(python, model) as port:
        bodies = [(msgspec.json.encode(each), _prompts(port, each)) for each in asked]
        pairs = uvloop.run(_replies(model, session, port, bodies))[1:]
    ours, theirs = ([reply[1] for reply in side] for side in zip(*pairs, strict=True))
    read = json.loads(pairs[0][1][0])[0]["tokens_evaluated"]
    setting: Setting = {"model": Path(model.path).stem, "tokens of a prompt": read}
    table = "On fresh text"
    yield from latency("ten questions", ours, setting, table, "llama.cpp's server", theirs, at=(0.5, 1.0))
    equal = [
        mine == his
        for (said, _), (completed, _) in pairs
        for mine, his in zip(_choices(said), _completed(asked[0], completed), strict=True)
    ]
    yield Figure("same option", sum(equal), "", table, setting, "compared", float(len(equal)))


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
    model: schema.ModelConfig, session: schema.SessionConfig, port: int, bodies: Sequence[tuple[bytes, bytes]]
) -> list[tuple[Reply, Reply]]:
    settings = config(model, [session])
    async with serving(settings, QueuedSource("bars")) as gateway:
        with child(decide_fresh, gateway.http.port, port, _PATH, bodies) as client:
            return [await asyncio.to_thread(client.recv) for _ in bodies]


def _prompts(port: int, asked: DecisionRequest) -> bytes:
    """The same questions as prompts in the model's chat format: one request, whose prompts take turns."""
    state = text_of(asked.state)
    prompts = []
    for each in asked.questions.values():
        (turn,) = generate(each, state, "").turns
        message = {"messages": [{"role": "user", "content": turn.text}]}
        prompts.append(_post(port, _TEMPLATE, message)["prompt"])
    return json.dumps({"prompt": prompts, "n_predict": 1, "n_probs": _PROBABLE, "temperature": 0}).encode()


def _post(port: int, path: str, body: Mapping[str, Any]) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_WAIT_S) as reply:
        return json.load(reply)


def _choices(reply: bytes) -> list[str]:
    """What the daemon chose, by question."""
    return [each["choice"] for each in json.loads(reply)["answers"].values()]


def _completed(asked: DecisionRequest, reply: bytes) -> list[str]:
    """The option of each prompt whose first token is likeliest."""
    found = sorted(json.loads(reply), key=lambda each: each["index"])
    chosen = []
    for each, question in zip(found, asked.questions.values(), strict=True):
        likeliest = (token["token"].strip() for token in each["completion_probabilities"][0]["top_logprobs"])
        options = ([o for o in question.options if token and o.startswith(token)] for token in likeliest)
        chosen.append(next((each[0] for each in options if each), ""))
    return chosen
