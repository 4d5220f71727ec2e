"""Every configuration key, its type, its default and its meaning: the file's tables as frozen structs.

The meanings are part of the types, so `docs/configuration.md` is rendered from here (`reference`).
The tables of sources and sinks come from `feeds.connectors`.
Lengths of time are `Duration` (integer nanoseconds), written "250ms", "1s", "1m" in the file.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, defstruct

from daemon.config.question_sets import SETS
from feeds.connector import SOCKET, Connector, SinkConnector, SourceConnector, about
from feeds.connectors import SINKS, SOURCES
from feeds.decimals import Fixed, decimals_of
from feeds.durations import Duration, parse_duration
from feeds.market_data import Flag
from feeds.timestamps import Instant
from flash.question import AnswerForm, PublishWhen
from metrics.catalogue import Treatment
from metrics.feed_faults import CONFIGURED
from scheduler.interfaces import Eviction
from scheduler.policies import PolicyName
from support.directories import state_home
from support.plugins import PluginError

SECOND = parse_duration("1s")
OFF = Duration(0)
ALL = "all"
"""The label `source` of what all sources share."""
FRESH_BARS = 3
"""By default a live bar is read within the time of this many bars."""
UNTRAINED = "untrained"
"""`model.path` of the random model."""
_SYMBOL = r"^[^:\s]+:\S+$"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
HostBlocks = Annotated[int, msgspec.Meta(ge=0)] | Literal["auto"]
_VENUE = r"^[^:\s]+$"
_OFF_OR_SOCKET = r"^$|" + SOCKET
_SOCKETS = "tcp://host:port or ipc://path"


PATTERNS = {
    _SYMBOL: "VENUE:SYMBOL, such as BINANCE:BTCUSDT",
    _NAME: "a name of A to Z, a to z, 0 to 9, _, . and -, such as btcusdt",
    _VENUE: "a venue, without colons and blanks",
    SOCKET: _SOCKETS,
    _OFF_OR_SOCKET: f'{_SOCKETS}, or "" for none',
}
"""What is expected where a value has to match one of these."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file: immutable; an unknown key is an error."""


class ModelConfig(Table, frozen=True):
    """The language model; `[[models]]` are others beside it."""

    path: Annotated[
        str,
        about(
            'directory of a transformers model, or a GGUF file, which is expanded once; "" is the tape model '
            f"that comes with Foretick (see accuracy), {UNTRAINED} a small random model that takes any "
            "question"
        ),
    ] = ""
    adapter: Annotated[
        str,
        about(
            "directory of a LoRA adapter in peft's format that was trained on this model; it is merged into "
            'the weights as they are loaded, "" is none'
        ),
    ] = ""
    name: Annotated[
        str,
        about("what sessions call this model where there are `[[models]]`, and clients beside its own name"),
    ] = ""
    aliases: Annotated[
        tuple[str, ...],
        about(
            "further names of this model in the OpenAI and Anthropic APIs, for programs that ask for one and "
            "cannot be changed"
        ),
    ] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        about("type of weights and KV; auto takes the type in the model's own file"),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "bfloat16", "int8"],
        about(
            "type of KV on a CPU: it takes half or about a quarter of float32's memory, and costs some "
            "accuracy; auto is that of the weights"
        ),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], about("auto takes the GPU if there is one")] = "auto"
    weights: Annotated[
        Literal["auto", "float", "int8", "int4", "fp8"],
        about(
            "how weights are held: float as dtype says; int8 and int4 as codes of 8 and 4 bits, for plain "
            "decoders on a CPU, which takes less memory and time for each token and costs some accuracy; on "
            "a GPU these and fp8 are torchao's codes of any model, which take less memory; "
            "auto is float, or the codes of a quantised GGUF file as they are"
        ),
    ] = "auto"
    system_prompt: Annotated[
        str, about('the frozen prefix of every session; "" is the built-in prompt of an analyst')
    ] = ""
    describe: Annotated[
        bool,
        about(
            "the prefix of a session says whose bars these are, how long, what their times and units are, "
            "and what its other lines mean; measure it with your model: a small one answers worse"
        ),
    ] = False
    examples: Annotated[
        int,
        about(
            "worked examples before the bars of every session: generated bars, each with questions of "
            "evaluate and their right answers. One takes some 2,000 tokens of the frozen prefix, which "
            "sessions share; not for compact lines",
            ge=0,
            le=8,
        ),
    ] = 0
    layers: Annotated[
        Literal["auto", "compiled", "onednn", "torch"],
        about(
            "how layers run on a CPU: auto compiles those of plain decoders unless that is measured to be "
            "slower, and packs other models' linear layers where that is measured to be faster, which is "
            "measured once and remembered; compiled does the former, always; onednn packs every linear "
            "layer it can; torch does neither. Without auto, equal starts give equal floats. On a GPU auto "
            "and compiled fuse what lies between matrix products, which takes seconds at the first start; "
            "torch does not"
        ),
    ] = "auto"
    threads: Annotated[
        int,
        about("CPU threads of the engine; 0 leaves it to PyTorch, at most one per CPU it may use", ge=0),
    ] = 0
    do_sample: Annotated[
        bool | None,
        about(
            "whether chats and texts without a session are sampled where a request says no temperature; none "
            "is what the model's generation_config.json says, or else yes. Questions about sessions get "
            "their likeliest answer unless a request says a temperature, and standing ones always do"
        ),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=100)] | None,
        about("temperature of these where a request says none; none is that of the model's file, or else 1"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        about("top_p of what is sampled where a request says none; none is that of the model's file, or 1"),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        about("top_k of the same; 0 is any token, none is that of the model's file, or else 0"),
    ] = None
    end_tokens: Annotated[
        tuple[str, ...],
        about(
            "tokens that end an answer, as the tokenizer writes them; none are all that the model's files "
            "name and the one that its chat template ends an answer with"
        ),
    ] = ()
    seed: Annotated[int, about("seed of the untrained model's weights", ge=0)] = 0
    calibration: Annotated[
        str,
        about(
            'file of `foretick calibrate`; "" is calibration.json in the directory of the model, or of its '
            "adapter, if there is one; off is none"
        ),
    ] = ""
    coverage: Annotated[
        float, about("share of choice sets that are to contain the right answer", gt=0, lt=1)
    ] = 0.9
    remembered_answers: Annotated[
        int,
        about(
            "newest answers to questions with choices, of all sessions together, that a label may still come "
            "for; half a kilobyte each",
            ge=0,
        ),
    ] = 100_000
    abstain_below: Annotated[
        float, about("probability below which an answer has the flag `abstained`", ge=0, le=1)
    ] = 0.0


