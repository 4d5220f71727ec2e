"""An answer derived again from the records it was read from.

What must be equal is checked first: the model and its revision, the settings (`Basis.config`), the question.
Then the records of its state are read, from the first that it depends on (`Basis.state`) to the last of its
version, and a session is made from them (`daemon.audit.replay`).
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from daemon.audit.broker import Broker, of_sources
from daemon.audit.replay import ONE, FromSnapshot, Replay, Version
from daemon.config.fingerprint import fingerprint, settings_of
from daemon.config.schema import Config, SessionConfig
from daemon.config.standing import questions_of
from feeds.kafka_range import KafkaRange, OffsetsGone, Span
from feeds.messages import Answer, Basis, InputRange
from feeds.source import Incoming, Partition
from ingest.compact import Anchor

Says = Literal["reproduced", "agrees", "differs"]


class CannotReproduce(Exception):
    """The answer cannot be derived again, or not with this configuration; says why, and what would help."""


@dataclass(frozen=True)
class Plan:
    """What is read: a span of offsets by source and partition.

    ``begins``: see `Replay`. ``notes``: what the replay does not repeat.
    """

    spans: Mapping[tuple[str, Partition], Span]
    begins: tuple[Anchor, int] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
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
        raise CannotReproduce(
            f"the session has no standing question {answer.question!r} with the hash {answer.question_hash}"
        )
    if not answer.inputs:
        raise CannotReproduce("the answer names no records: its version was made without any")
    return session, answer.basis


def check_model(replay: Replay, answer: Answer) -> None:
    """Raises CannotReproduce for another model or revision."""
    loaded = replay.built.loaded
    for name, found, said in (
        ("model", loaded.name, answer.model),
        ("revision of the model", loaded.revision, answer.model_revision),
    ):
        if found != said:
            raise CannotReproduce(
                f"the answer is by another {name}: {said}, and the configuration has {found}"
            )


def plan(basis: Basis, *, decimals: int, start: Mapping[tuple[str, Partition], int] | None = None) -> Plan:
    """What to read for an answer's state: all it depends on, or from ``start`` on (``--from``).

    ``decimals``: of a compact session's printed prices. Raises CannotReproduce.
    """
    notes: list[str] = []
    if basis.merged:
        notes.append(
            f"{basis.merged} versions of its state took several bars while older ones left, or lost bars "
            "while they were prefilled; here each bar is a version"
        )
    if len(basis.window) > 1:
        notes.append("its records are of several partitions; their order is taken from Kafka's times")
    anchor = None
    if basis.anchor and start is None:
        reference, unit, volume = basis.anchor
        anchor = Anchor(reference, unit, volume, decimals), basis.state_bars
    ends = {_key(each): each.last_offset + 1 for each in (*basis.state, *basis.window)}
    if start is None:
        if not basis.state:
            raise CannotReproduce(
                f"its state depends on {basis.state_bars} bars, of which the window has {basis.window_bars}, "
                "and where they begin is not known: the daemon began from a snapshot. Name a start at least "
                "so many bars back (--from OFFSET or TIME)"
            )
        start = {_key(each): each.first_offset for each in basis.state}
    else:
        late = [each for each in basis.state if start.get(_key(each), 0) > each.first_offset]
        if late or not basis.state:
            told = (
                f"{late[0].topic}/{late[0].partition} offset {late[0].first_offset}"
                if late
                else "further back"
            )
            notes.append(f"its state begins at {told}, before what was read")
    spans = {key: Span(start.get(key, 0), end) for key, end in ends.items()}
    return Plan(spans, anchor, tuple(notes))


def window_plan(basis: Basis, *, decimals: int) -> Plan:
    """What to read for the contents of its window alone."""
    if basis.anchor:
        return plan(basis, decimals=decimals)
    return Plan({_key(each): Span(each.first_offset, each.last_offset + 1) for each in basis.window})


async def derive(
    config: Config,
    answer: Answer,
    planned: Plan,
    *,
    from_snapshot: FromSnapshot | None = None,
    brokers: Mapping[str, Broker] | None = None,
) -> Version | None:
    """The answer's version, made again; None where the records make no bar that ends as it did.

    ``brokers``: of the sources, by default the configuration's. Raises CannotReproduce, SettingError, and
    BrokerError.
    """
    brokers = of_sources(config) if brokers is None else brokers
    ends = {(i.source, (i.topic, i.partition), i.last_offset) for i in answer.inputs}
    same = (answer.session, answer.question, answer.question_hash, answer.as_of)

    def wanted(made: Answer, position: tuple[str, Partition, int]) -> bool:
        return position in ends and (made.session, made.question, made.question_hash, made.as_of) == same

    with Replay(config, answer.session, wanted, begins=planned.begins, from_snapshot=from_snapshot) as replay:
        check_model(replay, answer)
        try:
            found = await replay.feed(_batches(brokers, planned))
        except OffsetsGone as error:
            raise CannotReproduce(
                f"{error}. A later start (--from OFFSET or TIME) leaves out what came before it"
            ) from error
    return found[-1] if found else None


def compare(
    answer: Answer, version: Version | None, notes: tuple[str, ...], *, bits: bool = False
) -> Verdict:
    """Whether ``version`` is the answer again; ``bits``: rounding is a difference, too."""
    if version is None:
        why = "the records make no bar that ends as the answer's did"
        return Verdict("differs", "", 0.0, float("inf"), 0.0, False, (*notes, why))
    made = version.answer
    apart = abs(made.logit_gap - answer.logit_gap)
    equal_bits = made.text == answer.text and made.logit_gap == answer.logit_gap
    if made.text != answer.text and max(made.logit_gap, answer.logit_gap) <= version.tolerance:
        notes = (*notes, "both gaps are within rounding of 0: the choices are tied")
    if made.basis is not None and answer.basis is not None and made.basis.anchor != answer.basis.anchor:
        notes = (
            *notes,
            f"its lines are around another anchor: {made.basis.anchor}, {answer.basis.anchor} published",
        )
    equal = made.text == answer.text and apart <= (0.0 if bits else version.tolerance)
    says: Says = "differs" if not equal else "agrees" if notes else "reproduced"
    return Verdict(says, made.text, made.logit_gap, apart, version.tolerance, equal_bits, notes)


def deterministic(config: Config) -> Config:
    """The same with one thread on the CPU."""
    model = msgspec.structs.replace(config.model, threads=1, device="cpu")
    return msgspec.structs.replace(config, model=model)


def _key(each: InputRange) -> tuple[str, Partition]:
    return each.source, (each.topic, each.partition)


async def _batches(
    brokers: Mapping[str, Broker], planned: Plan
) -> AsyncGenerator[tuple[str, list[Incoming]], None]:
    """What is planned, by source in batches; several partitions are merged by Kafka's times."""
    async with AsyncExitStack() as stack:
        readers: dict[str, KafkaRange] = {}
        for source, _ in planned.spans:
            if source not in readers:
                broker = brokers[source] if source != ONE else next(iter(brokers.values()))
                readers[source] = await stack.enter_async_context(broker.reader())
        if len(planned.spans) == 1:
            ((source, partition), span) = next(iter(planned.spans.items()))
            async for batch in readers[source].read(partition, span):
                yield source, batch
            return
        streams: list[list[tuple[int, int, str, Incoming]]] = []
        for number, ((source, partition), span) in enumerate(planned.spans.items()):
            found = [m async for batch in readers[source].read(partition, span) for m in batch]
            streams.append([(m.ts_source_ns, number, source, m) for m in found])
        for _, _, source, message in heapq.merge(*streams, key=lambda each: each[:2]):
            yield source, [message]
