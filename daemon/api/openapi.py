"""The OpenAPI document of the HTTP API, made from the structs that it reads and writes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from importlib.metadata import version
from operator import or_
from typing import Any, get_args

import msgspec

from daemon.api import anthropic, systemone
from daemon.api.health import Health, VersionInfo
from daemon.api.http_errors import NO_SUCH_TYPE, STATUS, TOO_MANY, Problem
from daemon.api.messages import Pushed
from daemon.api.openai import common
from daemon.api.operations import EVERY, OPERATIONS, Operation
from daemon.api.pushes import CSV, JSON, LINES, MSGPACK, PushOptions
from daemon.api.serving import MESSAGES, OPENAI
from daemon.api.sse import EventsQuery
from feeds.decimals import Fixed
from feeds.market_data import Received

Schema = dict[str, Any]
_KEYS: Schema = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key, where the daemon has tenants."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same."},
}
_REF = "#/components/schemas/{name}"
_WHY: dict[int, str] = {
    400: "The request cannot be read, or asks for something impossible.",
    401: "The request has no key, or one that is not known; see the header www-authenticate.",
    403: "The request came from another machine, or from a web page of another origin, "
    "or only operators may do this.",
    404: "There is no such session, model, prompt or answer.",
    409: "It is finished, has its label, or has no calibration.",
    410: "The prompt was given up.",
    413: "The body, the question or the prompt is too long.",
    415: "The content type is not one of those listed, or the body is packed as nothing here reads.",
    421: "Another daemon of the group serves the session.",
    422: "No record of the body is usable, or a question cannot be asked.",
    426: "This is a WebSocket.",
    429: "Too many requests, prompts or clients; the header retry-after says when to come back.",
    500: "The engine failed, or is not up.",
    503: "The engine is not up or failed, or the daemon is stopping.",
    504: "There was no answer in time.",
}


_EVENT: Schema = {
    "type": "object",
    "description": "An event of the stream.",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_BODILESS = (401, 403, 404, 429, 500, 503)
"""Errors of the compatible APIs where a request has no body."""
_UNSAID = {"id", "type"}
_REFUSED: dict[int, list[str]] = {401: ["unauthenticated"], 403: ["forbidden"], 429: ["busy"]}


@cache
def document() -> bytes:
    """The document, JSON."""
    return msgspec.json.encode(described())


def described() -> Schema:
    """Return the document: every route but those for metrics and the live page."""
    full = [kind for each in OPERATIONS for kind in (each.request, each.reply)]
    types = [*full, Problem, Pushed, Health, VersionInfo, list[_records()]]  # type: ignore[misc]  # made here
    found, components = msgspec.json.schema_components(types, ref_template=_REF, schema_hook=_hook)
    _keep_what_http_says(components)
    _say_items(components)
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, components)
    paths |= dict(_fixed()) | {"/v1/data": {"post": _data(found[-1])}, "/v1/events": {"get": _events()}}
    compatible, of_compatible = _compatible()
    _say_items(of_compatible)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Foretick HTTP API",  # not as the package, of which generated clients take their name
            "version": version("foretick"),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Answers about live market data. Times are ns since 1970, ages ns. Served to "
            "programs of the daemon's own machine, or to holders of a key. Beside our own API there are "
            "those of OpenAI and Anthropic. With `http.mcp`, `/mcp` speaks MCP (streamable HTTP), which "
            "describes itself.",
        },
        "servers": [{"url": "/"}],
        "paths": paths | compatible,
        "security": [{}, *({name: []} for name in _KEYS)],
        "components": {"schemas": components | of_compatible, "securitySchemes": _KEYS},
    }


def _keep_what_http_says(components: dict[str, Schema]) -> None:
    """Take tags, ids and what stands in paths and queries from the schemas of bodies and replies."""
    for reply in {each.reply.__name__ for each in OPERATIONS}:
        components[reply] = _trimmed(components[reply], set(components[reply]["properties"]) - _UNSAID, reply)
    requests = {name: components.pop(name) for name in {each.request.__name__ for each in OPERATIONS}}
    for each in OPERATIONS:
        schema = requests[each.request.__name__]
        if each.body == "settings":
            components[each.name] = schema["properties"]["settings"]  # which `_operation` takes
        elif each.body == "members":
            name = f"{each.request.__name__}Body"
            components[name] = _trimmed(schema, each.in_body, name)


def _say_items(schema: object) -> None:
    """Give every array a schema of its items: generators of clients know neither none nor ``prefixItems``."""
    if isinstance(schema, dict):
        if schema.get("type") == "array":
            kinds = schema.pop("prefixItems", [])
            if kinds:
                schema["items"] = kinds[0] if kinds.count(kinds[0]) == len(kinds) else {"anyOf": kinds}
            schema.setdefault("items", {})
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            _say_items(each)


def _trimmed(schema: Schema, names: Collection[str], title: str) -> Schema:
    """Return the schema of a struct with these members only."""
    properties = {name: each for name, each in schema["properties"].items() if name in names}
    required = [name for name in schema["required"] if name in names]
    return {**schema, "title": title, "properties": properties, "required": required}


def _records() -> Any:
    """The records that a source sends, as they are written: a union, with decimal defaults as text."""
    return reduce(or_, map(_written, get_args(Received)))


def _written(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    fields: list[Any] = []
    for each in msgspec.structs.fields(struct):
        default = str(each.default) if type(each.default) is Fixed else each.default
        fields.append((each.name, each.type, *(() if each.required else (default,))))
    config = struct.__struct_config__
    about = {"__doc__": struct.__doc__}
    strict, tag = config.forbid_unknown_fields, str(config.tag)
    return msgspec.defstruct(
        struct.__name__, fields, namespace=about, kw_only=True, forbid_unknown_fields=strict, tag=tag
    )


def _operation(operation: Operation, components: dict[str, Schema]) -> Schema:
    codes = (*EVERY, *operation.codes)
    body = operation.body != "none"
    if body and "too_long" not in codes:
        codes = (*codes, "too_long")
    statuses: dict[int, list[str]] = {}
    for code in codes:
        statuses.setdefault(STATUS[code], []).append(code)
    told: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": " ".join((operation.request.__doc__ or "").split()),
        "parameters": [*_parameters(operation.request, operation.in_path, "path"),
                       *_parameters(operation.request, operation.query, "query")],
        "responses": {
            str(operation.status): response("Done.", _ref(operation.reply.__name__)),
            **_errors(statuses),
            **(_errors({NO_SUCH_TYPE: ["bad_request"]}) if body else {}),
        },
    }  # fmt: skip
    if body:
        settings = operation.body == "settings"
        schema = components.pop(operation.name) if settings else _ref(f"{operation.request.__name__}Body")
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return told


def _parameters(struct: type[msgspec.Struct], names: Sequence[str], where: str) -> list[Schema]:
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    found = []
    for name in names:
        schema: Schema = msgspec.json.schema(fields[name].type)
        if not (fields[name].required or fields[name].default in (None, msgspec.NODEFAULT)):
            schema = {**schema, "default": fields[name].default}
        if "anyOf" in schema:  # a parameter is given or not, but never null
            schema = next(each for each in schema["anyOf"] if each != {"type": "null"})
        found.append({"name": name, "in": where, "required": where == "path", "schema": schema})
    return found


def _errors(codes: Mapping[int, Sequence[str]]) -> Schema:
    return {
        str(status): response(
            f"{_WHY[status]} Codes: {', '.join(dict.fromkeys(named))}.",
            _ref("Problem"),
            busy=status == STATUS["busy"],
        )
        for status, named in sorted(codes.items())
    }


def response(description: str, schema: Schema, media: str = JSON, *, busy: bool = False) -> Schema:
    """Return a response of the document. ``busy``: it says in a header when to come back."""
    described: Schema = {"description": description, "content": {media: {"schema": schema}}}
    if busy:
        described["headers"] = {"retry-after": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return described


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


def _fixed() -> Iterator[tuple[str, Schema]]:
    """Requests without parameters."""
    refusals = _errors(_REFUSED)
    text: Schema = {"type": "string"}
    alive, stuck = (
        {"type": "object", "required": ["status"], "properties": {"status": {"const": status}}}
        for status in ("alive", "stuck")
    )
    states = {
        "status": {"enum": ["ready", "standby", "waiting"]},
        "reasons": {"type": "array", "items": text},
    }
    ready = {"type": "object", "required": ["status", "reasons"], "properties": states}
    for path, name, summary, responses in (
        ("/v1/health", "health", "Whether it is ready, which venues are silent, which tapes late",
         {"200": response("Done.", _ref("Health")), **refusals}),
        ("/v1/version", "version", "Versions, and the model",
         {"200": response("Done.", _ref("VersionInfo")), **refusals}),
        ("/openapi.json", "describe", "This document",
         {"200": response("Done.", {"type": "object"}), **refusals}),
        ("/healthz", "alive", "The event loop runs, and the engine goes on",
         {"200": response("They do.", alive), "503": response("Only a restart helps.", stuck)}),
        ("/readyz", "ready", "Whether the daemon is ready",
         {"200": response("It is.", ready), "503": response("It waits.", ready)}),
        ("/v1/ws", "converse", "A WebSocket: requests of the query socket as JSON, and subscriptions",
         {"101": {"description": "The connection is a WebSocket from now on."},
          **_errors({**_REFUSED, 426: ["bad_request"]})}),
    ):  # fmt: skip
        yield path, {"get": {"operationId": name, "summary": summary, "responses": responses}}


def _data(records: Schema) -> Schema:
    """A record, or several: the schema is that of the records' array."""
    one = records["items"]
    text: Schema = {"schema": {"type": "string"}}
    return {
        "operationId": "pushData",
        "summary": "Push records into the source `[source.http]`",
        "description": "One record, an array (JSON, msgpack) or one a line, in our own form or in a declared "
        "format. Usable records are accepted; the others are listed, and go to the DLQ.",
        "parameters": _parameters(PushOptions, PushOptions.__struct_fields__, "query"),
        "requestBody": {"required": True, "content": {
            JSON: {"schema": {"anyOf": [one, records]}}, LINES: text, CSV: text,
            MSGPACK: {"schema": {"type": "string", "format": "binary"}},
        }},
        "responses": {
            "202": response("Accepted, all or some: see the counts.", _ref("Pushed")),
            "422": response(_WHY[422], _ref("Pushed")),
            **_errors({400: ["bad_request"], **_REFUSED,
                       413: ["too_long"], NO_SUCH_TYPE: ["bad_request"], 429: ["busy"], 503: ["engine"]}),
        },
    }  # fmt: skip