class NamedModel(ModelConfig, frozen=True, kw_only=True):
    """Another model, with sessions, a KV pool and a host tier of its own; it has all other keys of `[model]`
    but `threads`.

    All models share the worker thread, and the memory that they fit in together.
    """

    name: Annotated[
        str,
        about("what sessions call this model, and clients beside its own name", pattern=_NAME, max_length=64),
    ]
    blocks: Annotated[int, about("blocks of its pool, as `pool.blocks`", ge=0)] = 0
    memory: Annotated[float, about("memory of its pool, as `pool.memory`", ge=0)] = 0.0
    host_blocks: Annotated[HostBlocks, about("blocks of its host tier, as `pool.host_blocks`")] = "auto"


class PoolConfig(Table, frozen=True):
    """The paged KV pool that all sessions share."""

    blocks: Annotated[
        int, about("blocks in the pool; 0 sizes it by `memory`, or else from the sessions", ge=0)
    ] = 0
    memory: Annotated[
        float,
        about(
            "memory of the pool instead of `blocks`, in bytes, or below 1 as a share, at most 0.95, of what "
            "weights and the largest pass leave on the model's device; 0 is neither",
            ge=0,
        ),
    ] = 0.0
    block_size: Annotated[int, about("tokens a block", ge=1, le=1024)] = 16
    frame_limit: Annotated[
        int, about("upper bound of positions; see position frame in the glossary", ge=128)
    ] = 8192
    retained_share: Annotated[
        float,
        about(
            "share of the prefix cache that one tenant's prompts may keep by a `retention_priority` above 35",
            ge=0,
            le=1,
        ),
    ] = 0.25
    host_blocks: Annotated[
        HostBlocks,
        about(
            "blocks of the host tier, which holds KV when the pool is full; 0 is no host tier. auto: as many "
            "as requests may hold in the pool (`scheduler.cell_budget`), but at most an eighth of the memory "
            "that pools and a spare engine leave"
        ),
    ] = "auto"
    idle_spill: Annotated[
        Duration,
        about(
            "idle timeout after which a session is offloaded to disk, or to the host tier if no "
            "file can be written; 0s is never"
        ),
    ] = OFF
    pressure_spill: Annotated[
        bool,
        about(
            "whether the least recently used sessions are offloaded to disk when the pool is full and the "
            "host tier has no room"
        ),
    ] = True
    spill_dir: Annotated[
        str,
        about(
            "directory for the files of offloaded sessions, in which each engine makes one of its own; "
            '"" is `sessions` in the cache directory'
        ),
    ] = ""

    @property
    def has_size(self) -> bool:
        """Whether its size is given; else the sessions give it."""
        return bool(self.blocks or self.memory)

    @property
    def size_key(self) -> str:
        """The key by which it is made larger or smaller."""
        return "pool.memory" if self.memory else "pool.blocks"


class SchedulerConfig(Table, frozen=True):
    """The order of requests, and the limits of a batch."""

    policy: Annotated[
        PolicyName,
        about(
            "order of POOL requests (see scheduling); SCHEDULER_TYPE in the environment also sets it, by the "
            "paper's names"
        ),
    ] = "fcfs"
    k: Annotated[
        int,
        about("klpm only: every k-th request chosen is the oldest, the others match the cache best", ge=1),
    ] = 2
    eviction: Annotated[
        Eviction,
        about(
            "what happens to a preempted request's KV: recomputed later, swapped to the host tier, or "
            "whichever is cheaper by the cost profile"
        ),
    ] = "cost"
    profile: Annotated[
        str,
        about(
            'cost profile of the device, a name or a file (`foretick profile`); "" is measured as the '
            "engine starts, or a cautious guess without a host tier. Passes and transfers correct it while "
            "the daemon runs"
        ),
    ] = ""
    max_drafts: Annotated[
        int, about("most draft tokens of a request verified in one pass; 0 turns speculation off", ge=0)
    ] = 4
    max_draft_rows: Annotated[
        int,
        about("most draft tokens in one pass, shared equally by the running answers", ge=0),
    ] = 64
    draft_give_up: Annotated[
        float,
        about(
            "acceptance rate of an answer's drafts below which it has one draft every `draft_retry` tokens; "
            "0 never gives up",
            ge=0,
            le=1,
        ),
    ] = 0.1
    draft_retry: Annotated[
        int, about("tokens between the drafts of an answer whose acceptance rate is that low", ge=1)
    ] = 16
    stream_timeout: Annotated[
        Duration, about("idle timeout after which an unfinished prompt is closed; 0s is never")
    ] = Duration(60 * SECOND)
    max_batch_tokens: Annotated[int, about("most tokens in one forward pass", ge=1)] = 1024
    max_batch_requests: Annotated[
        int, about("most requests in one forward pass: questions and tapes together", ge=1)
    ] = 256
    chunk_min: Annotated[
        int,
        about(
            "smallest prefill chunk, in tokens; also the most that a tape with a backlog adds to a pass "
            "with questions",
            ge=1,
        ),
    ] = 128
    stream_share: Annotated[
        float,
        about(
            "share of each pass that prompts leave to new bars, so that no number of prompts stops the data; "
            "beside questions at most chunk_min tokens. 0 leaves them nothing",
            ge=0,
            lt=1,
        ),
    ] = 0.25
    cell_budget: Annotated[
        float, about("cell budget: share of the pool for questions and their answers", gt=0, le=1)
    ] = 0.5
    high_water: Annotated[float, about("share of the pool in use above which prefill waits", gt=0, le=1)] = (
        0.95
    )
    max_prompt_tokens: Annotated[int, about("longest question or prompt, in tokens", ge=1)] = 2048
    max_new_tokens: Annotated[int, about("longest answer, in tokens", ge=1)] = 256
    share_window: Annotated[
        Duration,
        about(
            "what a standing question or a tenant with an `engine_share` may take of the engine at once: its "
            "share of so long"
        ),
    ] = Duration(10 * SECOND)


