"""What any API asks the daemon to generate, and what comes back: the structs between API, gateway and engine.

Every endpoint translates its own request into `Generate`s and its own reply from these events.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from daemon.ages import Times
from daemon.api.messages import ORDINARY, RETENTION_S, Code, Region, ReplyMetadata
from daemon.tenants import Client
from daemon.traces.recorded_trace import Passes
from flash.question import Question

Role = Literal["system", "user", "assistant"]
Finish = Literal["stop", "stop_sequence", "length"]
"""Why an answer ended: by itself, at a stop sequence, or at its longest."""
SESSION = "session:"
"""How the model of a session is named: this and the session's name."""
MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
"""Stop sequences of a request, and characters of each."""
MAX_MESSAGES = 1024
"""Messages of a chat, and parts of each."""


class Turn(msgspec.Struct, frozen=True):
    """A message of a chat."""

    role: Role
    text: str


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """Generate one answer: after ``turns`` of a chat, a ``text``, or ``tokens``; give one of these.

    Without a session, ``model`` answers, by its name in answers; "": the first that reads words.
    With a ``session`` the last turn asks its newest data version, after the earlier ones. ``max_tokens`` is
    an upper bound; None: as many as allowed. With a ``seed`` equal requests give equal answers. ``index``:
    number of the answer, of several to one prompt. The text is one of ``choices``, or JSON of ``schema``.
    ``question``: the standing question that the last turn means, whose text and choices the request has then.
    ``penalty``: the name of one; only a choice may have it, being one token. ``stream``: send the text as it
    comes. ``exact``: of an ask or a prompt of our own API, whose lengths are refused, not lowered, where they
    are above a limit, whose choice is one token, and whose text comes in one piece. ``complete``: the
    whole ``text`` is here. ``salt``: prefixes are shared under equal salts only. ``retention_priority``,
    ``retention_seconds``: of prompt and answer in the prefix cache. ``tenant``, ``weight``: who shares a
    class with others. ``scored``: the answer is the likeliest of ``choices``, and has the log probability of
    each as a whole; a session's standing question is then meant by ``meant``, its name or text, not by the
    last turn. The gateway sets ``id``, ``question``, ``tenant``, ``weight``, ``trace_id``.
    """

    id: int = 0
    session: str = ""
    model: str = ""
    turns: tuple[Turn, ...] = ()
    text: str = ""
    tokens: tuple[int, ...] = ()
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    index: int = 0
    stop: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    schema: dict[str, Any] | None = None
    scored: bool = False
    meant: str = ""
    question: Question | None = None
    penalty: str = ""
    top_logprobs: int | None = None
    stream: bool = False
    exact: bool = False
    complete: bool = True
    salt: str = ""
    retention_priority: int = ORDINARY
    retention_seconds: float = RETENTION_S
    tenant: str = ""
    weight: float = 1.0
    trace_id: str = ""


class GenerateAll(msgspec.Struct, frozen=True, tag="generate_all"):
    """The answers to one request, planned together: what their prompts share is computed once."""

    requests: tuple[Generate, ...]


class ExtendPrompt(msgspec.Struct, frozen=True, tag="extend_prompt"):
    """Append ``text`` to a prompt that is not complete, or ``replace`` its text.

    Answered, as its opening was, by `TokensCounted`, or by the `Failed` that ends it.
    """

    id: int
    text: str
    replace: bool = False


class FinishPrompt(msgspec.Struct, frozen=True, tag="finish_prompt"):
    """The prompt is complete: generate."""

    id: int


class CancelGeneration(msgspec.Struct, frozen=True, tag="cancel_generation"):
    """Give a generation up, which then ends with `Failed`."""

    id: int


class CountTokens(msgspec.Struct, frozen=True, tag="count_tokens"):
    """How long would the prompt of ``request`` be?"""

    id: int
    request: Generate


class ViewPrompt(msgspec.Struct, frozen=True, tag="view_prompt"):
    """What does the model read of ``session``? And before the answer to ``asked``, a question about it?"""

    id: int
    session: str
    asked: Generate | None = None


class PromptViewed(msgspec.Struct, frozen=True, tag="prompt_viewed"):
    """The reply to `ViewPrompt`: see `daemon.api.messages.PromptShown`."""

    id: int
    data_version: int
    frozen: Region
    sliding: Region
    question: Region | None = None


class TopLogprob(msgspec.Struct, frozen=True):
    """A token as text and as bytes, and its log probability."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class Logprob(msgspec.Struct, frozen=True):
    """A generated token's log probability, and the likeliest tokens in its place."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]


class Begun(msgspec.Struct, frozen=True, tag="generation_begun"):
    """The prompt is computed; ``reused_tokens`` of it were there before."""

    id: int
    prompt_tokens: int
    reused_tokens: int


