"""The OpenAPI document of the HTTP API, made from the structs that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from importlib.metadata import version
from operator import or_
from typing import Any, get_args

import msgspec

from daemon.api import openapi_compatible
from daemon.api.health import Health, VersionInfo
from daemon.api.http_errors import NO_SUCH_TYPE, STATUS, Problem
from daemon.api.messages import EventKind, Pushed
from daemon.api.operations import EVERY, OPERATIONS, Operation
from daemon.api.pushes import CSV, JSON, LINES, MSGPACK, PushOptions
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
    404: "There is no such session, prompt or answer.",
    409: "It is finished, has its label, or has no calibration.",
    410: "The prompt was given up.",
    413: "The body, the question or the prompt is too long.",
    415: "The content type is not one of those listed, or the body is packed as nothing here reads.",
    421: "Another daemon of the group serves the session.",
    422: "No record of the body is usable.",
    426: "This is a WebSocket.",
    429: "Too many requests, prompts or clients; the header retry-after says when to come back.",
    503: "The engine is not up or failed, or the daemon is stopping.",
    504: "There was no answer in time.",
}


_REFUSED: dict[int, list[str]] = {401: ["unauthenticated"], 403: ["forbidden"], 429: ["busy"]}


def document() -> bytes:
    """The document, JSON."""
    return msgspec.json.encode(described())


def described() -> Schema:
    """The document: every route but those for metrics and the live page."""
    shapes = {name: shape for each in OPERATIONS for name, shape in _shapes(each)}
    types = [*shapes.values(), Problem, Pushed, Health, VersionInfo, list[_records()]]  # type: ignore[misc]  # made here
    found, components = msgspec.json.schema_components(types, ref_template=_REF, schema_hook=_hook)
    schemas: Schema = dict(zip(shapes, found, strict=False))
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas)
    records = found[-1]
    for path, described_ in (
        *_fixed(),
        ("/v1/data", {"post": _data(records)}),
        ("/v1/events", {"get": _events()}),
    ):
        paths.setdefault(path, {}).update(described_)
    compatible, of_compatible = openapi_compatible.described()
    paths |= compatible
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Foretick",
            "version": version("foretick"),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Answers about live market data. Times are ns since 1970, ages ns. Served to "
            "programs of the daemon's own machine, or to holders of a key. Beside our own API there are "
            "those of OpenAI and Anthropic. With `http.mcp`, `/mcp` speaks MCP (streamable HTTP), which "
            "describes itself.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "security": [{}, *({name: []} for name in _KEYS)],
        "components": {"schemas": components | of_compatible, "securitySchemes": _KEYS},
    }


def _shapes(operation: Operation) -> Iterator[tuple[str, type]]:
    """The types of an operation's body and reply, by unique names."""
    if operation.body == "settings":
        field = next(f for f in msgspec.structs.fields(operation.request) if f.name == "settings")
        yield f"{operation.name} body", field.type
    elif operation.body == "members":
        yield f"{operation.name} body", _without(operation.request, operation.in_body, "Body")
    names = [name for name in operation.reply.__struct_fields__ if name != "id"]
    yield f"{operation.name} reply", _without(operation.reply, names, "")


_made: dict[tuple[type, str], type] = {}


def _without(struct: type[msgspec.Struct], names: Sequence[str], suffix: str) -> type:
    """The struct with these members and without its tag."""
    if len(names) == len(struct.__struct_fields__) and struct.__struct_config__.tag is None:
        return struct
    if (struct, suffix) not in _made:
        _made[struct, suffix] = _like(struct, names, struct.__name__ + suffix)
    return _made[struct, suffix]


def _like(struct: type[msgspec.Struct], names: Sequence[str], name: str, tag: str | None = None) -> type:
    fields: list[Any] = []
    for field in msgspec.structs.fields(struct):
        if field.name not in names:
            continue
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.field(default_factory=field.default_factory)
        if type(default) is Fixed:
            default = str(default)
        fields.append((field.name, field.type, *(() if field.required else (default,))))
    strict = struct.__struct_config__.forbid_unknown_fields
    about = {"__doc__": struct.__doc__}
    return msgspec.defstruct(
        name, fields, namespace=about, kw_only=True, forbid_unknown_fields=strict, tag=tag
    )


def _records() -> Any:
    """The records that a source sends, as they are written: a union."""
    written = (
        _like(each, each.__struct_fields__, each.__name__, str(each.__struct_config__.tag))
        for each in get_args(Received)
    )
    return reduce(or_, written)


def _operation(operation: Operation, schemas: Mapping[str, Schema]) -> Schema:
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
            str(operation.status): _response("Done.", schemas[f"{operation.name} reply"]),
            **_errors(statuses),
            **(_errors({NO_SUCH_TYPE: ["bad_request"]}) if body else {}),
        },
    }  # fmt: skip
    if body:
        content = {"application/json": {"schema": schemas[f"{operation.name} body"]}}
        told["requestBody"] = {"required": True, "content": content}
    return told