class BarsConfig(Table, frozen=True):
    """How trades and quotes become bars, in event time. A session may have settings of its own."""

    interval: Annotated[Duration, about("length of a bar")] = SECOND
    lateness: Annotated[Duration, about("how long a bar stays open for records that arrive out of order")] = (
        OFF
    )
    empty: Annotated[
        Literal["skip", "fill", "emit"],
        about(
            "an interval without records makes no bar (skip), a flat one at the last close (fill), or a line "
            "that says that nothing was traded (emit; decimal lines only)"
        ),
    ] = "skip"
    max_fill: Annotated[int, about("most such bars in a row with empty = fill or emit", ge=1)] = 60
    idle_close: Annotated[
        Duration,
        about(
            "idle timeout after which a silent symbol's open bar is closed; 0s is off. The time in which a "
            "source was away or behind does not count; with Kafka a bar closes up to 2 s later"
        ),
    ] = OFF
    late: Annotated[
        Literal["drop", "amend", "refuse"],
        about(
            "a record whose bar has closed is dropped, or amends it by a further line while the window still "
            "has the bar (decimal lines only), or goes to the DLQ (refuse)"
        ),
    ] = "drop"
    price_jump: Annotated[
        float,
        about(
            "limit on the factor, up or down, between a symbol's price and the one before it; above 1, or 0 "
            "for no limit",
            ge=0,
        ),
    ] = 10.0
    on_price_jump: Annotated[
        Literal["flag", "refuse"],
        about(
            "a price beyond the limit flags the answers, or goes to the DLQ; ten in a row that "
            "agree are a new price level"
        ),
    ] = "flag"
    venue_lag: Annotated[
        Duration,
        about(
            "of a session with symbols of several venues: how long, by event time, a bar stays open for a "
            "venue that is behind, or quiet; 0s is off"
        ),
    ] = Duration(2 * SECOND)
    ready: Annotated[
        Literal["same", "any"],
        about(
            "which ready-made bars are taken: those of the length `interval`, while others go to the dead "
            "DLQ (same), or bars of any length, as they are"
        ),
    ] = "same"
    dates: Annotated[
        bool,
        about(
            "the times of lines have their date, `2026-11-27 1430`; those of bars of a day or more are dates "
            "anyway (decimal lines only)"
        ),
    ] = False


def _in_place_of(table: str, defaults: type[Table]) -> Any:
    """A struct with the keys of ``defaults``, each of which may be left out and then is that of ``table``."""
    keys = [
        (field.name, Annotated[field.type | None, about(f"in place of `{table}.{field.name}`")], None)
        for field in msgspec.structs.fields(defaults)
    ]
    return defstruct("Own" + defaults.__name__, keys, bases=(Table,), frozen=True, kw_only=True)


def _with_kinds() -> Any:
    """A struct with a key for each kind of fault for which there is a choice; its values are the actions."""
    keys = [
        (kind.name, Annotated[Literal[kind.actions], about(kind.rule)], kind.actions[0])
        for kind in CONFIGURED
    ]
    return defstruct("QualityKinds", keys, bases=(Table,), frozen=True, kw_only=True)


class SplitConfig(Table, frozen=True):
    """A split that was announced: prices behind it are divided by the factor."""

    symbol: Annotated[str, about("VENUE:SYMBOL", pattern=_SYMBOL, max_length=128)]
    at: Annotated[Instant, about("event time of its first price after the split")]
    factor: Annotated[
        float, about("new units for one old unit: 4 for four for one, 0.1 for one for ten", gt=0)
    ]


class CalendarConfig(Table, frozen=True):
    """When a venue is open; one without is always open. Nothing is silent while its venue is closed."""

    venue: Annotated[str, about("as in its symbols, VENUE:SYMBOL", pattern=_VENUE, max_length=64)]
    zone: Annotated[str, about("name of its time zone, such as America/New_York", min_length=1)]
    hours: Annotated[
        tuple[str, ...], about('weekly sessions: "mon-fri 09:30-16:00", over midnight "sun-thu 18:00-17:00"')
    ]
    holidays: Annotated[tuple[str, ...], about("dates on which no session begins, as 2026-12-25")] = ()
    half_days: Annotated[
        tuple[str, ...], about("dates with the time at which the session ends, as 2026-11-27 13:00")
    ] = ()


# with a key for each of `CONFIGURED`, which a type checker cannot see
class QualityConfig(_with_kinds()):  # type: ignore[misc]
    """What is done about faults of feeds: a key for each kind, see [quality](quality.md). `flag`: the record
    is kept, the fault counted, and answers carry the kind as a flag. `count`: the same without a flag.
    `drop`, `dead_letter`: the record is in no bar. `hold`: a reordered record has no flag while
    `bars.lateness` holds its bar open; a bad tick's bar is held open until the next record, and the tick is
    dropped if that comes back.
    """

    bad_tick_band: Annotated[
        float, about("how many typical moves of its symbol a price may be away from the one before", ge=4)
    ] = 30.0
    silence_factor: Annotated[
        float, about("how many times the P99 of its gaps a symbol may be quiet", ge=1)
    ] = 3.0
    silence_floor: Annotated[Duration, about("a symbol that is quiet for less is not silent")] = SECOND
    splits: tuple[SplitConfig, ...] = ()
    calendars: tuple[CalendarConfig, ...] = ()


class EventsConfig(Table, frozen=True):
    """Records that are in no bar, see [events](events.md). `line`: a line of the tape, and at once a new data
    version. `flag`: answers of the next version carry the kind as a flag, as always with compact lines.
    `ignore`: the record is counted, and that is all.
    """

    text: Annotated[Treatment, about("headlines and other words")] = "line"
    status: Annotated[Treatment, about("states of trading; a halt that is ignored halts nothing")] = "line"
    action: Annotated[Treatment, about("splits, dividends and changes of a symbol")] = "line"
    book: Annotated[Treatment, about("best levels of an order book")] = "ignore"
    text_tokens: Annotated[int, about("most tokens of a text in a line; the rest is cut", ge=1, le=1024)] = 48
    on_halt: Annotated[
        Literal["no answers", "flag"],
        about(
            "while a symbol of the session is halted: standing questions are not asked and questions are "
            "refused as `halted`, or answers carry that flag"
        ),
    ] = "no answers"
    on_split: Annotated[
        Literal["line", "reset", "adjust"],
        about(
            "a split is a line as any other action; or with the first bar behind it the window also begins "
            "again: empty, or with its bars in the units behind the split"
        ),
    ] = "line"


class RollupConfig(Table, frozen=True):
    """Longer bars of what has left the window, one table for each length, the shortest first."""

    interval: Annotated[
        Duration,
        about("length of a bar: a multiple of the length before it; the first, of the window's bars"),
    ]
    bars: Annotated[
        int,
        about(
            "most bars of this length, of each symbol; the oldest goes into a bar of the next length, and "
            "from the last length it is dropped",
            ge=1,
        ),
    ]


