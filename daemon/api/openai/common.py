"""What the endpoints of the OpenAI API share: the members of requests, errors, usage, log probabilities."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from daemon.api.compatible import ApiError, Extension, Object, Reason, ReplyIdentity, sse
from daemon.api.generation import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    Finish,
    Finished,
    ModelCatalog,
    SamplingDefaults,
    Turn,
)
from daemon.api.messages import Count, ReplyMetadata
from daemon.api.systemone import ModelCard, cards

MAX_ANSWERS = 16
"""Most answers to one request."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("text", "input_text", "output_text", "refusal")
RoleName = Annotated[str, Meta(extra_json_schema={"enum": [*_ROLES]})]
_Part = Annotated[Object, Meta(extra_json_schema={"required": ["type", "text"], "properties": {
    "type": {"enum": [*_TEXTS[:-1]]}, "text": {"type": "string"}}})]  # fmt: skip
Content = str | Annotated[list[_Part], Meta(max_length=MAX_MESSAGES)] | None
PING, _DONE = b": ping\n\n", b"data: [DONE]\n\n"
_TYPES: dict[Reason, str] = {
    "busy": "rate_limit_error",
    "engine": "server_error",
    "rebuilding": "server_error",
    "shutting_down": "server_error",
    "timeout": "server_error",
    "forbidden": "permission_error",
}
_CODES: dict[Reason, str] = {
    "unauthenticated": "invalid_api_key",
    "unknown_model": "model_not_found",
    "unknown_url": "unknown_url",
    "wrong_method": "method_not_supported",
    "too_long": "context_length_exceeded",
    "busy": "rate_limit_exceeded",
    "engine": "server_error",
    "rebuilding": "rebuilding",
    "halted": "halted",
    "no_data": "no_data",
    "shutting_down": "server_error",
    "timeout": "timeout",
}


class StreamOptions(msgspec.Struct, frozen=True):
    """``include_usage``: a last chunk tells the usage."""

    include_usage: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What every request of this API may say; members that are not read are tolerated, as the API does.

    ``top_k``, which other servers add to this API: 0 and -1 are any token.
    """

    model: str
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    stream: bool | None = None
    foretick: Extension | None = None


class ChunkedRequest(GenerationRequest, frozen=True, kw_only=True):
    """A request for ``n`` answers, whose stream is of chunks of any of them."""

    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_ANSWERS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Any = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None


class OpenAIErrorBody(msgspec.Struct, frozen=True):
    """An error in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct, frozen=True):
    """An error as the OpenAI API writes it."""

    error: OpenAIErrorBody


class PromptDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int
    text_tokens: int
    audio_tokens: int = 0
    image_tokens: int = 0
    cache_write_tokens: int = 0


class AnswerDetails(msgspec.Struct, frozen=True):
    """Of the answer's tokens."""

    text_tokens: int
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens of all answers together; a prompt that is answered several times counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: AnswerDetails


class Model(msgspec.Struct, frozen=True):
    """A model: the daemon's own, or a session."""

    id: str
    created: int
    object: str = "model"
    owned_by: str = "foretick"
    shutdown_date: None = None


class Models(msgspec.Struct, frozen=True):
    """All models; ``models`` are the same for clients of System One."""

    data: tuple[Model, ...]
    models: tuple[ModelCard, ...]
    object: str = "list"


def models(served: ModelCatalog) -> Models:
    """The reply to `GET /v1/models`."""
    return Models(tuple(Model(name, served.since) for name in served.names), cards(served))


def error_body(problem: ApiError) -> OpenAIError:
    """See `daemon.api.compatible.ErrorBody`."""
    kind = _TYPES.get(problem.reason, "invalid_request_error")
    return OpenAIError(OpenAIErrorBody(problem.message, kind, problem.param, _CODES.get(problem.reason)))


def turn_of(role: str, content: Content, here: str) -> Turn:
    """A message of text. Raises ApiError for another role or content."""
    if role not in _ROLES:
        raise ApiError("bad_request", f"{here}.role: {role!r} is not supported", f"{here}.role")
    return Turn(_ROLES[role], text_of(content, f"{here}.content"))  # type: ignore[arg-type]  # a Role


