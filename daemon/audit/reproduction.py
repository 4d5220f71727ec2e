"""An answer derived again from the records it was read from.

What must be equal is checked first: the model and its revision, the settings (`Basis.config`), the question.
Then the records of its state are read, from the first that it depends on (`Basis.state`) to the last of its
version, and a session is made from them (`daemon.audit.session_replay`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec

from daemon.audit.broker import Broker, logs_of
from daemon.audit.file_log import FileLog
from daemon.audit.recorded_history import of_partitions
from daemon.audit.session_replay import End, Replay, ReplayedVersion
from daemon.audit.snapshot_reader import Stream, below, starts, stream_of
from daemon.audit.stepped_engine import ONE
from daemon.config.fingerprint import fingerprint, settings_of
from daemon.config.schema import Config, SessionConfig
from daemon.config.standing import questions_of
from daemon.engine.build import Built
from daemon.engine.snapshot_store import UsableSnapshot
from feeds.kafka_range import OffsetsGone
from feeds.market_data import Answer, Basis
from ingest.compact import Anchor
from ingest.record import stream_number
from regions.offload.snapshot_format import SnapshotError

Says = Literal["reproduced", "agrees", "differs"]


class CannotReproduce(Exception):
    """The answer cannot be derived again, or not with this configuration; says why, and what would help."""


@dataclass(frozen=True)
class ReadPlan:
    """What is read: a span of offsets by source and partition.

    ``begins``: see `Replay`. ``notes``: what the replay does not repeat. ``asked``: somebody named the start,
    so no snapshot takes the place of what the log no longer has. ``bars``: how many the answer has up to
    there, -1 where that is not known.
    """

    spans: Mapping[Stream, range]
    begins: tuple[Anchor, int] | None = None
    notes: tuple[str, ...] = ()
    asked: bool = False
    bars: int = -1


@dataclass(frozen=True)
class Derived:
    """The answer's ``version``, made again; None where the records make no bar that ends as it did.

    ``snapshot``: the file that it stands on, where the log does not go back as far as its state. ``notes``:
    see `ReadPlan`.
    """

    version: ReplayedVersion | None
    notes: tuple[str, ...] = ()
    snapshot: str = ""


@dataclass(frozen=True)
class ReproductionVerdict:
    """``says``: reproduced; or the answer agrees, but ``notes`` say what was not repeated; or it differs.

    ``gap``: the logit gap as derived; ``apart`` from the answer's, of which ``tolerance`` is rounding.
    """

    says: Says
    text: str
    gap: float
    apart: float
    tolerance: float
    bits: bool
    """Text and logit gap are equal to the last bit."""
    notes: tuple[str, ...] = field(default=())
    snapshot: str = ""
    """What is before it was not derived again: see `Derived`."""


def basis_of(config: Config, answer: Answer) -> tuple[SessionConfig, Basis]:
    """The answer's session and basis. Raises CannotReproduce where answer and configuration do not fit."""
    session = next((each for each in config.sessions if each.name == answer.session), None)
    if session is None:
        raise CannotReproduce(f"the configuration has no session {answer.session!r}")
    if answer.basis is None or not answer.basis.config:
        raise CannotReproduce("the answer does not say what it was made of: an older version published it")
    if "provisional" in answer.flags:
        raise CannotReproduce(
            "the question stood behind open bars (provisional), and which records they had is not published"
        )
    asked = [each.question for each in questions_of(config) if each.session == answer.session]
    found = fingerprint(config, session, asked)
    if found != answer.basis.config:
        names = ", ".join(settings_of(config, session, asked))
        raise CannotReproduce(
            f"the configuration is another one than answered: its hash is {found}, the answer's "
            f"{answer.basis.config}. It is made of {names}"
        )
    if not any((q.name, q.hash) == (answer.question, answer.question_hash) for q in asked):
        others = [q.pack for q in asked if q.name == answer.question and q.pack]
        missing = "; one that was set while the daemon ran is missing in [[questions]]"
        why = f": it is answered by another question pack, {others[0]}" if others else missing
        raise CannotReproduce(
            f"the session has no standing question {answer.question!r} with the hash "
            f"{answer.question_hash}{why}"
        )
    if not answer.inputs:
        raise CannotReproduce("the answer names no records: its version was made without any")
    return session, answer.basis


def check_model(built: Built, answer: Answer) -> None:
    """Raises CannotReproduce for another model or revision."""
    loaded = built.loaded
    for name, found, said in (
        ("model", loaded.name, answer.model),
        ("revision of the model", loaded.revision, answer.model_revision),
    ):
        if found != said:
            raise CannotReproduce(
                f"the answer is by another {name}: {said}, and the configuration has {found}"
            )