# with the keys of `bars`, which a type checker cannot see
class SessionSettings(_in_place_of("bars", BarsConfig), kw_only=True):  # type: ignore[misc, call-arg]
    """What a session says about its window, beside what it reads."""

    model: Annotated[str, about('name of the model that reads it; "" is the one of `[model]`')] = ""
    price_scale: Annotated[
        Annotated[int, Meta(ge=0, le=18)] | None,
        about(
            "decimals of a price that are kept: prices up to 9.2e18 units of the last one are exact, and "
            "others are refused. All sessions of a symbol have the same; none is 9, or `price_decimals` if "
            "that is more"
        ),
    ] = None
    signed: Annotated[
        bool,
        about(
            "whether prices may be zero and below, as of spreads, rates and power; decimal lines only. All "
            "sessions of a symbol have the same"
        ),
    ] = False
    volume_decimals: Annotated[int, about("decimals of a volume; decimal lines only", ge=0, le=18)] = 3
    prices_in: Annotated[
        str, about("what prices count, such as `USD a share`, for `model.describe`", max_length=64)
    ] = ""
    volumes_in: Annotated[
        str, about("what volumes count, such as `contracts`, for `model.describe`", max_length=64)
    ] = ""
    lines: Annotated[
        Literal["auto", "decimal", "table", "words", "compact"],
        about(
            "how a bar is written: as decimals, as a row of a table, in words, where each number has its "
            "name, or in groups of three digits around a reference price; auto takes what the model was "
            "trained on, or else decimal"
        ),
    ] = "auto"
    unit: Annotated[
        Fixed,
        about("compact only: finest price step, such as 0.25; 0 is one unit of the last price decimal"),
    ] = Fixed(0)
    retention_tokens: Annotated[
        int, about("longest window, in tokens; the oldest whole bars are evicted", ge=64)
    ] = 4096
    retention_records: Annotated[
        int,
        about(
            "longest window, in bars; 0 is what the model was trained on, or no limit if it says nothing",
            ge=0,
        ),
    ] = 0
    retention_span: Annotated[
        Duration, about("longest window, in event time before its newest bar; 0s is no limit")
    ] = OFF
    semantics: Annotated[
        Literal["carry", "exact"],
        about(
            "carry: bars keep what they absorbed from evicted ones; exact: the window is prefilled again "
            "in the background"
        ),
    ] = "carry"
    refresh_every: Annotated[
        int, about("exact only: refresh after this many evicted bars; 0 refreshes only when idle", ge=0)
    ] = 64
    refresh_idle: Annotated[
        Duration,
        about("exact only: refresh when a bar was evicted and no new one came for this long; 0s is off"),
    ] = Duration(10 * SECOND)
    divergence_every: Annotated[
        Duration,
        about(
            "carry only: how often a fresh window is prefilled to measure the divergence; 0s is never. "
            "exact measures it at every refresh"
        ),
    ] = Duration(3600 * SECOND)
    rollup: tuple[RollupConfig, ...] = ()
    rollup_tokens: Annotated[
        int, about("rollup only: most tokens of the longer bars; the oldest are left out", ge=64)
    ] = 1024
    rollup_every: Annotated[
        int,
        about(
            "rollup only: this many of the oldest bars move out of the window together, in the background, "
            "once it has no room for as many new ones; at most a quarter of it",
            ge=1,
        ),
    ] = 64
    warm_up_records: Annotated[
        int, about("answers carry the flag warm_up until the model has read this many bars", ge=0)
    ] = 10
    stale_after: Annotated[
        Duration, about("answers older than this, since the event, carry the flag stale; 0s is off")
    ] = OFF
    silent_after: Annotated[
        Duration,
        about(
            "answers carry the flag silent when nothing, not even a heartbeat, came from the venue for so "
            "long; 0s is off"
        ),
    ] = OFF
    max_staleness: Annotated[
        Duration | None,
        about(
            "freshness objective: a bar is read this soon after the record that closed it; close to that the "
            "tape goes before asks. The device must have the capacity. By default three bars, or 0s, which "
            "is no objective, where the source waits (source.backlog_policy)"
        ),
    ] = None

    @property
    def summed_tokens(self) -> int:
        """Most tokens of its rollup; 0 where it has none."""
        return self.rollup_tokens if self.rollup else 0

    def bars(self, defaults: BarsConfig) -> BarsConfig:
        """How its records become bars: its own settings, and ``defaults``."""
        names = (f.name for f in msgspec.structs.fields(BarsConfig))
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(defaults, **own)


class SessionConfig(SessionSettings):
    """One symbol, or several, and the window of their bars that the model reads."""

    name: Annotated[str, about("name in answers and metrics", pattern=_NAME, max_length=64)]
    symbol: Annotated[str, about("its records' VENUE:SYMBOL", pattern=_SYMBOL, max_length=128)]
    more_symbols: Annotated[
        tuple[Annotated[str, Meta(pattern=_SYMBOL, max_length=128)], ...],
        about(
            "further symbols whose bars are in the same window, such as the other leg of a spread; each line "
            "then begins with its symbol. Not with compact lines"
        ),
    ] = ()
    price_decimals: Annotated[int, about("decimals of a printed price, at most price_scale", ge=0, le=18)] = 2

    @property
    def scale(self) -> int:
        """Decimals of the unit that its prices count; see `price_scale`."""
        return max(9, self.price_decimals) if self.price_scale is None else self.price_scale

    @property
    def symbols(self) -> tuple[str, ...]:
        """All its symbols, VENUE:SYMBOL."""
        return (self.symbol, *self.more_symbols)


class PatternConfig(SessionSettings):
    """Sessions of symbols that come: a `[[sessions]]` table with `match` in place of `name` and `symbol`.

    It has the keys of any other session beside these. The first pattern that matches a symbol opens its
    session, whose name is the symbol with a hyphen for whatever a name may not have.
    """

    match: Annotated[
        str,
        about(
            "symbols, VENUE:SYMBOL, each of which gets a session when its records come: * is any text, ? any "
            "character, [ab] either of these",
            pattern=_SYMBOL,
            max_length=128,
        ),
    ]
    exclude: Annotated[tuple[str, ...], about("symbols of the same form that get none")] = ()
    max_sessions: Annotated[int, about("most of its sessions, of all daemons of a group together", ge=1)] = (
        100
    )
    least_records: Annotated[
        int,
        about(
            "a session opens with this many records of a symbol within `least_records_within`; those before "
            "are on no tape, and counted",
            ge=1,
        ),
    ] = 1
    least_records_within: Annotated[Duration, about("see `least_records`")] = Duration(60 * SECOND)
    idle_timeout: Annotated[
        Duration, about("a session without records for so long is closed, and opens again; 0s is never")
    ] = OFF
    price_decimals: Annotated[
        Annotated[int, Meta(ge=0, le=18)] | None,
        about(
            "decimals of a printed price; none takes those of the instruments file, or else the most that "
            "the first `least_records` records have"
        ),
    ] = None

    def session(self, name: str, symbol: str, price_decimals: int, **others: object) -> SessionConfig:
        """The session of a symbol; ``others``: settings in place of the pattern's."""
        shared = {field: getattr(self, field) for field in SessionSettings.__struct_fields__}
        own = {"name": name, "symbol": symbol, "price_decimals": price_decimals}
        return SessionConfig(**shared | own | others)

    @property
    def example(self) -> SessionConfig:
        """One such as the pattern opens, which takes as much memory; no session has its name."""
        decimals = max(2, decimals_of(self.unit)) if self.price_decimals is None else self.price_decimals
        return self.session(self.match, "V:SYMBOL", decimals)

    def matches(self, symbol: str) -> bool:
        """Whether it opens a session of this symbol, VENUE:SYMBOL."""
        return fnmatchcase(symbol, self.match) and not any(fnmatchcase(symbol, e) for e in self.exclude)


