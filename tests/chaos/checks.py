"""What must hold of the answers topic, whatever went wrong: each check names what does not."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from feeds.market_data import Answer
from tests.chaos.feed import SYMBOLS, as_of
from tests.chaos.reading import Published

Key = tuple[str, str, int]
"""Session, question and the event time (ns) that its answer is as of."""
GAP_TOLERANCE = 0.02
"""Of logit gaps: passes of other batches round differently."""


def key_of(answer: Answer) -> Key:
    return answer.session, answer.question, answer.as_of


def by_key(found: Iterable[Published]) -> dict[Key, list[Published]]:
    grouped = defaultdict(list)
    for each in found:
        grouped[key_of(each.answer)].append(each)
    return grouped


def missing(found: Sequence[Published], questions: Iterable[str], bars: int) -> list[str]:
    """Every question of every session has an answer as of each of the first ``bars`` bars, and no other."""
    expected = {(s, q, as_of(n)) for s in SYMBOLS for q in questions for n in range(bars)}
    answered = set(by_key(found))
    newest = max((at for *_, at in expected), default=0)
    strange = {key for key in answered - expected if key[2] <= newest}
    return [
        *(f"no answer: {key}" for key in sorted(expected - answered)),
        *(f"an answer to nothing: {key}" for key in sorted(strange)),
    ]


def unread(
    found: Sequence[Published], questions: Iterable[str], offsets: Mapping[str, Iterable[int]]
) -> list[str]:
    """Every question read all records of its session, ``offsets`` by session, in some answer or other.

    For a feed that waits for no answer: versions of a busy session are skipped, and pass their records on.
    """
    read: dict[tuple[str, str], set[int]] = defaultdict(set)
    for each in found:
        for of in each.answer.inputs:
            key = each.answer.session, each.answer.question
            read[key].update(range(of.first_offset, of.last_offset + 1))
    problems = []
    for session, question in ((s, q) for s in offsets for q in questions):
        left = sorted(set(offsets[session]) - read[session, question])
        if left:
            problems.append(f"{session}, {question}: {len(left)} records in no answer, from {left[0]} on")
    return problems


def repeats(found: Sequence[Published], *, allowed: bool) -> list[str]:
    """Answers to the same question of the same data have one id, other answers another.

    ``allowed``: at least once; otherwise there is one of each.
    """
    problems = []
    owners: dict[str, Key] = {}
    for key, answers in by_key(found).items():
        ids = {each.answer_id for each in answers}
        if len(ids) > 1:
            problems.append(f"a repeat that cannot be recognised: {key} has the ids {sorted(ids)}")
        if len(answers) > 1 and not allowed:
            problems.append(f"{len(answers)} times: {key} at {', '.join(map(_made, answers))}")
        problems += [
            f"two answers have the id {each}: {owners[each]} and {key}"
            for each in ids
            if owners.setdefault(each, key) != key
        ]
    return problems


def _made(each: Published) -> str:
    """Where an answer stands, which engine made it, and when."""
    answer = each.answer
    return (
        f"{each.offset} (epoch {answer.epoch}, number {answer.sequence}, {answer.published_at / 1e9:.3f} s)"
    )


def ahead(
    found: Sequence[Published], stored: Mapping[int, int | None], questions: Iterable[str]
) -> list[str]:
    """No stored offset lies beyond the first record whose bar is not answered in full.

    ``stored`` must have been read before ``found``.
    """
    names = set(questions)
    answered: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    newest: dict[tuple[str, int], int] = {}
    for each in found:
        for of in each.answer.inputs:
            answered[each.answer.session, of.partition, of.last_offset].add(each.answer.question)
    for (session, partition, end), asked in answered.items():
        if asked >= names:
            newest[session, partition] = max(newest.get((session, partition), -1), end)
    problems = []
    for partition, offset in stored.items():
        # a bar's last records, one of each session, stand side by side
        last = [at for (_, of), at in newest.items() if of == partition]
        if offset is not None and offset > min(last, default=-1) + max(1, len(last)):
            problems.append(f"partition {partition}: committed {offset}, answered only to {last}")
    return problems


def different(
    found: Sequence[Published],
    undisturbed: Mapping[Key, Published],
    *,
    since: int = 0,
    before: int | None = None,
) -> list[str]:
    """Answers as of [since, before) ns say what those of the undisturbed run say."""
    problems = []
    for each in found:
        key, mine = key_of(each.answer), each.answer
        if before is not None and key[2] >= before:
            continue
        if key not in undisturbed:
            problems.append(f"the undisturbed run has no {key}")
            continue
        other = undisturbed[key].answer
        if mine.text != other.text or abs(mine.logit_gap - other.logit_gap) > GAP_TOLERANCE:
            said = [f"{each.text} by {each.logit_gap:.4f} ({each.basis})" for each in (mine, other)]
            problems.append(f"{key} is {said[0]}, undisturbed {said[1]}")
    return problems


def gaps(found: Sequence[Published]) -> list[str]:
    """A session's sequence numbers have no gap within an epoch, and an epoch begins at most one later."""
    numbers: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for each in found:
        numbers[each.answer.session][each.answer.epoch].add(each.answer.sequence)
    problems = []
    for session, epochs in numbers.items():
        newest = 0
        for epoch in sorted(epochs):
            ordered = sorted(epochs[epoch])
            if ordered[0] > newest + 1:
                problems.append(f"{session}: epoch {epoch} begins at {ordered[0]} after {newest}")
            problems += [
                f"{session}: epoch {epoch} has no {a + 1} to {b - 1}"
                for a, b in pairwise(ordered)
                if b > a + 1
            ]
            newest = max(newest, ordered[-1])
    return problems


def conflicts(found: Sequence[Published]) -> list[str]:
    """A session's number in an epoch is one answer's, by one owner: what comes again is the same message."""
    first: dict[tuple[str, int, int], Published] = {}
    problems = []
    for each in found:
        number = each.answer.session, each.answer.epoch, each.answer.sequence
        other = first.setdefault(number, each)
        if other.answer != each.answer:
            whose = [f"{one.answer_id} at {one.offset}" for one in (other, each)]
            problems.append(f"two owners gave the number {number}: {whose[0]}, {whose[1]}")
    return problems
