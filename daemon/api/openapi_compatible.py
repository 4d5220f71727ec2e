"""The endpoints of the OpenAI and Anthropic APIs in the OpenAPI document, made from their structs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from daemon.api import anthropic
from daemon.api.compatible import STATUS, Reason
from daemon.api.openai import common
from daemon.api.serving import MESSAGES, OPENAI

Schema = dict[str, Any]
JSON, _EVENTS = "application/json", "text/event-stream"
_REF = "#/components/schemas/{name}"
_EVENT: Schema = {
    "type": "object",
    "description": "An event of the stream.",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_WHY: dict[Reason, str] = {
    "bad_request": "The request cannot be read, or asks for what is not served.",
    "unauthenticated": "The request has no key, or one that is not known.",
    "forbidden": "The request came from another machine, or from a web page of another origin.",
    "unknown_model": "There is no such model.",
    "too_large": "The body is too long.",
    "unsupported_media_type": "The content type is not JSON.",
    "busy": "Too many requests or prompts; the header retry-after says when to come back.",
    "engine": "The engine failed, or is not up.",
    "shutting_down": "The daemon is stopping, or reads a session's newest data again.",
    "timeout": "There was no token in time.",
}
_OF_A_BODY = ("bad_request", "too_large", "unsupported_media_type", "timeout")
"""What a request without a body does not get."""


class OpenAIError(msgspec.Struct, frozen=True):
    """An error as the OpenAI API writes it."""

    error: common.OpenAIErrorBody


class AnthropicError(msgspec.Struct, frozen=True):
    """An error as the Anthropic API writes it."""

    error: anthropic.AnthropicErrorBody
    type: Literal["error"] = "error"


@dataclass(frozen=True)
class Endpoint:
    """A path of one or both APIs. ``kinds``: of each API, its reply and its error."""

    name: str
    path: str
    summary: str
    kinds: tuple[tuple[type[msgspec.Struct], type[msgspec.Struct]], ...]
    request: type[msgspec.Struct] | None = None
    harmless: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Members of the request that may only have certain values, beside null, and these values."""
    streams: bool = True


_MODELS = (common.Models, OpenAIError), (anthropic.ModelList, AnthropicError)
_MODEL = (common.Model, OpenAIError), (anthropic.ModelInfo, AnthropicError)
_BOTH = "OpenAI and Anthropic"
ENDPOINTS = (
    *(
        Endpoint(api.name, api.path, api.summary, ((api.reply, error),), api.request, api.harmless)
        for apis, error in ((OPENAI, OpenAIError), ((MESSAGES,), AnthropicError))
        for api in apis
    ),
    Endpoint(
        "countTokens", "/v1/messages/count_tokens", "Anthropic: count the tokens of a prompt",
        ((anthropic.Counted, AnthropicError),), anthropic.CountRequest, anthropic.HARMLESS, streams=False,
    ),
    Endpoint("models", "/v1/models", f"{_BOTH}: all models, and each session as one", _MODELS),
    Endpoint("model", "/v1/models/{model}", f"{_BOTH}: one model", _MODEL),
)  # fmt: skip


def described() -> tuple[dict[str, Schema], dict[str, Schema]]:
    """Paths, and the schemas that they refer to."""
    paths: dict[str, Schema] = {}
    components: dict[str, Schema] = {}
    for endpoint in ENDPOINTS:
        replies = [reply for reply, _ in endpoint.kinds]
        errors = [error for _, error in endpoint.kinds]
        types = [*replies, *errors, *([endpoint.request] if endpoint.request else [])]
        # each has its own prefix: the APIs have different types of one name
        template = _REF.format(name=endpoint.name + ".{name}")
        schemas, found = msgspec.json.schema_components(types, ref_template=template)
        if endpoint.request is not None:
            _restrict(found[endpoint.request.__name__]["properties"], endpoint.harmless)
        components |= {f"{endpoint.name}.{name}": schema for name, schema in found.items()}
        paths[endpoint.path] = _operation(endpoint, schemas)
    return paths, components


def _restrict(properties: dict[str, Schema], harmless: Mapping[str, Sequence[Any]]) -> None:
    """Say of members that are not supported which values they may have."""
    for name, values in harmless.items():
        properties[name] = {"enum": [None, *values], "default": None}
    if "messages" in properties:
        properties["messages"]["minItems"] = 1


def response(description: str, schema: Schema, media: str = JSON, *, busy: bool = False) -> Schema:
    """Return a response of the document. ``busy``: it says in a header when to come back."""
    described: Schema = {"description": description, "content": {media: {"schema": schema}}}
    if busy:
        described["headers"] = {"retry-after": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return described


def _operation(endpoint: Endpoint, schemas: Sequence[Schema]) -> Schema:
    apis = len(endpoint.kinds)
    done, error = response("Done.", _any(schemas[:apis])), _any(schemas[apis : 2 * apis])
    refusals = {
        str(STATUS[reason]): response(why, error, busy=reason == "busy")
        for reason, why in _WHY.items()
        if endpoint.request is not None or reason not in _OF_A_BODY
    }
    described: Schema = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "responses": {"200": done, **refusals},
    }
    if endpoint.request is None:
        described["parameters"] = [
            {"name": "anthropic-version", "in": "header", "schema": {"type": "string"},
             "description": "With it the reply has Anthropic's shape."},
            *([{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
              if "{model}" in endpoint.path else []),
        ]  # fmt: skip
        return {"get": described}
    described["description"] = "The members that are read; any others are accepted, without effect."
    described["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[-1]}}}
    if endpoint.streams:
        described["description"] += " With `stream` the reply is a stream of events, as the API has them."
        done["content"][_EVENTS] = {"schema": _EVENT}
    return {"post": described}


def _any(schemas: Sequence[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