_Symbol = Annotated[str, Meta(pattern=_SYMBOL, max_length=128)]


class AliasConfig(Table, frozen=True, rename={"from_": "from"}):
    """Other names of a symbol: their records are the symbol's, and sessions read it alone."""

    symbol: Annotated[str, about("VENUE:SYMBOL that sessions read", pattern=_SYMBOL, max_length=128)]
    names: Annotated[
        tuple[_Symbol, ...], about("VENUE:SYMBOL of the records; no session reads it", min_length=1)
    ]
    from_: Annotated[Instant | None, about("event time of the first such record; none is always")] = None
    until: Annotated[
        Instant | None, about("event time of the first record that is no longer the symbol's; none is never")
    ] = None


class ContractConfig(Table, frozen=True, rename={"from_": "from"}):
    """A contract of a continuous one, until the next one's `from`."""

    symbol: Annotated[
        str, about("VENUE:SYMBOL of its records; no session reads it", pattern=_SYMBOL, max_length=128)
    ]
    from_: Annotated[
        Instant,
        about("event time of its first record; but for the first contract a multiple of its sessions' bars"),
    ]


class ContinuousConfig(Table, frozen=True):
    """A contract that is traded on as another one: a session reads them as one symbol."""

    symbol: Annotated[str, about("VENUE:SYMBOL that sessions read", pattern=_SYMBOL, max_length=128)]
    contracts: tuple[ContractConfig, ...]
    roll: Annotated[
        Literal["line", "reset"],
        about(
            "where the next contract begins: line writes a line `roll,ESH7` before its first bar (decimal "
            "lines); reset begins a new window with that bar"
        ),
    ] = "line"


class SymbolsConfig(Table, frozen=True):
    """What is known of symbols beside their records."""

    instruments_file: Annotated[
        str,
        about(
            "CSV or JSON with `symbol` (VENUE:SYMBOL) and any of `tick_size`, `price_decimals`, `lot_size`, "
            "`volume_decimals` and `signed`, for sessions that patterns open; other columns are ignored"
        ),
    ] = ""
    file: Annotated[
        str,
        about(
            "TOML with the tables `[[alias]]` and `[[continuous]]`, whose keys are those of "
            "`[[symbols.alias]]` and `[[symbols.continuous]]` here"
        ),
    ] = ""
    alias: tuple[AliasConfig, ...] = ()
    continuous: tuple[ContinuousConfig, ...] = ()


class QuestionConfig(Table, frozen=True):
    """A standing question, answered for every data version."""

    name: Annotated[str, about("name in answers", pattern=_NAME, max_length=64)]
    text: Annotated[str, about("the question as the model reads it", min_length=1)]
    choices: Annotated[
        tuple[str, ...], about("allowed answers, which must differ in their first token; empty is free text")
    ] = ()
    rule: Annotated[
        str,
        about(
            "file of the same question with its rule (see questions): answers get their labels from it as "
            'bars close, and choice sets follow; "" is none'
        ),
    ] = ""
    pack: Annotated[
        str,
        about(
            "file of the question pack that answers it (see questions), or FILE@REVISION; text and choices "
            'are the pack\'s; "" is none'
        ),
    ] = ""
    max_tokens: Annotated[int, about("longest free-text answer, in tokens", ge=1)] = 8
    answer: Annotated[AnswerForm, about("form of a free-text answer: any text, or a decimal number only")] = (
        "text"
    )
    sessions: Annotated[
        tuple[str, ...],
        about("sessions that answer it, by name or, as in `match`, by a pattern; empty is all"),
    ] = ()
    publish_when: Annotated[
        PublishWhen,
        about(
            "which answers are published: always all; changed, those that differ from the last published "
            "one; confident, those at least as sure as below; crossed, numbers that went from one side of "
            "`level` to the other; every, one in that many data versions; never, none, but asks "
            "still get them"
        ),
    ] = "always"
    min_probability: Annotated[
        float, about("confident only: least calibrated probability of the choice", ge=0, le=1)
    ] = 0.8
    min_logit_gap: Annotated[
        float, about("confident only: least logit gap of an answer without a calibration", ge=0)
    ] = 2.0
    level: Annotated[Fixed, about("crossed only: the number that answers cross")] = Fixed(0)
    publish_every: Annotated[
        int, about("every only: data versions from one published answer to the next", ge=1)
    ] = 1
    ask_every_bars: Annotated[
        int, about("asked again after this many bars; 1 is every data version", ge=1)
    ] = 1
    ask_every: Annotated[
        Duration,
        about("asked of the first data version in each such period of event time instead; 0s is off"),
    ] = OFF
    provisional: Annotated[
        bool,
        about(
            "asked behind the session's open bars as well, which stay off its window; such answers carry the "
            "flag provisional, and no probability"
        ),
    ] = False
    max_error: Annotated[
        Annotated[float, Meta(gt=0, lt=0.5)] | None,
        about(
            "answers are marked `act` only where at most this share of those marked is wrong (see accuracy); "
            "needs choices; none marks none"
        ),
    ] = None
    engine_share: Annotated[
        float,
        about(
            "share of the engine's time that it may take, over all its sessions; while that is used up it "
            "skips data versions; 0 is any",
            ge=0,
            le=1,
        ),
    ] = 0.0
    answer_within: Annotated[
        Duration,
        about(
            "deadline, from the receipt of a version's newest record: a question that cannot be answered by "
            "then, as predicted from its pass or because the time is up, is skipped and counted; 0s is none"
        ),
    ] = OFF