def text_of(content: str | list[Object] | None, here: str, kinds: Sequence[str] = _TEXTS) -> str:
    """The text of a message's content. Raises ApiError for parts that are not of these ``kinds`` of text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for n, part in enumerate(content):
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in kinds or not isinstance(text, str):
            where = f"{here}[{n}]"
            raise ApiError("bad_request", f"{where}: only text is supported, not {kind!r}", where)
        texts.append(text)
    return "".join(texts)


def schema_of(form: Object | None, param: str) -> Object | None:
    """The JSON schema that a response format asks for. Raises ApiError for another format."""
    match form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
    kind = form.get("type")
    why = f"{param}: {kind!r} is not supported; text and json_schema with a schema are"
    raise ApiError("bad_request", why, param)


class Sampled(Protocol):
    """A request that may say how its answer is sampled."""

    @property
    def temperature(self) -> float | None:
        """None: it does not say."""

    @property
    def top_p(self) -> float | None:
        """See `temperature`."""

    @property
    def top_k(self) -> int | None:
        """See `temperature`."""


def sampling(asked: Sampled, session: str, defaults: SamplingDefaults) -> dict[str, Any]:
    """Temperature, top_p and top_k of a `Generate`: the request's, or the model's ``defaults``.

    A session's answer is its likeliest, unless the request has a temperature.
    """
    default = 0.0 if session else defaults.temperature
    given = default if asked.temperature is None else asked.temperature
    if asked.top_p == 0 or not given:
        return {"temperature": 0.0}
    top_p = defaults.top_p if asked.top_p is None else asked.top_p
    top_k = defaults.top_k if asked.top_k is None else max(0, asked.top_k)
    return {"temperature": given, "top_p": top_p, "top_k": top_k}


def top_logprobs(logprobs: bool, most: int | None, param: str = "top_logprobs") -> int | None:
    """How many of the likeliest tokens to give. Raises ApiError for a number without ``logprobs``.

    ``param``: the member that says how many.
    """
    if most and not logprobs:
        raise ApiError("bad_request", "top_logprobs needs logprobs: true", "top_logprobs")
    if most is not None and not 0 <= most <= MAX_LOGPROBS:
        raise ApiError("bad_request", f"{param} must be 0 to {MAX_LOGPROBS}", param)
    return (most or 0) if logprobs else None


def penalty_of(asked: ChunkedRequest, session: str) -> str:
    """The name of a penalty, which changes nothing in an answer of one token; the engine refuses others.

    "" where there is none. Raises ApiError where no session is asked.
    """
    given = [name for name in ("presence_penalty", "frequency_penalty") if getattr(asked, name)]
    if given and not session:
        raise ApiError("bad_request", f"{given[0]} is not supported", given[0])
    return given[0] if given else ""


def finish_reason(finish: Finish) -> str:
    """Why an answer ended, in OpenAI's words."""
    return "length" if finish == "length" else "stop"


def usage_of(done: Sequence[Finished], answers: int) -> Usage:
    """``answers``: to each prompt; the first of them has the prompt's own numbers."""
    prompts = done[::answers]
    prompt, answer = sum(each.prompt_tokens for each in prompts), sum(each.answer_tokens for each in done)
    reused = sum(each.reused_tokens for each in prompts)
    return Usage(prompt, answer, prompt + answer, PromptDetails(reused, prompt), AnswerDetails(answer))


class ChunkWriter:
    """Chunks of ``n`` answers, the usage if asked for, `[DONE]`."""

    def __init__(self, asked: ChunkedRequest, made: ReplyIdentity, answers: int) -> None:
        """``answers``: to each prompt; 0: as many as there are."""
        self._options, self._made, self._answers = asked.stream_options, made, answers
        self._done: dict[int, Finished] = {}

    def end(self) -> Iterator[bytes]:
        """See `Writer`."""
        if self._options is not None and self._options.include_usage:
            done = [self._done[index] for index in sorted(self._done)]
            yield self._chunk(usage=usage_of(done, self._answers or len(done)))
        yield _DONE

    def failed(self, problem: ApiError) -> Iterator[bytes]:
        """See `Writer`."""
        yield sse(error_body(problem))
        yield _DONE

    def ping(self) -> bytes:
        """See `Writer`."""
        return PING

    def _chunk(
        self, *choices: Any, usage: Usage | None = None, foretick: ReplyMetadata | None = None
    ) -> bytes:
        raise NotImplementedError
