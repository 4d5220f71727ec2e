"""Messages between gateway and engine: commands one way, events the other, msgspec structs in msgpack.

A client's request is itself the command. The engine fills the reply or the published answer; the gateway adds
what only it knows. In `inproc` mode the same structs are passed without encoding.
"""

from collections.abc import Callable
from functools import partial

import msgspec

from daemon.ages import Times
from daemon.api import generation, messages
from daemon.api.messages import Code
from daemon.config.schema import SessionConfig
from daemon.config.symbols import Rolls
from daemon.progress import Position, Progress
from daemon.ring_numbers import RingValues
from daemon.traces.recorded_trace import Passes
from feeds.decoding import decoded
from feeds.market_data import Answer
from flash.question import Question
from ingest.record import LowWatermarks, ReadRange


class SetQuestions(msgspec.Struct, frozen=True, tag="set_questions"):
    """Let ``session`` have exactly these standing questions.

    Answered by `QuestionsSet` or, with nothing changed, `Failed`.
    """

    id: int
    session: str
    questions: tuple[Question, ...]


class OpenSession(msgspec.Struct, frozen=True, tag="open_session"):
    """Open a session, with all its `bars` settings; it goes on from ``progress``.

    ``symbols``: numbers of its symbols in the ring; ``metrics``: the block of its series, empty where there
    are some. ``follows``: another daemon answers it, until `TakeOver`. ``rolls``: of its symbols that are
    continuous contracts. Answered by `SessionAdded`, before anything else of this session, or `Failed`.
    """

    id: int
    session: SessionConfig
    questions: tuple[Question, ...]
    symbols: dict[str, int]
    progress: Progress
    metrics: str
    follows: bool = False
    rolls: dict[str, Rolls] = {}


class ReconfigureSession(msgspec.Struct, frozen=True, tag="reconfigure_session"):
    """Change what a session may change with its window. Answered by `Done` or `Failed`.

    ``rolls``: as in `OpenSession`.
    """

    id: int
    session: SessionConfig
    rolls: dict[str, Rolls] = {}


class CloseSession(msgspec.Struct, frozen=True, tag="close_session"):
    """Close a session: what is asked of it fails. Answered by `Done`, its last event.

    ``keeps``: it is added again. Its snapshots stay, and it takes no records, but its questions are answered
    from its window until it has another one. ``serves``: this daemon answered it, so its snapshots go, too.
    ``releases``: only its memory goes; it may be opened again.
    """

    id: int
    name: str
    keeps: bool = False
    serves: bool = True
    releases: bool = False


class TakeOver(msgspec.Struct, frozen=True, tag="promote"):
    """Answer these sessions from now on, about bars behind the ``progress`` of each.

    Answered by `Done`, before a record that comes after it, or `Failed`.
    """

    id: int
    progress: dict[str, Progress]


SessionCommand = OpenSession | ReconfigureSession | CloseSession | TakeOver


class PartitionsAssigned(msgspec.Struct, frozen=True, tag="partitions_assigned"):
    """The records of these sessions are read from now on, for this daemon to answer.

    What a snapshot left open or waiting goes on. Without this it does so with the next bar that new records
    close.
    """

    sessions: tuple[str, ...]


class PartitionsRevoked(msgspec.Struct, frozen=True, tag="partitions_revoked"):
    """Another daemon owns these sessions until `PartitionsAssigned`: it answers them and writes snapshots."""

    sessions: tuple[str, ...]


class NameStream(msgspec.Struct, frozen=True, tag="name_stream"):
    """The stream of `ingest.record.stream_number` has this name. ``reread``: its source can read it again."""

    source: str
    topic: str
    partition: int
    reread: bool


class NoteProgress(msgspec.Struct, frozen=True, tag="note_progress"):
    """How far a restart of the daemon would find each session's answers acknowledged."""

    progress: dict[str, Progress]


class EndInput(msgspec.Struct, frozen=True, tag="end_input"):
    """The source has ended: take what the ring holds, without time limit, and close the open bars."""


class StopEngine(msgspec.Struct, frozen=True, tag="stop"):
    """Finish what is queued within ``drain_s`` seconds and end."""

    drain_s: float