class ClauseConfig(Table, frozen=True):
    """What must hold of one question's answers, all that is said here at once."""

    question: Annotated[str, about("name of the standing question", min_length=1)]
    session: Annotated[str, about('session that is asked; "" is the signal\'s own')] = ""
    answer: Annotated[
        tuple[str, ...],
        about(
            "the answer is one of these; an answer that says the question is undefined counts if it is named"
        ),
    ] = ()
    changed: Annotated[bool, about("the answer differs from the one before; it holds for one answer")] = False
    before: Annotated[
        tuple[str, ...], about("changed only: the one before was one of these; empty is any")
    ] = ()
    above: Annotated[
        Fixed | None, about("the answer is a number, at this level or above it: it has crossed it upwards")
    ] = None
    below: Annotated[Fixed | None, about("the answer is a number below this level")] = None
    min_probability: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        about("the answer has at least this calibrated probability"),
    ] = None
    rearm: Annotated[
        Fixed | None,
        about(
            "second threshold, on the other side of `above`, `below` or, without them, `min_probability`: "
            "once the clause holds, it does until the answer passes this one, and cannot fire again before"
        ),
    ] = None
    for_bars: Annotated[
        int, about("answers in a row of which all this holds, one for each data version", ge=1)
    ] = 1


class SignalConfig(Table, frozen=True):
    """What is to be acted on: a condition over published answers, see signals."""

    name: Annotated[str, about("name in signals", pattern=_NAME, max_length=64)]
    when: Annotated[tuple[ClauseConfig, ...], about("clauses that hold at once")] = ()
    sessions: Annotated[
        tuple[str, ...],
        about("sessions that have this signal, each its own, by name or pattern; empty is all"),
    ] = ()
    cooldown: Annotated[
        Duration, about("event time after a signal in which the next one is suppressed; 0s is none")
    ] = OFF
    cooldown_bars: Annotated[
        int, about("data versions after a signal in which the next one is suppressed", ge=0)
    ] = 0
    withheld_by: Annotated[
        tuple[Flag, ...], about("flags of answers that count as undefined: neither met nor not met")
    ] = ("abstained", "untrained", "warm_up", "stale", "silent", "halted", "incomplete")


class WebhookConfig(Table, frozen=True):
    """Where signals are posted to, signed as Standard Webhooks says; see signals."""

    name: Annotated[str, about("name in metrics, and of its files", pattern=_NAME, max_length=64)]
    url: Annotated[
        str, about("http:// or https:// address; nothing else is called, and no redirect followed")
    ]
    secret_file: Annotated[
        str,
        about(
            "secrets, `whsec_` and base64, a line each: a request is signed by each; only its owner may "
            "read the file",
            min_length=1,
        ),
    ]
    signals: Annotated[tuple[str, ...], about("names of the signals that it gets; empty is all")] = ()
    timeout: Annotated[Duration, about("longest time of a request")] = Duration(10 * SECOND)
    max_attempts: Annotated[
        int,
        about("attempts before a signal is given up: 12, with their pauses, take 9 to 19 minutes", ge=1),
    ] = 12
    max_waiting: Annotated[
        int, about("most signals that wait; further ones become DLQ records", ge=1, le=100_000)
    ] = 1000


class FlashConfig(Table, frozen=True):
    """How standing questions are asked."""

    placement: Annotated[
        Literal["ephemeral", "frozen"],
        about(
            "where their text stands: ephemeral asks each in full, behind the bars; frozen numbers them in "
            "the frozen prefix and asks only for the number, which costs less"
        ),
    ] = "ephemeral"
    early_exit: Annotated[
        float,
        about(
            "logit gap (tau) above which an ask is answered at once, without the engine, with the choice "
            "that the model favours before it reads any question, with the flag `ready_exit`; *Attention "
            "Once* uses 2.0. 0 is off, the default, because such an answer is blind to the question. Of "
            "asks whose choices are all choices of the session's standing questions",
            ge=0,
        ),
    ] = 0.0
    every_bar: Annotated[
        bool,
        about(
            "answer every bar by itself, as for a backtest: the next one waits until its session's questions "
            "are answered, also free text, and its window is refreshed, and the source waits if it can. "
            "Deadlines (`answer_within`) pass meanwhile"
        ),
    ] = False
    standing_after: Annotated[
        int,
        about(
            "an ad hoc question that is asked so often within `standing_window` becomes a standing one, "
            "which is not published, for as long as it is; all who see the session see it. 0 is off",
            ge=0,
            le=10_000,
        ),
    ] = 0
    standing_window: Annotated[Duration, about("see `standing_after`")] = parse_duration("10m")
    standing_most: Annotated[int, about("most such questions of a session", ge=1, le=100)] = 8
    max_packs: Annotated[
        int,
        about(
            "most question packs by which a model answers; each takes memory for a second set of its layers' "
            "weights",
            ge=1,
            le=4096,
        ),
    ] = 64


def _with_tables(name: str, connectors: Mapping[str, type[Connector]]) -> Any:
    """A struct with an optional table for each connector."""
    tables = [(key, connector | None, None) for key, connector in connectors.items()]
    return defstruct(name, tables, bases=(Table,), frozen=True)


if TYPE_CHECKING:
    _Kind = str
    _Set = str
else:
    _Set = Annotated[
        Literal[tuple(SETS)],
        about(
            "standing questions in addition to `[[questions]]`: the six of *Attention Once* section 4.3, or "
            "those of a [plug-in](plugins.md)"
        ),
    ]
    _Kind = Annotated[
        Literal[(*SOURCES, "none")],
        about("which of the tables below to use; a table all of whose keys have defaults may be left out"),
    ]


def required_keys(table: type[msgspec.Struct]) -> tuple[str, ...]:
    """The keys of ``table`` that have no default."""
    return tuple(field.encode_name for field in msgspec.structs.fields(table) if field.required)


