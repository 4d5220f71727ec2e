"""Every message that crosses a topic or a socket: records in, answers out.

Structs are frozen and tagged by their ``type`` member, in JSON and in msgpack alike. Times are integer
nanoseconds since the Unix epoch. Prices and sizes are ``Fixed`` (an int counting 1e-18); on the wire they are
decimal strings. Of others' messages, numbers of JSON and integers of msgpack (which count 1e-9) are read as
well. Unknown members are ignored, so fields may be added without breaking readers.
"""

from typing import Literal

import msgspec

from feeds.decimals import Fixed

Unit = Literal["base", "quote", "contracts", "shares", "lots"]
Side = Literal["buy", "sell", "unknown"]
Clock = Literal["exchange", "receive"]
"""Whose clock stamped ``ts_event``: ``receive`` if the venue sends no time."""

Flag = Literal[
    "stale", "gap", "warm_up", "skewed_clock", "untrained", "rounded", "abstained", "replay", "amended",
    "price_jump", "silent", "provisional", "late", "incomplete",
    "reordered", "crossed", "locked", "one_sided", "zero_size", "overlapping", "close_stamped", "duplicate",
    "bad_tick", "split_like", "split", "rolled", "halted", "text", "action", "backfill",
]  # fmt: skip
ZERO = Fixed(0)


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Members of every market data record. ``seq`` is the source's own sequence number (0: none)."""

    venue: str
    symbol: str
    ts_event: int
    ts_recv: int
    seq: int = 0
    clock: Clock = "exchange"

    @property
    def key(self) -> str:
        """The Kafka key, ``VENUE:SYMBOL``."""
        return f"{self.venue}:{self.symbol}"

    @property
    def skewed(self) -> bool:
        """True when the receive time is before the event time: one of the two clocks is wrong."""
        return self.ts_recv < self.ts_event


class Trade(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="trade"):
    """One execution. ``side`` is the aggressor's; ``id`` is the venue's trade id."""

    price: Fixed
    size: Fixed
    unit: Unit = "base"
    side: Side = "unknown"
    id: str = ""


class Quote(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="quote"):
    """Best bid and ask; a size of 0 means the venue does not publish it."""

    bid: Fixed
    ask: Fixed
    bid_size: Fixed = ZERO
    ask_size: Fixed = ZERO
    unit: Unit = "base"


class Bar(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="bar"):
    """A ready-made bar of ``interval_ns``; ``ts_event`` is its opening time."""

    open: Fixed
    high: Fixed
    low: Fixed
    close: Fixed
    volume: Fixed
    interval_ns: int
    unit: Unit = "base"


EVERY_SYMBOL = "*"


class VenueHeartbeat(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="heartbeat"):
    """The venue lives and has sent everything up to ``ts_event`` of this symbol, or of all (`EVERY_SYMBOL`).

    ``seq`` is the number of the newest record before it.
    """


class Text(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="text"):
    """Words about a symbol, or all of a venue (`EVERY_SYMBOL`, as of the records below): a headline.

    ``id``: of who sent it. In a line, what is no printable character is a blank.
    """

    text: str
    id: str = ""


State = Literal["halt", "resume", "auction", "close", "open"]


class Status(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="status"):
    """Trading of a symbol is in this state from ``ts_event`` on; ``reason``: in the venue's words."""

    state: State
    reason: str = ""


Corporate = Literal["split", "dividend", "symbol_change"]
ABOUT: dict[Corporate, str] = {"split": "factor", "dividend": "amount", "symbol_change": "new_symbol"}
"""The member that an action of each kind needs."""


class Action(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="action"):
    """A corporate action. ``effective``: when it takes effect, ns, if not at ``ts_event``.

    ``factor``: of a split, new units for one old unit; ``amount``: of a dividend; ``new_symbol``.
    """

    action: Corporate
    factor: Fixed | None = None
    amount: Fixed | None = None
    new_symbol: str = ""
    effective: int = 0


class Book(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag="book"):
    """The best levels of an order book, price and size, the best first. One side may be empty."""

    bids: list[tuple[Fixed, Fixed]]
    asks: list[tuple[Fixed, Fixed]]


AnyRecord = Trade | Quote | Bar
Event = Text | Status | Action | Book
"""Records that are in no bar."""
Recorded = AnyRecord | Event
"""What a declared format can read."""
Received = Trade | Quote | Bar | VenueHeartbeat | Event
"""What a source sends."""


