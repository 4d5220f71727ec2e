"""Every configuration key, its type, its default and its meaning: the file's tables as frozen structs.

The meanings are part of the types, so `docs/configuration.md` is rendered from here (`reference`).
The tables of sources and sinks come from `feeds.connectors`.
Lengths of time are `Duration` (integer nanoseconds), written "250ms", "1s", "1m" in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, defstruct

from feeds.connector import SOCKET, Connector, SinkConnector, SourceConnector
from feeds.connectors import SINKS, SOURCES
from feeds.durations import Duration, parse_duration
from scheduler.policies import PolicyName
from scheduler.types import Eviction

SECOND = parse_duration("1s")
OFF = Duration(0)
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file: immutable, and a key it does not know is an error."""


class ModelConfig(Table, frozen=True):
    """The language model."""

    path: Annotated[
        str, Meta(description='directory of a transformers model; "" is the embedded, untrained default')
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="weights and KV; auto is what the model's own file says"),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="auto takes the GPU when there is one")
    ] = "auto"
    system_prompt: Annotated[
        str, Meta(description='the frozen prefix of every session; "" is the built-in prompt of an analyst')
    ] = ""
    threads: Annotated[int, Meta(ge=0, description="CPU threads of the engine; 0 leaves it to PyTorch")] = 0
    seed: Annotated[int, Meta(ge=0, description="seed of the embedded default model's weights")] = 0


class PoolConfig(Table, frozen=True):
    """The paged KV pool that all sessions share."""

    blocks: Annotated[int, Meta(ge=0, description="blocks in the pool; 0 sizes it from the sessions")] = 0
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens a block")] = 16
    frame_limit: Annotated[
        int, Meta(ge=128, description="every position stays below this; see position frame in the glossary")
    ] = 8192
    host_blocks: Annotated[
        int,
        Meta(
            ge=0,
            description="blocks of the host tier, which takes KV when the pool is full; 0 is none",
        ),
    ] = 0
    idle_spill: Annotated[
        Duration,
        Meta(
            description="idle timeout after which a session moves from the pool to disk, or to "
            "the host tier if "
            "no file can be written; 0s is never"
        ),
    ] = OFF
    spill_dir: Annotated[
        str,
        Meta(description='directory of the files of idle sessions; "" is `sessions` in the cache directory'),
    ] = ""


class SchedulerConfig(Table, frozen=True):
    """The order of requests, and the limits of a batch."""

    policy: Annotated[
        PolicyName,
        Meta(
            description="order of POOL requests (see scheduling); the variable SCHEDULER_TYPE "
            "sets it, too, by "
            "the names of the paper"
        ),
    ] = "fcfs"
    k: Annotated[
        int,
        Meta(
            ge=1,
            description="of klpm: every k-th request chosen is the oldest, the others match the cache best",
        ),
    ] = 2
    seed: Annotated[int, Meta(ge=0, description="seed of klpm-adaptive")] = 0
    eviction: Annotated[
        Eviction,
        Meta(
            description="what becomes of a preempted request's KV: recomputed later, swapped "
            "to the host tier, or "
            "whichever the cost profile says is cheaper"
        ),
    ] = "cost"
    profile: Annotated[
        str,
        Meta(
            description='cost profile of the device, a name or a file (`foretick profile`); "" begins with '
            "a cautious guess. Measured passes correct either"
        ),
    ] = ""
    grouping: Annotated[bool, Meta(description="compute a common beginning of waiting prompts once")] = True
    max_drafts: Annotated[
        int,
        Meta(
            ge=0, description="most draft tokens verified in one pass of a request; 0 turns speculation off"
        ),
    ] = 4
    stream_timeout: Annotated[
        Duration,
        Meta(description="idle timeout of an unfinished prompt, which is then given up; 0s is never"),
    ] = Duration(60 * SECOND)
    max_batch_tokens: Annotated[int, Meta(ge=1, description="tokens of one forward pass")] = 1024
    max_batch_requests: Annotated[
        int, Meta(ge=1, description="requests of one forward pass: questions and tapes together")
    ] = 64
    chunk_min: Annotated[
        int,
        Meta(
            ge=1,
            description="smallest prefill chunk, in tokens; also the most that a tape with a "
            "backlog adds to a "
            "pass with questions",
        ),
    ] = 128
    chunk_max: Annotated[int, Meta(ge=1, description="largest prefill chunk, in tokens")] = 1024
    cell_budget: Annotated[
        float, Meta(gt=0, le=1, description="cell budget: share of the pool for questions and their answers")
    ] = 0.5
    high_water: Annotated[
        float, Meta(gt=0, le=1, description="share of the pool in use above which prefill waits")
    ] = 0.95
    max_prompt_tokens: Annotated[int, Meta(ge=1, description="longest question or prompt, in tokens")] = 2048
    max_new_tokens: Annotated[int, Meta(ge=1, description="longest answer, in tokens")] = 256