# the modules of feeds.connectors define the base's fields: a type checker cannot see them
class SourceConfig(_with_tables("SourceTables", SOURCES)):  # type: ignore[misc]
    """Where records come from."""

    kind: _Kind = "none"
    ring_capacity: Annotated[
        int, about("records between feed and engine; a power of two", ge=64, le=2**24)
    ] = 65536
    max_ahead: Annotated[
        Duration,
        about(
            "a record stamped further ahead of this machine's clock is refused; otherwise every later "
            "record would count as late"
        ),
    ] = Duration(3600 * SECOND)
    sequence: Annotated[
        Literal["none", "symbol", "venue"],
        about(
            "what the `seq` of records counts: each symbol's records, or all of a venue's; a number that is "
            "missing is a gap then. Records are decoded one by one for it"
        ),
    ] = "none"
    max_message_bytes: Annotated[
        int, about("longest message; longer ones are refused without decoding", ge=256)
    ] = 1 << 20

    backlog_policy: Annotated[
        Literal["auto", "skip", "wait"],
        about(
            "what happens to a session with more bars than the engine can read: skip, bars that its window "
            "could no longer show are skipped and the next answers carry the flag gap; wait, every bar "
            "is read and the source waits for the slowest session. auto is skip for Kafka and ZeroMQ, wait "
            "for a replayed file"
        ),
    ] = "auto"

    @property
    def connector(self) -> SourceConnector | None:
        """The table that `kind` names, which may be left out where every key has a default; None for none."""
        connector: SourceConnector | None = getattr(self, self.kind, None)
        if connector is None and self.kind in SOURCES and not required_keys(SOURCES[self.kind]):
            return SOURCES[self.kind]()
        return connector


# as above
class NamedSource(_with_tables("NamedSourceTables", SOURCES), kw_only=True):  # type: ignore[misc, call-arg]
    """A source beside `[source]`, by one table of a connector: `[sources.kafka]` below its `[[sources]]`."""

    name: Annotated[
        str, about("name in metrics, health and the inputs of answers", pattern=_NAME, max_length=64)
    ]

    @property
    def tables(self) -> dict[str, SourceConnector]:
        """The tables that are present, by name."""
        return {name: connector for name in SOURCES if (connector := getattr(self, name)) is not None}


class SinkConfig(_with_tables("SinkTables", SINKS)):  # type: ignore[misc]  # as above
    """Where answers go; each table that is present is used."""

    @property
    def connectors(self) -> dict[str, SinkConnector]:
        """The tables that are present, by name."""
        return {name: connector for name in SINKS if (connector := getattr(self, name)) is not None}


def _check_tables() -> None:
    """Raises PluginError where a connector's name is that of a key beside its table."""
    for beside, connectors in ((SourceConfig, SOURCES), (NamedSource, SOURCES), (SinkConfig, SINKS)):
        for name in beside.__annotations__.keys() & connectors.keys():
            raise PluginError(f"a plug-in has the connector {name!r}, which is a key of the same table")
    if "none" in SOURCES:
        raise PluginError("a plug-in has the source 'none', which stands for no source")


_check_tables()


class QueryConfig(Table, frozen=True):
    """The ZeroMQ query socket, and limits on its clients."""

    endpoint: Annotated[str, about('address to bind; "" turns the socket off', pattern=_OFF_OR_SOCKET)] = (
        "tcp://127.0.0.1:7801"
    )
    advertise: Annotated[
        str,
        about(
            "address by which other daemons of the consumer group reach this socket; by default the bound "
            "one, or none where that is every address",
            pattern=_OFF_OR_SOCKET,
        ),
    ] = ""
    forward: Annotated[
        bool,
        about(
            "a request about a session that another daemon of the group serves is forwarded to it, and its "
            "events are passed on; otherwise a request is refused with that daemon's address"
        ),
    ] = True
    secret_key_file: Annotated[
        str,
        about(
            "NAME.secret of `foretick keys NAME`; only its owner may read the file. Clients then connect by "
            "CURVE, with keys of the tenants file. Daemons of one consumer group have the same key"
        ),
    ] = ""
    max_wait: Annotated[Duration, about("longest wait for a reply")] = Duration(30 * SECOND)
    max_requests: Annotated[
        int, about("most requests that are answered at a time over ZeroMQ, and as many over HTTP", ge=1)
    ] = 256
    max_requests_each: Annotated[
        int, about("most of them over one ZeroMQ connection; clients learn it from `hello`", ge=1)
    ] = 128
    max_prompts: Annotated[
        int, about("most prompts open at a time, including those over HTTP; 0 refuses all", ge=0)
    ] = 256
    max_prompts_each: Annotated[int, about("most prompts open at a time per client", ge=1)] = 64


class HttpConfig(Table, frozen=True):
    """Metrics, health, the live page and the HTTP API."""

    host: Annotated[
        str, about("address to bind; one that other machines reach needs `tenants.file`", min_length=1)
    ] = "127.0.0.1"
    port: Annotated[int, about("port to bind; 0 picks a free one", ge=0, le=65535)] = 7800
    max_listeners: Annotated[
        int,
        about(
            "most clients that listen to events at a time, over HTTP and ZeroMQ together; each open "
            "WebSocket is one",
            ge=0,
        ),
    ] = 4096
    kept_events: Annotated[
        int,
        about(
            "events kept for listeners that come back, of each daemon of a group, and most that wait for one "
            "listener that reads slowly",
            ge=16,
            le=1 << 20,
        ),
    ] = 4096
    kept_versions: Annotated[
        int,
        about(
            "newest data versions of each session, with price and answers, that are kept in memory for the "
            "live page and `GET /v1/sessions/{session}/versions`; 0 keeps none",
            ge=0,
            le=1 << 14,
        ),
    ] = 300
    max_messages: Annotated[
        int, about("most messages a second over one WebSocket; twice as many may come at once", ge=1)
    ] = 200
    tls_certificate_file: Annotated[
        str, about("certificate in PEM, with those between it and its root; then only HTTPS is served")
    ] = ""
    tls_key_file: Annotated[str, about("the certificate's private key in PEM, without a password")] = ""
    allowed_origins: Annotated[
        tuple[str, ...],
        about(
            "web pages of these origins, such as https://desk.example:8443, may use the API by fetch, "
            "EventSource and WebSocket; where there are tenants they send a key as every client does"
        ),
    ] = ()
    mcp: Annotated[
        bool, about("serve agents at /mcp; needs the MCP SDK, which `pip install 'foretick[mcp]'` brings")
    ] = False


class TenantsConfig(Table, frozen=True):
    """Who may ask. Without a file: every program of this machine, and no other."""

    file: Annotated[
        str,
        about(
            "TOML file of the tenants and their keys, described at the end of this page; with it every "
            "request needs a key, those of this machine too. It is read again at SIGHUP"
        ),
    ] = ""