def _events() -> Schema:
    text: Schema = {"type": "string"}
    last = {"name": "last-event-id", "in": "header", "schema": text,
            "description": "As `after`, and before it."}  # fmt: skip
    return {
        "operationId": "events",
        "summary": "Server-sent events: answers, signals, flash_ready, data_updated",
        "parameters": [*_parameters(EventsQuery, EventsQuery.__struct_fields__, "query"), last],
        "responses": {
            "200": response("The stream; it does not end by itself.", text, "text/event-stream"),
            **_errors({400: ["bad_request"], **_REFUSED, 429: ["busy"], 503: ["shutting_down"]}),
        },
    }


def _hook(kind: type) -> Schema:
    if kind is Fixed:
        decimal = {"type": "string", "pattern": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"}
        return {"anyOf": [decimal, {"type": "number", "description": "Read exactly, as it is written."}]}
    raise NotImplementedError


# The OpenAI and Anthropic APIs.


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
    invalid: int = 400
    """Status of a request that cannot be read."""


_MODELS = (common.Models, common.OpenAIError), (anthropic.ModelList, anthropic.AnthropicError)
_MODEL = (common.Model, common.OpenAIError), (anthropic.ModelInfo, anthropic.AnthropicError)
_BOTH = "OpenAI and Anthropic"
ENDPOINTS = (
    *(
        Endpoint(
            api.name, api.path, api.summary, ((api.reply, error),), api.request, api.harmless,
            streams="stream" in api.request.__struct_fields__,
        )
        for apis, error in ((OPENAI, common.OpenAIError), ((MESSAGES,), anthropic.AnthropicError))
        for api in apis
    ),
    Endpoint(
        "countTokens", "/v1/messages/count_tokens", "Anthropic: count the tokens of a prompt",
        ((anthropic.Counted, anthropic.AnthropicError),), anthropic.CountRequest, anthropic.HARMLESS,
        streams=False,
    ),
    Endpoint(
        "systemOne", systemone.PATH, "System One: probabilities of answers about text, JSON or a session",
        ((systemone.DecisionResponse, systemone.DecisionError),), systemone.DecisionRequest,
        streams=False, invalid=422,
    ),
    Endpoint("models", "/v1/models", f"{_BOTH}: all models, and each session as one", _MODELS),
    Endpoint("model", "/v1/models/{model}", f"{_BOTH}: one model", _MODEL),
)  # fmt: skip


def _compatible() -> tuple[dict[str, Schema], dict[str, Schema]]:
    """Paths, and the schemas that they refer to."""
    paths: dict[str, Schema] = {}
    components: dict[str, Schema] = {}
    for endpoint in ENDPOINTS:
        replies = [reply for reply, _ in endpoint.kinds]
        errors = [error for _, error in endpoint.kinds]
        types = [*replies, *errors, *([endpoint.request] if endpoint.request else [])]
        # each has its own prefix: the APIs have different types of one name
        prefix = endpoint.name[:1].upper() + endpoint.name[1:]
        template = _REF.format(name=prefix + "{name}")
        schemas, found = msgspec.json.schema_components(types, ref_template=template)
        if endpoint.request is not None:
            _restrict(found[endpoint.request.__name__]["properties"], endpoint.harmless)
        for name, schema in found.items():
            components[prefix + name] = {**schema, "title": prefix + name}
        paths[endpoint.path] = _endpoint(endpoint, schemas)
    return paths, components


def _restrict(properties: dict[str, Schema], harmless: Mapping[str, Sequence[Any]]) -> None:
    """Say of members that are not supported which values they may have."""
    for name, values in harmless.items():
        properties[name] = {"anyOf": [{"type": "null"}, *map(_just, values)], "default": None}
    if "messages" in properties:
        properties["messages"]["minItems"] = 1


def _just(value: Any) -> Schema:
    """The schema of this value and no other."""
    if isinstance(value, Mapping):
        members = {name: _just(each) for name, each in value.items()}
        return {
            "type": "object",
            "properties": members,
            "required": list(members),
            "maxProperties": len(value),
        }
    if isinstance(value, list):  # of one kind of item
        of = _just(value[0]) if value else {}
        return {"type": "array", "items": of, "minItems": len(value), "maxItems": len(value)}
    return {"const": value}


def _endpoint(endpoint: Endpoint, schemas: Sequence[Schema]) -> Schema:
    apis = len(endpoint.kinds)
    done, error = response("Done.", _any(schemas[:apis])), _any(schemas[apis : 2 * apis])
    statuses = (
        _BODILESS if endpoint.request is None else (*_BODILESS, endpoint.invalid, 413, NO_SUCH_TYPE, 504)
    )
    refusals = {str(each): response(_WHY[each], error, busy=each == TOO_MANY) for each in sorted(statuses)}
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
        done["content"]["text/event-stream"] = {"schema": _EVENT}
    return {"post": described}


def _any(schemas: Sequence[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
