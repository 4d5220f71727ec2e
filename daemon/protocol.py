"""What crosses between front and engine: commands one way, events the other, msgspec structs in msgpack.

In `inproc` mode the same structs are handed over without encoding, so no behaviour lives in the seam.
"""

from __future__ import annotations

import msgspec

from feeds.decoding import decoded


class AskEngine(msgspec.Struct, frozen=True, tag="ask"):
    """Answer ``text`` on the session's newest version. ``choices`` empty: free text."""

    id: int
    session: str
    text: str
    max_tokens: int
    choices: tuple[str, ...]


class CancelAsk(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for this ask any more."""

    id: int


class OpenPrompt(msgspec.Struct, frozen=True, tag="open_prompt"):
    """A prompt without a session begins with ``text``. ``complete``: that is all of it, so generate.

    The engine replies with `PromptTaken`, and in the end with `PromptDone` or `PromptFailed`, always.
    """

    prompt: int
    text: str
    complete: bool
    max_tokens: int
    choices: tuple[str, ...]
    temperature: float


class PromptInput(msgspec.Struct, frozen=True, tag="prompt_input"):
    """More of an unfinished prompt, or with ``replaces`` all of it anew; the reply is `PromptTaken`."""

    prompt: int
    text: str
    replaces: bool


class FinishPrompt(msgspec.Struct, frozen=True, tag="finish_prompt"):
    """The prompt is all there: generate."""

    prompt: int


class CancelPrompt(msgspec.Struct, frozen=True, tag="cancel_prompt"):
    """Nobody waits for this prompt's answer any more."""

    prompt: int


PromptCommand = OpenPrompt | PromptInput | FinishPrompt | CancelPrompt


class EndInput(msgspec.Struct, frozen=True, tag="end_input"):
    """The source has nothing more: take what the ring holds, however long, and close the open bars."""


class StopEngine(msgspec.Struct, frozen=True, tag="stop"):
    """Finish what is queued within ``drain_s`` seconds and end."""

    drain_s: float


Command = AskEngine | CancelAsk | PromptCommand | EndInput | StopEngine


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model passed its canary and every session's frozen region is in KV."""

    model: str
    revision: str
    untrained: bool
    device: str
    pool_blocks: int


class Stages(msgspec.Struct, frozen=True):
    """Times of the newest record's way and of the answer's own, in ns."""

    ring_wait: int
    bars: int
    tokenise: int
    queue: int
    forward: int


class Inputs(msgspec.Struct, frozen=True):
    """Which records an update stands for, by the feed's own running numbers.

    Every record of the session numbered below ``safe`` is in a closed bar or was dropped.
    """

    first: int
    last: int
    safe: int


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """A new data version. Event and receive times (ns) are those of its newest record; ``bars`` it added."""

    session: str
    version: int
    bars: int
    live_tokens: int
    live_records: int
    as_of: int
    ts_recv: int
    ts_ring: int
    inputs: Inputs


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """One standing question's answer at one version."""

    session: str
    question: str
    question_hash: str
    version: int
    text: str
    choice: str | None
    logit_gap: float
    as_of: int
    ts_recv: int
    ts_ring: int
    inputs: Inputs
    stages: Stages
    computed_tokens: int
    reused_tokens: int
    coalesced: int
    flags: tuple[str, ...]
    recomputed_tokens: int = 0
    swapped_tokens: int = 0


class AnswerFailed(msgspec.Struct, frozen=True, tag="answer_failed"):
    """One standing question that got no answer at one version."""

    session: str
    question: str
    version: int
    code: str
    message: str
    inputs: Inputs


class AskDone(msgspec.Struct, frozen=True, tag="ask_done"):
    """The answer to an `AskEngine`."""

    id: int
    version: int
    text: str
    choice: str | None
    logit_gap: float
    computed_tokens: int
    reused_tokens: int


class AskFailed(msgspec.Struct, frozen=True, tag="ask_failed"):
    """Why an `AskEngine` has no answer."""

    id: int
    code: str
    message: str


class PromptTaken(msgspec.Struct, frozen=True, tag="prompt_taken"):
    """An input was handed to the scheduler; the prompt is ``tokens`` long with it. In order of the inputs."""

    prompt: int
    tokens: int


class PromptDone(msgspec.Struct, frozen=True, tag="prompt_done"):
    """The answer to a finished prompt, and what its KV went through, in tokens; times in ns.

    ``ttft_ns``: from its last input or its end to the answer's first token.
    """

    prompt: int
    text: str
    choice: str | None
    logit_gap: float
    prompt_tokens: int
    answer_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    swapped_tokens: int
    invalidated_tokens: int
    ttft_ns: int
    waits: dict[str, int]


class PromptFailed(msgspec.Struct, frozen=True, tag="prompt_failed"):
    """Why a prompt has no answer and takes no more input."""

    prompt: int
    code: str
    message: str


PromptEvent = PromptTaken | PromptDone | PromptFailed


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The worker's progress, every second: alive means idle, or progress since the last one."""

    progress: int
    idle: bool


class InputDone(msgspec.Struct, frozen=True, tag="input_done"):
    """After `EndInput`: everything the source gave is answered."""


class ThreadEnded(msgspec.Struct, frozen=True, tag="thread_ended"):
    """A thread that the engine cannot do without ended unasked."""

    name: str
    why: str


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The engine has drained; nothing follows."""

    drained: bool


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot run; ``key`` names the setting at fault if there is one."""

    key: str
    message: str


EngineEvent = (
    Ready
    | Committed
    | Answered
    | AnswerFailed
    | AskDone
    | AskFailed
    | PromptEvent
    | Heartbeat
    | InputDone
    | ThreadEnded
    | Stopped
    | Fatal
)

encode = msgspec.msgpack.Encoder().encode
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(EngineEvent)


def decode_command(payload: bytes) -> Command:
    """Raises Undecodable."""
    command: Command = decoded(_commands.decode, payload)
    return command


def decode_event(payload: bytes) -> EngineEvent:
    """Raises Undecodable."""
    event: EngineEvent = decoded(_events.decode, payload)
    return event
