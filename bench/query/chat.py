"""Chat completions beside vLLM's server, with the same model, template and requests."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import uvloop
from msgspec.structs import replace

from bench.engine.contenders import EIGHTY_SHAPE
from bench.figures import Figure, quantiles
from bench.run import MeasurementFailed, SuiteRun
from bench.stream.flood import FloodSource
from bench.stream.processes import child
from bench.stream.serving import config, serving
from daemon.config import schema
from engine.model.embedded import embedded_directory

_MODEL = "bench"
_VLLM = "vLLM"
_STARTS_S = 300.0
_CACHE_GIB = "2"


@dataclass(frozen=True)
class ChatPlan:
    """``chats`` of ``turns`` each, with ``words`` of instructions and answers of ``tokens`` tokens; so many
    ``clients`` at a time.
    """

    clients: tuple[int, ...] = (1, 4)
    chats: int = 8
    turns: int = 4
    words: int = 64
    tokens: int = 32


QUICK = ChatPlan(clients=(1, 2), chats=2, turns=2, words=8, tokens=4)


class Answered(NamedTuple):
    """An answer, and the ns until its first and its last piece."""

    text: str
    first_ns: int
    whole_ns: int


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Streamed chat completions in float32 from a random model of 80 million parameters, greedily; each turn
    brings the whole chat. The servers run one after the other, each with the same threads, and its clients in
    a process of their own. *Equal answers*: the share of turns with the same text from both.
    """
    plan = run.sized(ChatPlan(), QUICK)
    model = embedded_directory(**({} if run.quick else EIGHTY_SHAPE))
    theirs: dict[int, list[Answered]] = {}
    if run.vllm is None:
        run.say("vLLM: not installed here, or not named by --vllm; no reference")
    else:
        with _vllm(run.vllm, model, run.threads) as port:
            theirs = {clients: _chats(port, plan, clients) for clients in plan.clients}
    ours = uvloop.run(_ours(plan, model, run.threads))
    for clients in plan.clients:
        yield from _figures(clients, ours[clients], theirs.get(clients))


def _figures(clients: int, ours: list[Answered], theirs: list[Answered] | None) -> Iterator[Figure]:
    for name, index in (("first token", 1), ("whole answer", 2)):
        for at in (0.5, 0.99):
            mine, *other = (
                quantiles([answered[index] / 1e6 for answered in each], at)[0]  # type: ignore[operator]  # ns
                for each in (ours, theirs)
                if each is not None
            )
            yield Figure(
                f"{name} P{at * 100:g}", mine, "ms", setting={"clients": clients}, n=len(ours),
                against=_VLLM if other else "", reference=other[0] if other else None,
            )  # fmt: skip
    if theirs is not None:
        equal = sum(mine.text == other.text for mine, other in zip(ours, theirs, strict=True)) / len(ours)
        yield Figure("equal answers", equal, "share", setting={"clients": clients}, n=len(ours))


async def _ours(plan: ChatPlan, model: Path, threads: int) -> dict[int, list[Answered]]:
    settings = replace(
        config(schema.ModelConfig(path=str(model), threads=threads, aliases=(_MODEL,)), ()), standing="none"
    )
    async with serving(settings, FloodSource([], [], 1)) as gateway:
        return {
            clients: await asyncio.to_thread(_chats, gateway.http.port, plan, clients)
            for clients in plan.clients
        }


@contextlib.contextmanager
def _vllm(python: Path, model: Path, threads: int) -> Iterator[int]:
    """vLLM's server of the environment of ``python``; its port. Raises MeasurementFailed."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": _CACHE_GIB,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)
    with socket.socket() as free, tempfile.TemporaryDirectory() as directory:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        free.close()
        command = [
            str(python.absolute()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--served-model-name", _MODEL, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
            "--max-model-len", "4096", "--enforce-eager", "--block-size", "32",
        ]  # fmt: skip
        log = Path(directory, "log")
        with log.open("wb") as told:
            process = subprocess.Popen(command, cwd=directory, env=environment, stdout=told, stderr=told)
        try:
            until = time.monotonic() + _STARTS_S
            while not _is_up(port):
                if process.poll() is not None or time.monotonic() > until:
                    said = log.read_text(errors="replace")[-2000:]
                    raise MeasurementFailed(f"vLLM's server did not start: {said}")
                time.sleep(0.5)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_up(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _chats(port: int, plan: ChatPlan, clients: int) -> list[Answered]:
    with child(chat, port, plan, clients) as pipe:
        found: list[Answered] = pipe.recv()
        return found


def chat(port: int, plan: ChatPlan, clients: int, pipe: Connection) -> None:
    """Sends "ready", then what was answered, chat by chat and turn by turn."""

    def one(number: int) -> list[Answered]:
        words = " ".join(f"price {n}" for n in range(100, 100 + plan.words))
        messages = [{"role": "system", "content": f"{clients} {number} {words}"}]
        answers = []
        for turn in range(plan.turns):
            messages.append({"role": "user", "content": f"And after {turn} more?"})
            answers.append(_ask(port, messages, plan.tokens))
            messages.append({"role": "assistant", "content": answers[-1].text})
        return answers

    pipe.send("ready")
    one(-1)  # kernels are loaded at the first one
    with ThreadPoolExecutor(clients) as pool:
        pipe.send([each for answers in pool.map(one, range(plan.chats)) for each in answers])


def _ask(port: int, messages: list[dict[str, str]], tokens: int) -> Answered:
    """One request. Raises RuntimeError when it is refused."""
    asked = {
        "model": _MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began = time.perf_counter_ns()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(asked), {"content-type": "application/json"}
    )
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(reply.read().decode(errors="replace"))
    first_ns, pieces = 0, []
    while line := reply.readline():
        if not line.startswith(b"data: {"):
            continue
        choices = json.loads(line[6:])["choices"]
        piece = choices[0]["delta"].get("content") if choices else None
        if piece:
            first_ns = first_ns or time.perf_counter_ns() - began
            pieces.append(piece)
    whole_ns = time.perf_counter_ns() - began
    connection.close()
    return Answered("".join(pieces), first_ns or whole_ns, whole_ns)