class BarsConfig(Table, frozen=True):
    """How trades and quotes become bars, in event time."""

    interval: Annotated[Duration, Meta(description="length of a bar")] = SECOND
    lateness: Annotated[Duration, Meta(description="how long a bar stays open for records out of order")] = (
        OFF
    )
    empty: Annotated[
        Literal["skip", "fill"],
        Meta(description="an interval without records makes no bar (skip) or a flat one (fill)"),
    ] = "skip"
    max_fill: Annotated[int, Meta(ge=1, description="most flat bars in a row with empty = fill")] = 60
    idle_close: Annotated[
        Duration, Meta(description="idle timeout after which a silent symbol's open bar is closed; 0s is off")
    ] = OFF


class SessionConfig(Table, frozen=True):
    """One symbol and the window of it that the model reads."""

    name: Annotated[str, Meta(pattern=_NAME, max_length=64, description="its name in answers and metrics")]
    symbol: Annotated[
        str, Meta(pattern=r"^[^:\s]+:\S+$", max_length=128, description="VENUE:SYMBOL of its records")
    ]
    price_decimals: Annotated[int, Meta(ge=0, le=9, description="digits after the point of a price")] = 2
    volume_decimals: Annotated[int, Meta(ge=0, le=9, description="digits after the point of a volume")] = 3
    retention_tokens: Annotated[
        int, Meta(ge=64, description="longest window, in tokens; the oldest whole bars are evicted")
    ] = 4096
    retention_records: Annotated[int, Meta(ge=0, description="longest window, in bars; 0 is no limit")] = 0
    retention_span: Annotated[
        Duration, Meta(description="longest window, in event time before its newest bar; 0s is no limit")
    ] = OFF
    semantics: Annotated[
        Literal["carry", "exact"],
        Meta(
            description="carry: bars keep what they absorbed from evicted ones; exact: the "
            "window is prefilled "
            "again in the background"
        ),
    ] = "carry"
    refresh_every: Annotated[
        int, Meta(ge=0, description="of exact: refresh after so many evicted bars; 0 is only when idle")
    ] = 64
    refresh_idle: Annotated[
        Duration,
        Meta(
            description="of exact: refresh when a bar was evicted and no new one came for this "
            "long; 0s is off"
        ),
    ] = Duration(10 * SECOND)
    divergence_every: Annotated[
        Duration,
        Meta(
            description="of carry: how often a fresh window is prefilled to measure the "
            "divergence; 0s is never. "
            "exact measures it at every refresh"
        ),
    ] = Duration(3600 * SECOND)
    warm_up_records: Annotated[
        int, Meta(ge=0, description="answers carry the flag warm_up until the model has read so many bars")
    ] = 10
    stale_after: Annotated[
        Duration, Meta(description="answers older than this carry the flag stale; 0s is off")
    ] = OFF
    max_staleness: Annotated[
        Duration,
        Meta(
            description="deadline for reading a closed bar; near it the tape goes before asks. "
            "The device must "
            "have the capacity; 0s is no deadline"
        ),
    ] = OFF


class QuestionConfig(Table, frozen=True):
    """A standing question, answered for every data version."""

    name: Annotated[str, Meta(pattern=_NAME, max_length=64, description="its name in answers")]
    text: Annotated[str, Meta(min_length=1, description="the question as the model reads it")]
    choices: Annotated[
        tuple[str, ...],
        Meta(description="allowed answers, which must differ in their first token; empty is free text"),
    ] = ()
    max_tokens: Annotated[int, Meta(ge=1, description="longest free-text answer, in tokens")] = 8
    sessions: Annotated[tuple[str, ...], Meta(description="sessions that answer it; empty is all")] = ()