class ProcessConfig(Table, frozen=True):
    """The daemon's processes."""

    mode: Annotated[
        Literal["two", "inproc"],
        about("two: the engine has its own process; inproc: it shares the gateway's (for tests)"),
    ] = "two"
    reserve_core: Annotated[
        bool,
        about(
            "two only: the gateway runs on the first CPU that the daemon may use, the engine on the others; "
            "needs Linux and two CPUs"
        ),
    ] = False
    spare_engine: Annotated[
        bool | None,
        about(
            "two only: another engine process waits, with its libraries and, on a CPU, the model loaded, and "
            "takes over when the engine ends. none: where there is memory for it beside the pool; true: in "
            "any case"
        ),
    ] = None
    max_loading: Annotated[
        Duration,
        about(
            "longest time from an engine's start until it is ready; then another one is started. A large "
            "model on a slow disk, or many windows that are read again, may need more"
        ),
    ] = Duration(600 * SECOND)
    drain: Annotated[Duration, about("longest time to stop")] = Duration(10 * SECOND)


class RecoveryConfig(Table, frozen=True):
    """How sessions come back after a restart: from snapshots, and from the source's log behind them."""

    interval: Annotated[
        Duration,
        about("least time between two snapshots of a session, which are taken if it changed; 0s is never"),
    ] = Duration(60 * SECOND)
    directory: Annotated[
        str,
        about(
            "directory of the snapshots and, for sources without a log, of how far their sessions are "
            'answered; "" is `snapshots` in the state directory that systemd gives, or else in the cache '
            "directory"
        ),
    ] = ""
    max_bytes: Annotated[
        int,
        about(
            "most bytes of all snapshots; the older one of a session goes first, and without room for a new "
            "one none is written",
            ge=0,
        ),
    ] = 16 << 30
    while_rebuilding: Annotated[
        Literal["warm_up", "refuse"],
        about(
            "what becomes of clients' questions while bars that were answered before the restart are read "
            "again: warm_up, they are answered from the data that is there, with the flag; refuse, they fail "
            "with `rebuilding`"
        ),
    ] = "warm_up"
    reread_records: Annotated[
        int,
        about(
            "how many records before a partition's committed offset a window without a usable snapshot may "
            "begin; for one that begins earlier, only as much time is read again as a full window without "
            "empty intervals spans",
            ge=0,
        ),
    ] = 1_000_000
    standby: Annotated[
        bool,
        about(
            "this daemon is a standby while another one of its consumer group answers: it keeps the windows, "
            "publishes and commits nothing, and takes over when the other one is gone; needs one Kafka "
            "source. Set it in both daemons"
        ),
    ] = False

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(self.directory) if self.directory else state_home() / "snapshots"


class LogConfig(Table, frozen=True):
    """What is logged, to standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], about("lowest severity to log")] = "info"
    json: Annotated[bool, about("log JSON lines instead of text")] = False


class TracesConfig(Table, frozen=True):
    """Traces of answers and requests: what `foretick trace` shows, and export to OpenTelemetry."""

    kept: Annotated[
        int,
        about(
            "of how many answers, and of as many requests, the newest traces are kept in memory",
            ge=1,
            le=1_000_000,
        ),
    ] = 1000
    endpoint: Annotated[
        str,
        about('where traces go in OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; "" exports none'),
    ] = ""
    headers_file: Annotated[
        str,
        about("headers of the requests, a line each, such as a key; only its owner may read the file"),
    ] = ""
    sample_ratio: Annotated[
        float,
        about(
            "share of the traces that are exported; a caller's own flag decides for its traces", ge=0, le=1
        ),
    ] = 1.0
    service_name: Annotated[str, about("`service.name` of the resource", min_length=1)] = "foretick"
    resource: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[^=\s]+=.*$")], ...],
        about("further attributes of the resource, each KEY=VALUE, such as `service.namespace=desk`"),
    ] = ()


class Config(Table, frozen=True):
    """The whole file."""

    standing: _Set = "paper_six"
    model: ModelConfig = ModelConfig()
    models: tuple[NamedModel, ...] = ()
    pool: PoolConfig = PoolConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    bars: BarsConfig = BarsConfig()
    quality: QualityConfig = QualityConfig()
    events: EventsConfig = EventsConfig()
    sessions: tuple[SessionConfig, ...] = ()
    patterns: tuple[PatternConfig, ...] = ()
    symbols: SymbolsConfig = SymbolsConfig()
    questions: tuple[QuestionConfig, ...] = ()
    signals: tuple[SignalConfig, ...] = ()
    webhooks: tuple[WebhookConfig, ...] = ()
    flash: FlashConfig = FlashConfig()
    source: SourceConfig = SourceConfig()
    sources: tuple[NamedSource, ...] = ()
    sink: SinkConfig = SinkConfig()
    query: QueryConfig = QueryConfig()
    http: HttpConfig = HttpConfig()
    tenants: TenantsConfig = TenantsConfig()
    process: ProcessConfig = ProcessConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    log: LogConfig = LogConfig()
    traces: TracesConfig = TracesConfig()

    @property
    def all_sessions(self) -> tuple[SessionConfig, ...]:
        """The sessions, and one such as each pattern opens."""
        return (*self.sessions, *(each.example for each in self.patterns))

    def model_of(self, session: SessionSettings) -> ModelConfig:
        """The model that reads a session or a pattern's."""
        return next((each for each in self.models if each.name == session.model), self.model)

    @property
    def skips(self) -> bool:
        """What `source.backlog_policy` says of these sources; those that can wait decide for all. Not where
        every bar is to be answered.
        """
        if self.flash.every_bar:
            return False
        if self.source.backlog_policy != "auto":
            return self.source.backlog_policy == "skip"
        connectors = [connector for _, connector in self.feeds.values()]
        return bool(connectors) and all(connector.live for connector in connectors)

    @property
    def opens_by_partition(self) -> bool:
        """Whether a session is open only while its records are read here: all sources are logs that daemons
        of a group divide among them, and none of these is a standby, which has all sessions.
        """
        connectors = [connector for _, connector in self.feeds.values()]
        return bool(connectors) and all(each.rereads for each in connectors) and not self.recovery.standby

    def freshness_objective_ns(self, session: SessionConfig) -> int:
        """A session's freshness objective, ns; 0: none."""
        if session.max_staleness is not None:
            return int(session.max_staleness)
        return FRESH_BARS * session.bars(self.bars).interval if self.skips else 0

    @property
    def feeds(self) -> dict[str, tuple[str, SourceConnector]]:
        """Name and settings of every source, by the dotted key of its table."""
        found: dict[str, tuple[str, SourceConnector]] = {}
        if self.source.connector is not None:
            found[f"source.{self.source.kind}"] = self.source.kind, self.source.connector
        for index, source in enumerate(self.sources):
            for kind, connector in source.tables.items():
                found[f"sources[{index}].{kind}"] = source.name, connector
        return found