def plan(basis: Basis, session: SessionConfig, *, start: Mapping[Stream, int] | None = None) -> ReadPlan:
    """What to read for an answer's state: all it depends on, or from ``start`` on (``--from``).

    Raises CannotReproduce.
    """
    notes, asked, anchor = _notes(basis, basis.left), start is not None, None
    if start is None:
        if not basis.state:
            raise CannotReproduce(
                f"its state depends on {basis.state_bars} bars, of which the window has {basis.window_bars}, "
                "and where they begin is not known: an older version published it, its source has no log, or "
                "a symbol's records were in several partitions. Name a start at least that many bars back "
                "(--from OFFSET or TIME)"
            )
        if basis.anchor:
            anchor = _anchor(basis, session), basis.state_bars
        start = {stream_of(each): each.first_offset for each in basis.state}
    late = [each for each in basis.state if start.get(stream_of(each), 0) > each.first_offset]
    if late or not basis.state:
        places = [f"{each.topic}/{each.partition} offset {each.first_offset}" for each in late]
        notes.append(f"its state begins at {(places or ['further back'])[0]}, before what was read")
    spans = {key: range(start.get(key, 0), end) for key, end in _ends(basis).items()}
    return ReadPlan(spans, anchor, tuple(notes), asked, -1 if asked else basis.state_bars)


def _anchor(basis: Basis, session: SessionConfig) -> Anchor:
    """The anchor of the answer's lines. Raises CannotReproduce for one that the session cannot have."""
    try:
        reference, unit, volume = basis.anchor
        return Anchor.of(reference, unit, volume, session.price_decimals, session.scale)
    except ValueError as error:
        raise CannotReproduce(f"the session cannot have the anchor of the answer's basis: {error}") from None


def _notes(basis: Basis, left: bool) -> list[str]:
    """What a replay does not repeat. ``left``: see `Basis`."""
    notes: list[str] = []
    if left:
        notes.append("bars left the window that its state began with while it was prefilled")
    if len(basis.window) > 1:
        notes.append("its records are of several partitions; their order is taken from Kafka's times")
    return notes


def _ends(basis: Basis) -> dict[Stream, int]:
    return {stream_of(each): each.last_offset + 1 for each in (*basis.state, *basis.window)}


def window_plan(basis: Basis, session: SessionConfig) -> ReadPlan:
    """What to read for the contents of its window alone."""
    if basis.anchor:
        return plan(basis, session)
    spans = {stream_of(each): range(each.first_offset, each.last_offset + 1) for each in basis.window}
    return ReadPlan(spans, bars=basis.window_bars)


async def derive(config: Config, answer: Answer, planned: ReadPlan) -> Derived:
    """The answer's version, made again: from the records ``planned``, or those behind a snapshot.

    Raises CannotReproduce, SettingError, and BrokerError.
    """
    brokers, basis, closed = logs_of(config), answer.basis or Basis(), _closed(answer)
    if not planned.spans:
        raise CannotReproduce("it is not known where its records are: see docs/audit.md")
    choose = partial(_choose, config, answer, planned, await _gone(brokers, planned))
    until_ns = max(closed, default=0)
    try:
        with Replay(
            config, answer.session, begins=planned.begins, choose=choose, until_ns=until_ns
        ) as replay:
            snapshot = replay.snapshot
            if snapshot is not None:
                planned = _behind(snapshot, basis, replay.state_bars, several=len(config.feeds) > 1)
            newest = _newest(basis, config)
            ends = await replay.bars(of_partitions(partial(_broker, brokers), planned.spans))
            at = [number for number, end in enumerate(ends) if _is_end(answer, closed, newest, end)]
            version = None
            if at:
                exclude = _before(basis, planned, at[-1] + 1)
                batches = of_partitions(partial(_broker, brokers), planned.spans)
                version = await replay.feed(batches, answer.question, answer.question_hash, at[-1], exclude)
    except (OffsetsGone, SnapshotError) as error:
        raise CannotReproduce(str(error)) from error
    if version is not None and not planned.asked and len(version.window) != basis.window_bars:
        raise CannotReproduce(
            f"the window has {len(version.window)} bars at the answer's last record, and the answer's had "
            f"{basis.window_bars}"
        )
    return Derived(version, planned.notes, "" if snapshot is None else str(snapshot.snapshot.path))


def _choose(
    config: Config, answer: Answer, planned: ReadPlan, gone: OffsetsGone | None, built: Built
) -> UsableSnapshot | None:
    """The snapshot that stands in for records that are ``gone``. Raises CannotReproduce."""
    check_model(built, answer)
    if gone is None:
        return None
    version, basis = answer.data_version, answer.basis or Basis()
    later = "A later start (--from OFFSET or TIME) leaves out what came before it"
    if planned.asked:
        raise CannotReproduce(f"{gone}. {later}")
    found = below(config, built, answer.session, version, basis)
    if found is None:
        begins = [f"{each.topic}/{each.partition} offset {each.first_offset}" for each in basis.state]
        begin = ", ".join(begins) or "before what is known"
        raise CannotReproduce(
            f"{gone}. Its state depends on {basis.state_bars} bars, back to {begin}, "
            f"and {config.recovery.path} has no snapshot of the session between there and version {version}. "
            f"{later}"
        )
    return found