def _with_tables(name: str, connectors: Mapping[str, type[Connector]]) -> Any:
    """A struct with an optional table for each connector."""
    tables = [(key, connector | None, None) for key, connector in connectors.items()]
    return defstruct(name, tables, bases=(Table,), frozen=True)


if TYPE_CHECKING:
    _Kind = str
else:
    _Kind = Annotated[Literal[(*SOURCES, "none")], Meta(description="which of the tables below is used")]


# the base's fields follow from the modules of feeds.connectors: a type checker cannot see them
class SourceConfig(_with_tables("SourceTables", SOURCES)):  # type: ignore[misc]
    """Where records come from."""

    kind: _Kind = "none"
    ring_capacity: Annotated[
        int, Meta(ge=64, le=2**24, description="records between feed and engine; a power of two")
    ] = 65536
    max_ahead: Annotated[
        Duration,
        Meta(
            description="a record stamped further ahead of this machine's clock is refused, because every "
            "later record would count as late"
        ),
    ] = Duration(3600 * SECOND)
    max_message_bytes: Annotated[
        int, Meta(ge=256, description="a longer message is refused without decoding it")
    ] = 1 << 20

    @property
    def connector(self) -> SourceConnector | None:
        """The table that `kind` names; None for none."""
        connector: SourceConnector | None = getattr(self, self.kind, None)
        return connector


class SinkConfig(_with_tables("SinkTables", SINKS)):  # type: ignore[misc]  # as above
    """Where answers go; each table that is present is used."""

    @property
    def connectors(self) -> dict[str, SinkConnector]:
        """The tables that are present, by name."""
        return {name: connector for name in SINKS if (connector := getattr(self, name)) is not None}


class QueryConfig(Table, frozen=True):
    """The ZeroMQ query socket, and limits on its clients."""

    endpoint: Annotated[
        str, Meta(pattern=r"^$|" + SOCKET, description='address bound; "" turns the socket off')
    ] = "tcp://127.0.0.1:7801"
    max_wait: Annotated[Duration, Meta(description="longest time to a reply")] = Duration(30 * SECOND)
    max_prompts: Annotated[
        int, Meta(ge=0, description="most prompts open at a time, those over HTTP included; 0 takes none")
    ] = 256
    max_prompts_each: Annotated[int, Meta(ge=1, description="most prompts open at a time by one client")] = 64


class HttpConfig(Table, frozen=True):
    """Metrics, health and prompts over HTTP."""

    host: Annotated[str, Meta(min_length=1, description="address bound")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port bound; 0 picks a free one")] = 7800


class ProcessConfig(Table, frozen=True):
    """The daemon's processes."""

    mode: Annotated[
        Literal["two", "inproc"],
        Meta(description="two: the engine has its own process; inproc: it shares the front's (for tests)"),
    ] = "two"
    drain: Annotated[Duration, Meta(description="longest time that stopping may take")] = Duration(
        10 * SECOND
    )


class LogConfig(Table, frozen=True):
    """What is logged, to standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severity logged")
    ] = "info"
    json: Annotated[bool, Meta(description="JSON lines instead of text")] = False


class Config(Table, frozen=True):
    """The whole file."""

    standing: Annotated[
        Literal["paper_six", "none"],
        Meta(
            description="standing questions in addition to `[[questions]]`: the six of "
            "*Attention Once* section 4.3"
        ),
    ] = "paper_six"
    model: ModelConfig = ModelConfig()
    pool: PoolConfig = PoolConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    bars: BarsConfig = BarsConfig()
    sessions: tuple[SessionConfig, ...] = ()
    questions: tuple[QuestionConfig, ...] = ()
    source: SourceConfig = SourceConfig()
    sink: SinkConfig = SinkConfig()
    query: QueryConfig = QueryConfig()
    http: HttpConfig = HttpConfig()
    process: ProcessConfig = ProcessConfig()
    log: LogConfig = LogConfig()