def _parameters(struct: type[msgspec.Struct], names: Sequence[str], where: str) -> list[Schema]:
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    found = []
    for name in names:
        schema: Schema = msgspec.json.schema(fields[name].type)
        if not fields[name].required and fields[name].default is not None:
            schema = {**schema, "default": fields[name].default}
        if "anyOf" in schema:  # a parameter is given or not, but never null
            schema = next(each for each in schema["anyOf"] if each != {"type": "null"})
        found.append({"name": name, "in": where, "required": where == "path", "schema": schema})
    return found


def _errors(codes: Mapping[int, Sequence[str]]) -> Schema:
    told: Schema = {}
    for status, named in sorted(codes.items()):
        response = _response(f"{_WHY[status]} Codes: {', '.join(dict.fromkeys(named))}.", _ref("Problem"))
        if status == STATUS["busy"]:
            header = {"description": "Seconds.", "schema": {"type": "integer"}}
            response["headers"] = {"retry-after": header}
        told[str(status)] = response
    return told


def _response(description: str, schema: Schema, media: str = "application/json") -> Schema:
    return {"description": description, "content": {media: {"schema": schema}}}


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


def _fixed() -> Iterator[tuple[str, Schema]]:
    """Requests without parameters."""
    forbidden = _errors(_REFUSED)
    for path, name, summary, schema in (
        ("/v1/health", "health", "Whether it is ready, which venues are silent, which tapes late", "Health"),
        ("/v1/version", "version", "Versions, and the model", "VersionInfo"),
    ):
        responses = {"200": _response("Done.", _ref(schema)), **forbidden}
        yield path, {"get": {"operationId": name, "summary": summary, "responses": responses}}
    responses = {"200": _response("Done.", {"type": "object"}), **forbidden}
    about = {"operationId": "describe", "summary": "This document", "responses": responses}
    yield "/openapi.json", {"get": about}
    alive = {"type": "object", "required": ["status"], "properties": {"status": {"const": "alive"}}}
    ready = {"type": "object", "required": ["status", "reasons"],
             "properties": {"status": {"enum": ["ready", "standby", "waiting"]},
                            "reasons": {"type": "array", "items": {"type": "string"}}}}  # fmt: skip
    yield "/healthz", {"get": {"operationId": "alive", "summary": "The event loop runs",
                               "responses": {"200": _response("It does.", alive)}}}  # fmt: skip
    yield "/readyz", {"get": {"operationId": "ready", "summary": "Whether the daemon is ready",
                              "responses": {"200": _response("It is.", ready),
                                            "503": _response("It waits.", ready)}}}  # fmt: skip
    yield "/v1/ws", {"get": {
        "operationId": "converse",
        "summary": "A WebSocket: requests of the query socket as JSON, and subscriptions",
        "responses": {"101": {"description": "The connection is a WebSocket from now on."},
                      **_errors({**_REFUSED, 426: ["bad_request"]})},
    }}  # fmt: skip


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
            "202": _response("Accepted, all or some: see the counts.", _ref("Pushed")),
            "422": _response(_WHY[422], _ref("Pushed")),
            **_errors({400: ["bad_request"], **_REFUSED,
                       413: ["too_long"], NO_SUCH_TYPE: ["bad_request"], 429: ["busy"], 503: ["engine"]}),
        },
    }  # fmt: skip


def _events() -> Schema:
    def several(name: str, what: str, schema: Schema) -> Schema:
        return {"name": name, "in": "query", "description": f"{what}; any number of times.",
                "schema": {"type": "array", "items": schema}}  # fmt: skip

    named: Schema = {"type": "string"}
    return {
        "operationId": "events",
        "summary": "Server-sent events: answers, flash_ready, data_updated",
        "parameters": [
            several("session", "Only of this session", named),
            several("question", "Answers of this question only", named),
            several("event", "Only this kind", {"type": "string", "enum": list(get_args(EventKind))}),
            {"name": "after", "in": "query", "schema": named,
             "description": "Begin after the event of this id, EPOCH.NUMBER; after another text, now."},
            {"name": "last-event-id", "in": "header", "description": "As `after`, and before it.",
             "schema": named},
        ],
        "responses": {
            "200": _response("The stream; it does not end by itself.", named, "text/event-stream"),
            **_errors({400: ["bad_request"], **_REFUSED, 429: ["busy"], 503: ["shutting_down"]}),
        },
    }  # fmt: skip


def _hook(kind: type) -> Schema:
    if kind is Fixed:
        decimal = {"type": "string", "pattern": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"}
        return {"anyOf": [decimal, {"type": "number", "description": "Read exactly, as it is written."}]}
    raise NotImplementedError
