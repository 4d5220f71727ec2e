"""Replies and events have every member that the official SDKs know of, null where nothing is to be said.

A client that reads a member which a server leaves out breaks; the SDKs' own types say which there are.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic.types
import msgspec
import openai.types
import openai.types.chat
import openai.types.responses
import pydantic
import pytest

from daemon.api import anthropic as claude
from daemon.api.compatible import Api, ReplyIdentity, encode
from daemon.api.generation import Begun, Delta, Finished
from daemon.api.openai import chat, common, completions, responses
from tests.daemon.api.generator import LOGPROB, POOL, SERVED

USER = [{"role": "user", "content": "hello"}]
DONE = Finished(
    id=0, text="Up", finish="length", stop=None, prompt_tokens=3, reused_tokens=1, answer_tokens=1,
    metadata=POOL, logprobs=(LOGPROB,),
)  # fmt: skip
MADE = ReplyIdentity("key", 1_700_000_000, "tape", "fp_0")
PING = b'data: {"type":"ping"}'
_DELTA = "a delta has what changes, as that of the API"
_NEVER = "the API sends it only where there is such a thing"
_OPEN_RESPONSES = "the Open Responses specification demands it"
_AS_WHOLE = "log probabilities have one shape, in events as in the whole text"
ABSENT: dict[str, str] = {
    **{f"ChoiceDelta.{name}": _DELTA for name in
       ("audio", "content", "function_call", "refusal", "role", "tool_calls")},
    "ChatCompletionChunk.obfuscation": "chunks are not padded",
    "Response.access_programs": _NEVER,
    "Response.image": _NEVER,
    "Response.input_transformations": _NEVER,
    "Response.tool_usage": "left out where there is none, as the API's description has it",
    "Reasoning.context": "nothing is reasoned, so no mode is in effect",
    "Reasoning.mode": "nothing is reasoned, so no mode is in effect",
    "Reasoning.generate_summary": "replaced by `summary`",
    "Response.frequency_penalty is not known": _OPEN_RESPONSES,
    "Response.presence_penalty is not known": _OPEN_RESPONSES,
    "Response.store is not known": _OPEN_RESPONSES,
    "Logprob.bytes is not known": _AS_WHOLE,
    "LogprobTopLogprob.bytes is not known": _AS_WHOLE,
}  # fmt: skip
"""Members that are left out, or that the SDK's type lacks, and why."""


class Piece(openai.types.CompletionChoice):
    """The SDK's type always has a reason; the API sends null until the end."""

    finish_reason: Any


class Pieces(openai.types.Completion):
    choices: list[Piece]  # type: ignore[assignment]  # a list is invariant


def missing(model: Any, raw: Any) -> Iterator[str]:
    """Members of the SDK's types that ``raw`` has not, as "Type.member"; and what the types do not know."""
    if isinstance(model, list):
        for each, found in zip(model, raw, strict=True):
            yield from missing(each, found)
    if not isinstance(model, pydantic.BaseModel):
        return
    kind = type(model)
    names = {name: field.alias or name for name, field in kind.model_fields.items()}
    for name, alias in names.items():
        if alias in raw:
            yield from missing(getattr(model, name), raw[alias])
        else:
            yield f"{kind.__name__}.{alias}"
    for name in raw.keys() - set(names.values()) - {"foretick"}:
        yield f"{kind.__name__}.{name} is not known"


def checked(kind: Any, raw: bytes) -> set[str]:
    """What is missing. Fails for a reply that is not of ``kind``."""
    found = json.loads(raw)
    return set(missing(pydantic.TypeAdapter(kind).validate_python(found, strict=False), found))


def events(stream: bytes) -> Iterator[bytes]:
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {") and line != PING:
            yield line[6:]


WITH_USAGE = {"stream_options": {"include_usage": True}}
WAYS: dict[str, tuple[Any, ...]] = {
    "chat": (
        chat.Chat(),
        chat.ChatRequest,
        {"messages": USER, "logprobs": True, "top_logprobs": 2, **WITH_USAGE},
        openai.types.chat.ChatCompletion,
        openai.types.chat.ChatCompletionChunk,
    ),
    "completions": (
        completions.Completions(),
        completions.CompletionRequest,
        {"prompt": "hello", "logprobs": 2, **WITH_USAGE},
        openai.types.Completion,
        Pieces,
    ),
    "responses": (
        responses.Responses(),
        responses.ResponseRequest,
        {"input": "hello", "top_logprobs": 2},
        openai.types.responses.Response,
        openai.types.responses.ResponseStreamEvent,
    ),
    "messages": (
        claude.Messages(),
        claude.MessageRequest,
        {"messages": USER, "max_tokens": 5},
        anthropic.types.Message,
        anthropic.types.RawMessageStreamEvent,
    ),
}


def absences(api: Api[Any], kind: Any, members: Any, reply: Any, event: Any) -> set[str]:
    """Of the whole reply, and of each event of its stream."""
    asked = msgspec.json.decode(encode({"model": "tape", **members}), type=kind)
    absent = checked(reply, encode(api.build_response(asked, MADE, [DONE])))
    writer = api.writer(asked, MADE)
    for pieces in (
        writer.write(0, Begun(0, 3, 1)),
        writer.write(0, Delta(0, "Up", (LOGPROB,))),
        writer.write(0, DONE),
        writer.end(),
    ):
        for data in events(b"".join(pieces)):
            absent |= checked(event, data)
    return absent


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_replies_and_events_leave_nothing_out(way: tuple[Any, ...]) -> None:
    assert sorted(absences(*way) - set(ABSENT)) == []


def test_what_is_listed_as_absent_is_absent() -> None:
    assert set().union(*(absences(*way) for way in WAYS.values())) == set(ABSENT)


@pytest.mark.parametrize(
    ("listed", "kind"),
    [(common.models(SERVED), openai.types.Model), (claude.models(SERVED), anthropic.types.ModelInfo)],
)
def test_models_leave_nothing_out(listed: Any, kind: Any) -> None:
    for each in listed.data:
        assert checked(kind, encode(each)) == set()
