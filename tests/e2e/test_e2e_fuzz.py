"""Random messages to every socket and feed: each is answered or counted, and the daemon keeps running."""

import asyncio
import http.client
import json
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from daemon.api.http_errors import STATUS
from daemon.api.messages import ErrorReply
from daemon.config.schema import QueryConfig, SchedulerConfig
from metrics.catalogue import REASONS
from tests.fuzz.inputs import ODD
from tests.kit import START, TOPIC, inproc_config, trade, until
from tests.kit.inproc import running
from tests.kit.wire import wired

QUERIES, BODIES, RECORDS = 2200, 150, 1650
SEED = 20261122
VALID = [
    {"type": "ask", "id": 1, "session": "aaa", "question": "Up?", "max_tokens": 1},
    {"type": "ask", "id": 2, "session": "aaa", "question": "Up?", "choices": ["UP", "DOWN"]},
    {"type": "sessions", "id": 3},
    {"type": "stats", "id": 4},
    {"type": "answers", "id": 5, "session": "aaa", "question": "trend"},
    {"type": "open", "id": 6, "text": "One two", "max_tokens": 1},
    {"type": "append", "id": 7, "prompt": "nobody", "text": "three"},
    {"type": "finish", "id": 8, "prompt": "nobody"},
    {"type": "complete", "id": 9, "text": "One", "max_tokens": 1},
    {"type": "close", "id": 10, "prompt": "nobody"},
    {"type": "label", "id": 11, "session": "aaa", "question": "trend", "data_version": 1, "choice": "UP"},
]
GENERATING = {"ask", "open", "complete"}
WEIGHTS = [1 if message["type"] in GENERATING else 6 for message in VALID]
"""Most of them avoid the model, which is slower than the rest."""
PATHS = [
    "/v1/prompts",
    "/v1/complete",
    "/v1/prompts/x/append",
    "/v1/prompts/x/update",
    "/v1/prompts/%ff/append",
]
LONG = "x" * 5000


def mutated(rng: random.Random, valid: dict[str, Any]) -> dict[str, Any]:
    """One member changed, dropped or added, or none."""
    message, key = dict(valid), rng.choice([*valid, "extra"])
    change = rng.randrange(4)
    if change == 0:
        message.pop(key, None)
    elif change < 3:
        message[key] = rng.choice([*ODD, LONG])
    return message


def damaged(rng: random.Random, payload: bytes) -> bytes:
    """Bytes changed, cut off, inserted, or nested deeply."""
    found = bytearray(payload)
    for _ in range(rng.randrange(1, 4)):
        if found:
            found[rng.randrange(len(found))] = rng.randrange(256)
    match rng.randrange(6):
        case 0:
            return bytes(found[: rng.randrange(len(found) + 1)])
        case 1:
            at = rng.randrange(len(found) + 1)
            return bytes(found[:at]) + b"\xa3\xff\xfe\xfd" + bytes(found[at:])
        case 2:
            return rng.randbytes(rng.randrange(200))
        case 3:
            return rng.choice([b"\x91", b"\x81\xa1a", b"[", b'{"a":']) * rng.choice([10, 1000, 30_000])
        case _:
            return bytes(found)


def query(rng: random.Random) -> bytes:
    message = msgspec.msgpack.encode(mutated(rng, rng.choices(VALID, WEIGHTS)[0]))
    return damaged(rng, message) if rng.random() < 0.5 else message


def body(rng: random.Random) -> bytes:
    message = mutated(rng, {"text": "One two", "max_tokens": 1})
    payload = json.dumps(message, default=repr).encode()
    return damaged(rng, payload) if rng.random() < 0.5 else payload


def record(rng: random.Random) -> bytes:
    members = json.loads(trade("V:AAA", START))
    payload = json.dumps(mutated(rng, members), default=repr).encode()
    return damaged(rng, payload) if rng.random() < 0.5 else payload


async def queries(endpoint: str, rng: random.Random) -> Counter[str]:
    """Send them, with fewer than a hundred unanswered at a time; returns the replies by kind."""
    replies: Counter[str] = Counter()
    async with wired(endpoint) as wire:
        for n in range(QUERIES):
            await wire.send(query(rng))
            if n - replies.total() >= 100 or n == QUERIES - 1:
                while replies.total() <= n - (100 if n < QUERIES - 1 else 0):
                    reply = await wire.read()
                    replies[reply.code if isinstance(reply, ErrorReply) else "ok"] += 1
    return replies


def bodies(port: int, rng: random.Random) -> Counter[int]:
    """Statuses of the requests; every refusal names its code."""
    statuses: Counter[int] = Counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for _ in range(BODIES):
        connection.request("POST", rng.choice(PATHS), body(rng), {"content-type": "application/json"})
        response = connection.getresponse()
        found = json.loads(response.read())
        assert response.status < 300 or found["code"] in STATUS, found
        statuses[response.status] += 1
    connection.close()
    return statuses


async def test_every_random_message_is_answered_or_counted_and_the_daemon_keeps_running(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Mutated messages, random bytes, deep nesting, wrong types, invalid UTF-8, huge integers."""
    rng = random.Random(SEED)
    config = inproc_config(
        query=QueryConfig(endpoint="tcp://127.0.0.1:*", max_prompts=10_000, max_prompts_each=10_000),
        scheduler=SchedulerConfig(max_new_tokens=8, max_prompt_tokens=400),
    )
    async with running(config) as daemon:
        for _ in range(RECORDS):
            daemon.put(record(rng))
        replies = await queries(daemon.endpoint, rng)
        statuses = await asyncio.to_thread(bodies, daemon.port, rng)
        assert replies.total() == QUERIES
        assert statuses.total() == BODIES
        assert {"ok", "bad_request", "unknown_prompt"} <= set(replies)
        assert "engine" not in replies
        assert {200, 201, 400} <= set(statuses)
        assert not {500, 503} & set(statuses)
        # every record has one outcome: into the ring, or counted by the reason of its refusal
        await until(lambda: daemon.count("records", source="test") == RECORDS)
        malformed = sum(daemon.count("records_malformed", reason=reason) for reason in REASONS)
        unknown = daemon.count("records_unknown_symbol")
        assert min(malformed, unknown) > 0
        (runner,) = daemon.gateway.input.runners
        assert runner.tracker.next_offset((TOPIC, 0)) == RECORDS
        assert malformed + unknown + daemon.count("records_passed", source="test") == RECORDS
        await until(lambda: daemon.count("dead_letters", stage="read") == malformed)
        assert daemon.gateway.status.not_ready() == []
        assert "Traceback" not in caplog.text
        assert (await daemon.call("complete", "One two", 1)).answer_tokens == 1
        assert await daemon.gateway.stop()