Command = (
    generation.GenerationCommand
    | SetQuestions
    | SessionCommand
    | messages.Label
    | PartitionsAssigned
    | PartitionsRevoked
    | NameStream
    | NoteProgress
    | EndInput
    | StopEngine
)


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """The ``models``, `[model]` first, passed their canaries, and every session's frozen region is in KV.

    ``positions``: of the symbols of sessions that came back from a snapshot, by session and symbol, and of
    their further streams by the names of those. ``streams``: those that the snapshots name. ``halted``:
    sessions that are, by their snapshots.
    """

    models: tuple[generation.ModelEntry, ...]
    positions: dict[str, dict[str, Position]] = {}
    streams: tuple[NameStream, ...] = ()
    halted: tuple[str, ...] = ()


class VersionInputs(msgspec.Struct, frozen=True):
    """The records behind an update.

    ``reads``: those of its bars; an empty bar has those of the bar before it. ``low_watermarks``: pairs of a
    stream and an offset: every record of the session below it is in a closed bar or was dropped. ``closed``:
    opening (ns) of the newest bar of each of its symbols, as in `Progress`; -1 before the first.
    ``written``: as in `Progress`. ``single``: the newest one has a line of its own, and closed no bar.
    """

    reads: tuple[ReadRange, ...] = ()
    low_watermarks: LowWatermarks = ()
    closed: tuple[int, ...] = ()
    written: LowWatermarks = ()
    single: bool = False


class Provenance(msgspec.Struct, frozen=True):
    """What a version was made of, as in `feeds.market_data.Basis`, with streams by number.

    ``known``: ``window`` begins with the window's first record; otherwise it may begin earlier.
    """

    state_bars: int = 0
    left: bool = False
    window: tuple[ReadRange, ...] = ()
    state: tuple[ReadRange, ...] = ()
    known: bool = False
    since_gap: int = 0


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """A new data version and the ``bars`` it added; ``times`` of its newest record.

    ``late``: of these bars, those that missed the session's freshness objective. ``history``: they were
    answered for before this engine started, so nothing is asked of this version. ``close``: of the newest of
    these bars that is of the session's first symbol, in units of its price scale.
    """

    session: str
    version: int
    bars: int
    live_tokens: int
    live_records: int
    times: Times
    inputs: VersionInputs
    late: int = 0
    history: bool = False
    made: Provenance = Provenance()
    close: int | None = None


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """One standing question's answer; the gateway adds input offsets, and ages from its version's ``times``.

    ``asked``: answers and failures that this version has in all. ``logits``: of its choices. ``passes``: when
    the engine did it. ``engine_used``: see `flash.budgets`.
    """

    answer: Answer
    inputs: VersionInputs
    times: Times
    asked: int
    logits: tuple[float, ...] = ()
    passes: Passes = Passes()
    engine_used: float = 0.0


class Repeated(msgspec.Struct, frozen=True, tag="repeated"):
    """A standing question's answer at a version that was answered before this engine: ready, and no news.

    ``logits``: as in `Answered`.
    """

    answer: Answer
    inputs: VersionInputs
    times: Times
    logits: tuple[float, ...] = ()


class ReadyLogits(msgspec.Struct, frozen=True, tag="ready_logits"):
    """What the model favours at the ready position of ``version``: ``token``, by ``gap`` logits.

    ``fast``: see `flash.early_exit`. ``metadata``: of an answer read from this version, without choice, gap
    and ages; ``times`` of its newest record.
    """

    session: str
    version: int
    token: int
    gap: float
    fast: dict[str, int]
    metadata: messages.ReplyMetadata
    times: Times


class AnswerFailed(msgspec.Struct, frozen=True, tag="answer_failed"):
    """One standing question failed at one version. ``asked``: as in `Answered`."""

    session: str
    question: str
    version: int
    code: str
    message: str
    inputs: VersionInputs
    asked: int


class TextsAsked(msgspec.Struct, frozen=True, tag="texts_asked"):
    """All questions due at this version are free text: their results may come after those of later versions.

    ``asked``: as in `Answered`.
    """

    session: str
    version: int
    inputs: VersionInputs
    asked: int


class NotDue(msgspec.Struct, frozen=True, tag="not_due"):
    """No standing question was due at this version; each earlier one had its first event."""

    session: str
    version: int
    inputs: VersionInputs


class RecordRefused(msgspec.Struct, frozen=True, tag="record_refused"):
    """A session refused a usable record.

    ``leg``: number of its symbol among the session's; ``stream``, ``offset``, ``part``, ``seq``,
    ``ts_event``, ``ts_recv``, ``values``: as in the ring (`ingest.record`).
    """

    session: str
    leg: int
    reason: str
    stream: int
    offset: int
    part: int
    seq: int
    ts_event: int
    ts_recv: int
    values: RingValues