class Delta(msgspec.Struct, frozen=True, tag="generation_delta"):
    """More text of a stream, whole characters, and the ``tokens`` since the last event.

    Where there is nothing to show it comes once in a while without text, as a sign of life.
    """

    id: int
    text: str
    logprobs: tuple[Logprob, ...] = ()
    tokens: int = 0


class PromptStats(msgspec.Struct, frozen=True):
    """What became of the KV of a prompt without a session; see `daemon.api.messages.FinishReply`."""

    recomputed_tokens: int
    swapped_tokens: int
    invalidated_tokens: int
    ttft_ns: int
    waits: dict[str, int]


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="generation_finished"):
    """The whole answer. ``times``: of the data version it was read from; the gateway makes ages of them.

    ``metadata``: what other servers do not say of an answer, in compatible APIs the extension `foretick`.
    ``scores``: of a scored request, log probabilities of its choices, all up to one constant.
    ``passes``: when the engine did it; ``engine_ns``: its part of the passes that it was in.
    """

    id: int
    text: str
    finish: Finish
    stop: str | None
    prompt_tokens: int
    reused_tokens: int
    answer_tokens: int
    metadata: ReplyMetadata
    logprobs: tuple[Logprob, ...] = ()
    times: Times | None = None
    stats: PromptStats | None = None
    scores: tuple[float, ...] = ()
    passes: Passes = Passes()
    engine_ns: int = 0

    @property
    def computed_tokens(self) -> int:
        """Tokens of prompt and answer that were computed for it."""
        return max(0, self.prompt_tokens - self.reused_tokens) + self.answer_tokens


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why the engine did not carry a command out, or not to its end.

    ``tokens``: computed for it; ``engine_ns``: as of `Finished`.
    """

    id: int
    code: Code
    message: str
    tokens: int = 0
    engine_ns: int = 0


class TokensCounted(msgspec.Struct, frozen=True, tag="tokens_counted"):
    """Length of a prompt: the reply to `CountTokens`, and to each input of a prompt that is not complete."""

    id: int
    tokens: int


GenerationCommand = GenerateAll | ExtendPrompt | FinishPrompt | CancelGeneration | CountTokens | ViewPrompt
GenerationEvent = Begun | Delta | Finished | Failed | TokensCounted | PromptViewed
Event = Begun | Delta | Finished


class SamplingDefaults(msgspec.Struct, frozen=True):
    """How a chat or a text without a session is sampled where its request does not say; see `Generate`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class ModelEntry(msgspec.Struct, frozen=True):
    """A model of the daemon, by its name in answers; ``aliases``: what clients may call it, too."""

    name: str
    revision: str
    aliases: tuple[str, ...] = ()
    sampling: SamplingDefaults = SamplingDefaults()


class ModelCatalog(msgspec.Struct, frozen=True):
    """What the daemon serves: its own models, `[model]` first, and each session under a model's name."""

    models: tuple[ModelEntry, ...]
    since: int
    """Unix time in seconds."""
    sessions: tuple[str, ...]
    max_prompt_tokens: int
    max_new_tokens: int
    session_models: dict[str, str] = {}
    """Of several models, a name of each session's."""

    @property
    def own(self) -> dict[str, ModelEntry]:
        """The daemon's models by all their names."""
        return {name: each for each in self.models for name in (each.name, *each.aliases)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models, the daemon's own ones first."""
        return *self.own, *(SESSION + name for name in self.sessions)

    def model_of(self, model: str) -> str:
        """Which of several models a name means, by its name in answers; "" for any that may answer."""
        return self.own[model].name if len(self.models) > 1 and model in self.own else ""

    def entry_of(self, model: str) -> ModelEntry:
        """The model that a name means, of a session its own; else the first one."""
        of_session = self.session_models.get(model.removeprefix(SESSION), "")
        return self.own.get(model) or self.own.get(of_session, self.models[0])

    def session_of(self, model: str) -> str | None:
        """The session that a model's name means, "" for the daemon's own models; None for an unknown name."""
        if model in self.own:
            return ""
        name = model.removeprefix(SESSION)
        return name if name != model and name in self.sessions else None


class Generator(Protocol):
    """Generates; implemented by the gateway. Every method raises `daemon.api.messages.QueryError`."""

    def served(self, client: Client) -> ModelCatalog:
        """What there is now, as far as the client sees it."""

    async def count(self, request: Generate, client: Client) -> int:
        """Tokens of its prompt."""

    def run(self, requests: Sequence[Generate], client: Client) -> AsyncGenerator[tuple[int, Event], None]:
        """Generate answers at the same time; events with the number of their request.

        Each has a `Begun`, if it streams `Delta`s, and a `Finished`. Closing the iterator cancels the rest.
        """