class InputRange(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The records of one partition behind a data version, both offsets inclusive.

    ``source``: whose topic it is, where there are several sources.
    """

    topic: str
    partition: int
    first_offset: int
    last_offset: int
    source: str = ""


class Latency(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where the time of one answer was spent, in nanoseconds."""

    ring_wait_ns: int = 0
    bars_ns: int = 0
    tokenise_ns: int = 0
    queue_ns: int = 0
    forward_ns: int = 0
    total_ns: int = 0


class Basis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the state behind an answer was made of, so that it can be made again.

    ``config``: hash of the settings that it depends on. ``bars``: in the answer's version. ``window``: the
    records of the ``window_bars`` bars that the tape holds, first to last of each partition; the first is 0
    where it is not known. ``state``: the same of the ``state_bars`` bars that their KV depends on: those, and
    bars evicted since the state began; empty where that is not known. ``anchor``: of compact lines:
    reference, unit and volume, as decimal text. ``left``: bars left the window that the state began with
    while it was prefilled, which one bar after the other can't repeat. ``since_gap``: bars since records were
    last lost or skipped among those of ``state``, counted from the first one behind; 0 where none were.
    """

    config: str = ""
    bars: int = 1
    window_bars: int = 0
    window: list[InputRange] = []
    state_bars: int = 0
    state: list[InputRange] = []
    anchor: list[str] = []
    left: bool = False
    since_gap: int = 0


class AnswerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What every answer says of the data that it was read from, and of how sure it is.

    ``as_of`` is the event time of the newest record in the data version; the three ages are that record's.
    ``uncalibrated``: why ``probability`` and ``choice_set`` are null (see `flash.confidence.UNCALIBRATED`).
    ``act``: of a question with `max_error`, whether that is kept if this answer is acted on, and
    ``abstain_reason`` why not (see `flash.acting`).
    ``logit_gap`` is of the first token. Without a session the members about data are null.
    """

    session: str | None = None
    data_version: int | None = None
    as_of: int | None = None
    staleness_ns: int | None = None
    source_age_ns: int | None = None
    daemon_age_ns: int | None = None
    choice: str | None = None
    probability: float | None = None
    choice_set: tuple[str, ...] | None = None
    uncalibrated: str | None = None
    act: bool | None = None
    abstain_reason: str | None = None
    logit_gap: float = 0.0
    untrained: bool = False
    flags: tuple[str, ...] = ()


class Answer(AnswerMetadata, frozen=True, kw_only=True, tag="answer"):
    """The answer to one question about one session, with everything needed to judge it.

    ``as_of`` is the event time of the newest record in the data version, and ``staleness_ns`` its age since
    then, by the venue's clock; of a replay, since it was sent. ``source_age_ns`` counts from when the broker
    or socket had that record, ``daemon_age_ns`` from when this daemon received it. ``logit_gap`` is the best
    logit minus the second best over the choices (or the vocabulary). Where there is a calibration,
    ``probability`` is the choice's, and ``choice_set`` has the choices that can't be excluded, likeliest
    first. ``choice`` is None for free text, ``value`` for text that is not a number.
    Preemption dropped ``recomputed_tokens`` and moved ``swapped_tokens`` to the host and back.
    ``answer_id`` names the question and the newest inputs: the same answer, published again, has it again.
    ``sequence`` numbers the session's published answers from 1 within the life of an engine, ``epoch``.
    """

    session: str
    data_version: int
    as_of: int
    staleness_ns: int = 0
    source_age_ns: int = 0
    daemon_age_ns: int = 0
    flags: tuple[Flag, ...] = ()
    symbol: str
    question: str
    question_hash: str
    answer_id: str = ""
    epoch: int = 0
    sequence: int = 0
    text: str
    value: str | None = None
    inputs: list[InputRange] = []
    model: str
    model_revision: str
    latency: Latency
    reused_tokens: int
    computed_tokens: int
    published_at: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    basis: Basis | None = None


class SignalCause(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The answer that a clause of a signal was read from last."""

    session: str
    question: str
    answer_id: str
    data_version: int
    text: str
    value: str | None = None
    probability: float | None = None


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag="signal"):
    """A condition of the configuration begins to hold at a session's data version.

    ``name``: of the condition; ``session`` has the answer that came last, ``owner`` is the one that has the
    signal. ``bar``: opening of the newest bar (ns), -1 where none is known; ``as_of``: event time of the
    newest record. ``close``: of the newest bar of the session's first symbol, as decimal text, None where the
    version has none. ``answers``: of the clauses, in their order. ``signal_id`` follows from the answers with
    which the clauses began to hold: the same signal, published again, has it again.
    """

    session: str
    name: str
    owner: str
    signal_id: str
    symbol: str
    data_version: int
    as_of: int
    bar: int
    close: str | None
    answers: list[SignalCause]
    epoch: int = 0
    published_at: int = 0


class DataUpdated(msgspec.Struct, frozen=True, kw_only=True, tag="data_updated"):
    """A session reached ``data_version``, which has ``bars`` more bars than the one before."""

    session: str
    data_version: int
    as_of: int
    bars: int
    epoch: int = 0


class FlashReady(msgspec.Struct, frozen=True, kw_only=True, tag="flash_ready"):
    """Every question that was due at ``data_version`` has its result; ``answers`` of them were answered."""

    session: str
    data_version: int
    as_of: int
    answers: int
    epoch: int = 0


Stage = Literal["read", "process", "produce"]
"""Where a message became a DLQ record: decoding, a session that refused it, or a sink that did."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, tag="dead_letter"):
    """A message that could not be used, as it was. Bytes are base64 text in JSON, raw in msgpack.

    ``topic``, ``partition``, ``offset``: where it was; of an answer that a sink refused, its topic, and -1.
    ``source``: whose topic it is, where there are several sources.
    ``payload``: its first bytes, of ``size``. ``rebuilt``: its bytes were no longer at hand, so ``payload``
    is the record in JSON again, without key and headers. ``failed_at``: wall clock.
    """

    error: str
    reason: str
    topic: str
    partition: int
    offset: int
    payload: bytes
    stage: Stage = "read"
    source: str = ""
    key: bytes | None = None
    headers: dict[str, bytes] = {}
    size: int = -1
    rebuilt: bool = False
    failed_at: int = 0

    @property
    def whole(self) -> bool:
        """The payload is not cut."""
        return self.size <= len(self.payload)


class Redriven(msgspec.Struct, frozen=True, kw_only=True, tag="redriven"):
    """A note in the DLQ topic: the record at ``partition`` and ``offset`` is sent again, to ``to``.

    Written before it is sent (``claimed``) and after. The first claim of a record counts: ``claim`` tells
    whose it is.
    """

    partition: int
    offset: int
    to: str
    claim: str
    state: Literal["claimed", "sent"]
    at: int


AnyMessage = Received | Answer | Signal | DataUpdated | FlashReady | DeadLetter | Redriven