def _closed(answer: Answer) -> tuple[int, ...]:
    """Openings (ns) of the newest bars, in the order of the symbols, as `answer_id` has them.

    Empty where a correction is the newest, or an older version published the answer.
    """
    try:
        return tuple(map(int, answer.answer_id.rpartition(":")[2].split(",")))
    except ValueError:
        return ()


def _newest(basis: Basis, config: Config) -> dict[int, int]:
    """Last offsets of the answer's records, by the number of the stream."""
    source = next(name for name, _ in config.feeds.values())
    return {
        stream_number(each.source or source, each.topic, each.partition): each.last_offset
        for each in basis.window
    }


def _is_end(answer: Answer, closed: tuple[int, ...], newest: Mapping[int, int], end: End) -> bool:
    """Whether the answer's version ends there. Its symbols may have older bars than were read."""
    if end.as_of != answer.as_of or any(newest.get(s, last) != last for s, last in end.newest.items()):
        return False
    if not closed:
        return True
    return len(closed) == len(end.closed) and all(
        mine in (-1, his) for mine, his in zip(end.closed, closed, strict=True)
    )


def _before(basis: Basis, planned: ReadPlan, bars: int) -> int:
    """Of the ``bars`` up to the answer's end, those before what the answer has. Raises CannotReproduce.

    Behind the first offset of a state there may be records of bars that were before it, which come first: of
    another symbol, or out of order.
    """
    if planned.bars < 0 or bars == planned.bars:
        return 0
    if bars < planned.bars:
        raise CannotReproduce(f"the records make {bars} bars, and the answer was made of {planned.bars}")
    _check_gap(basis, planned.bars)
    return bars - planned.bars


def _check_gap(basis: Basis, bars: int) -> None:
    """Raise CannotReproduce where there was a gap within the newest ``bars``."""
    if 0 < basis.since_gap < bars:
        raise CannotReproduce(
            f"records were skipped or lost {basis.since_gap} bars before the end of its state: it is not "
            "published which"
        )


def _behind(found: UsableSnapshot, basis: Basis, had: int, *, several: bool) -> ReadPlan:
    """What to read behind a snapshot, whose state ``had`` that many bars."""
    began, read = {stream_of(each): each.first_offset for each in basis.state}, starts(found.state, several)
    spans = {
        stream: range(read.get(stream, began.get(stream, 0)), end) for stream, end in _ends(basis).items()
    }
    return ReadPlan(spans, notes=tuple(_notes(basis, left=False)), bars=basis.state_bars - had)


async def _gone(brokers: Mapping[str, Broker | FileLog], planned: ReadPlan) -> OffsetsGone | None:
    """The planned records that the log no longer has."""
    for (source, partition), span in planned.spans.items():
        async with _broker(brokers, source).reader() as reader:
            first = (await reader.spans([partition[0]]))[partition].start
        if span.start < first:
            return OffsetsGone(partition, span.start, first)
    return None


def _broker(brokers: Mapping[str, Broker | FileLog], source: str) -> Broker | FileLog:
    """Raises CannotReproduce for the name of another configuration."""
    if source != ONE and source not in brokers:
        raise CannotReproduce(f"the configuration has no source {source!r} that keeps its records")
    return brokers[source] if source != ONE else next(iter(brokers.values()))


def compare(answer: Answer, derived: Derived, *, bits: bool = False) -> ReproductionVerdict:
    """Whether ``derived`` is the answer again; ``bits``: rounding is a difference, too.

    Raises CannotReproduce where it differs and there was a gap.
    """
    version, notes = derived.version, derived.notes
    basis = answer.basis or Basis()
    if version is None:
        _check_gap(basis, basis.state_bars)
        notes += ("the records make no bar that ends as the answer's did",)
        return ReproductionVerdict("differs", "", 0.0, float("inf"), 0.0, False, notes, derived.snapshot)
    made, tolerance = version.answer, version.tolerance
    apart, is_same_text = abs(made.logit_gap - answer.logit_gap), made.text == answer.text
    if not is_same_text and max(made.logit_gap, answer.logit_gap) <= tolerance:
        notes += ("both gaps are within rounding of 0: the choices are tied",)
    anchor = basis.anchor if made.basis is None else made.basis.anchor
    if anchor != basis.anchor:
        notes += (f"its lines are around another anchor: {anchor}, {basis.anchor} published",)
    equal = is_same_text and apart <= (0.0 if bits else tolerance)
    if not equal:
        _check_gap(basis, basis.state_bars)
    says: Says = "differs" if not equal else "agrees" if notes else "reproduced"
    is_equal_bits = is_same_text and made.logit_gap == answer.logit_gap
    return ReproductionVerdict(
        says, made.text, made.logit_gap, apart, tolerance, is_equal_bits, notes, derived.snapshot
    )


def deterministic(config: Config) -> Config:
    """The same with one thread on the CPU."""
    model = msgspec.structs.replace(config.model, threads=1, device="cpu")
    models = tuple(msgspec.structs.replace(each, device="cpu") for each in config.models)
    return msgspec.structs.replace(config, model=model, models=models)