class SessionHalted(msgspec.Struct, frozen=True, tag="session_halted"):
    """Trading of a symbol of the session has halted, or none is halted any more."""

    session: str
    halted: bool


class WindowRebuilt(msgspec.Struct, frozen=True, tag="window_rebuilt"):
    """The newest version's window was prefilled again, at once: questions may be answered otherwise."""

    session: str


class QuestionsSet(msgspec.Struct, frozen=True, tag="questions_set"):
    """Versions of ``session`` after ``version`` are asked these questions."""

    id: int
    session: str
    version: int
    questions: tuple[Question, ...]


class SessionAdded(msgspec.Struct, frozen=True, tag="session_added"):
    """The session is open. ``positions``, ``streams``: as in `EngineReady`, if it is from a snapshot.

    ``halted``: whether trading is, by that.
    """

    id: int
    positions: dict[str, Position] = {}
    streams: tuple[NameStream, ...] = ()
    halted: bool = False


class Labelled(msgspec.Struct, frozen=True, tag="labelled"):
    """The right ``choice`` of a standing question's answer at ``version`` is known.

    From a client or by the question's own rule; ``question``: its name.
    """

    session: str
    question: str
    version: int
    choice: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A session was changed, removed, or goes on here, as a command asked for."""

    id: int


ReplyEvent = generation.GenerationEvent | QuestionsSet | SessionAdded | Done | messages.LabelReply
"""What the engine replies to a command that has an ``id``, and has it, too."""
HEARTBEAT_S = 1.0


class EngineHeartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The worker's state, every `HEARTBEAT_S`: alive means idle, or progress since the last heartbeat.

    An engine that loads has an idle worker.
    """

    progress: int
    idle: bool


class EngineLoads(msgspec.Struct, frozen=True, tag="loads"):
    """What an engine that is not ready yet is doing, for people."""

    doing: str


class InputDone(msgspec.Struct, frozen=True, tag="input_done"):
    """After `EndInput`: everything the source sent is answered."""


class ThreadEnded(msgspec.Struct, frozen=True, tag="thread_ended"):
    """An essential engine thread ended unexpectedly."""

    name: str
    why: str


class EngineStopped(msgspec.Struct, frozen=True, tag="stopped"):
    """Nothing follows. ``drained``: its worker has ended; else a forward pass did not return."""

    drained: bool


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot run; ``key`` names the setting at fault, if any."""

    key: str
    message: str


EngineEvent = (
    EngineReady
    | Committed
    | Answered
    | Repeated
    | ReadyLogits
    | AnswerFailed
    | TextsAsked
    | NotDue
    | RecordRefused
    | SessionHalted
    | WindowRebuilt
    | Labelled
    | ReplyEvent
    | EngineHeartbeat
    | EngineLoads
    | InputDone
    | ThreadEnded
    | EngineStopped
    | Fatal
)


def failures_of(command: Command, code: Code, message: str) -> list[generation.Failed]:
    """The events that tell the clients of ``command`` that it failed; none where no client waits."""
    match command:
        case generation.GenerateAll():
            numbers = [each.id for each in command.requests]
        case generation.CancelGeneration():
            numbers = []  # its request ends by itself
        case _:
            number = getattr(command, "id", None)
            numbers = [] if number is None else [number]
    return [generation.Failed(number, code, message) for number in numbers]


def session_of(event: EngineEvent) -> str | None:
    """The session that an event is about, if it is about one."""
    if isinstance(event, Answered | Repeated):
        return event.answer.session
    if isinstance(
        event,
        Committed
        | ReadyLogits
        | AnswerFailed
        | TextsAsked
        | NotDue
        | QuestionsSet
        | RecordRefused
        | SessionHalted
        | WindowRebuilt
        | Labelled,
    ):
        return event.session
    return None


def _read(kind: type[int], value: int) -> int:
    """A length of time or a number of the configuration."""
    return kind(value)


encode = msgspec.msgpack.Encoder(enc_hook=int).encode
decode_command: Callable[[bytes], Command] = partial(
    decoded, msgspec.msgpack.Decoder(Command, dec_hook=_read).decode
)
"""Raises Undecodable."""
decode_event: Callable[[bytes], EngineEvent] = partial(decoded, msgspec.msgpack.Decoder(EngineEvent).decode)
"""Raises Undecodable."""
