"""Records that are in no bar: their rows among the bars against a plain reference, their lines and words."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.bar_kernel import ACTED, BAR, EVENT, HALTED, NEWS, RESETS, Bars
from ingest.bars import COUNTS, BarBuilder, BarPolicy, one_each
from ingest.compact import CompactSpec, Restart
from ingest.events import event_line, event_tokens, events_code
from ingest.feed_rules import BITS
from ingest.lines import LineSpec
from ingest.plane import SessionSpec
from ingest.record import (
    ACTION,
    ASKS,
    BIDS,
    BOOK,
    HALT,
    OPEN,
    RESUME,
    SPLIT,
    STATUS,
    TEXT,
    TRADE,
    WORDS,
    Records,
    RecordWriter,
)  # fmt: skip
from ingest.words import LOST, MAX_BYTES, Texts, chunks_of, number_of, on_one_line
from metrics.catalogue import EVENTS
from tests.ingest.building import COUNTED, SECOND, Consumer, batches, characters, plane_on, text_of
from tests.ingest.reference_bars import ReferenceSession, Tick

KINDS = {TEXT: NEWS, STATUS: 0, ACTION: ACTED, BOOK: 0}


@dataclass(frozen=True)
class Item:
    """A trade, or an event of this kind, with what `x` says of it."""

    kind: int
    moment: int
    x: int = 0


@st.composite
def items(draw: st.DrawFn) -> list[Item]:
    found = []
    for _ in range(draw(st.integers(1, 40))):
        kind = draw(st.sampled_from([TRADE, TRADE, TRADE, *KINDS]))
        x = draw(st.sampled_from([HALT, RESUME, OPEN])) if kind == STATUS else 2
        found.append(Item(kind, draw(st.integers(1000, 1090)), x))
    return found


def packed(found: list[Item]) -> Records:
    writer = RecordWriter(len(found))
    for offset, each in enumerate(found):
        values = (5, 1, 0, 0, offset) if each.kind == TRADE else (offset, 0, 0, 0, 0)
        x = 0 if each.kind == TRADE else each.x
        writer.add(each.kind, 0, each.moment, each.moment, values, x=x, stream=1, offset=offset)
    return writer.records


@dataclass
class Reference:
    """Rows as (kind, time, flags); the kind of a bar is 0, and its time its opening."""

    policy: BarPolicy
    treatments: dict[str, str]

    def rows(self, found: list[Item]) -> list[tuple[int, int, int]]:
        bars, rows, done, halted, marks = ReferenceSession(self.policy), list[tuple[int, int, int]](), 0, 0, 0

        def note() -> None:
            nonlocal done, marks
            for bar in bars.closed[done:]:
                rows.append((0, bar[0], marks | halted))
                marks = 0
            done = len(bars.closed)

        for each in found:
            if each.kind == TRADE:
                bars.tick(Tick(each.moment, 5))
                note()
                continue
            bars.heartbeat(Tick(each.moment, 0))
            note()
            what = self.treatments[EVENTS[each.kind - TEXT]]
            if each.kind == STATUS and what != "ignore":
                halted = HALTED if each.x == HALT else 0
            if what == "line":
                rows.append((each.kind, each.moment, EVENT | KINDS[each.kind] | marks | halted))
                marks = 0
            elif what == "flag":
                marks |= KINDS[each.kind]
        bars.flush()
        note()
        return rows


@given(
    found=items(),
    lateness=st.sampled_from([0, 15]),
    treatments=st.fixed_dictionaries(dict.fromkeys(EVENTS, st.sampled_from(["line", "flag", "ignore"]))),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
@settings(max_examples=300)
def test_where_events_stand_among_the_bars(
    found: list[Item], lateness: int, treatments: dict[str, str], cuts: list[int]
) -> None:
    """By the records' order alone: in any batches, and whatever else is done about them."""
    policy = BarPolicy(10, lateness, actions=COUNTED, events=events_code(treatments))  # type: ignore[arg-type]
    builder = BarBuilder(one_each(1, policy))
    made = [builder.update(batch, 0) for batch in batches(packed(found), cuts)]
    rows = np.concatenate([np.zeros(0, BAR), *made, builder.flush()])
    shown = []
    for row in rows:
        flags = int(row["flags"])
        kind = int(row["n_ticks"]) if flags & EVENT else 0
        shown.append((kind, int(row["ts_open"]), flags))
    assert shown == Reference(policy, treatments).rows(found)
    counted = [sum(each.kind == TEXT + n for each in found) for n in range(len(EVENTS))]
    assert builder.totals[:, len(COUNTS) :].tolist() == [counted]
    assert sum(counted) + sum(sum(builder.counts(name)) for name in ("taken", "late")) == len(found)


NOTHING = (0, 0, 0, 0, 0)


def put(
    writer: RecordWriter,
    kind: int,
    moment: int,
    values: tuple[int, ...] = NOTHING,
    x: int = 0,
    words: str = "",
) -> None:
    known = number_of(words)
    for number, chunk in enumerate(chunks_of(words)):
        writer.add(WORDS, 0, moment, moment, chunk[:5], x=chunk[5], seq=known, part=number)
    a, b, c, d, e = values
    writer.add(kind, 0, moment, moment, (a, b, c, known or d, e), x=x, stream=1, offset=len(writer))


def lines_of(
    records: Records, spec: LineSpec | CompactSpec | None = None, **policy: object
) -> tuple[list[str], Consumer]:
    consumer = Consumer()
    own = BarPolicy(60 * SECOND, actions=COUNTED, **policy)  # type: ignore[arg-type]  # settings of it
    specs = [SessionSpec("s", one_each(1, own)[0], spec or LineSpec(2, 0), text_tokens=30)]
    with plane_on(specs, consumer) as (plane, ring, _):
        ring.push(records)
        plane.step()
        plane.flush()
    return [text_of(each.tokens) for each in consumer.records("s")], consumer


def test_the_line_of_each_kind() -> None:
    writer, minute = RecordWriter(64), 60 * SECOND
    put(writer, TRADE, 571 * minute, (10 * SECOND, SECOND, 0, 0, 0))
    put(writer, TEXT, 571 * minute + 1, words="Fed raises rates by 25 bp")
    put(writer, TEXT, 571 * minute + 2, words="a text that is much wider than thirty tokens are")
    put(writer, STATUS, 571 * minute + 3, x=HALT, words="volatility")
    put(writer, STATUS, 571 * minute + 4, x=RESUME)
    put(writer, ACTION, 571 * minute + 5, (10 * SECOND, 0, 0, 0, 0), x=SPLIT)
    put(writer, ACTION, 571 * minute + 6, (SECOND // 4, 0, 0, 0, 0), x=2)
    put(writer, ACTION, 571 * minute + 7, x=3, words="NEW")
    book = (100_010_000_000, 100_020_000_000, 200 * SECOND, 150 * SECOND, SECOND // 7)
    put(writer, BOOK, 571 * minute + 8, book, x=BIDS | ASKS)
    put(writer, BOOK, 571 * minute + 9, (0, 5 * SECOND, 0, SECOND // 2, -SECOND), x=ASKS)
    lines, consumer = lines_of(writer.records)
    assert lines == [
        "0931,text,Fed raises rates by 25 bp\n",
        "0931,text,a text that is much wider than\n",
        "0931,halt,volatility\n",
        "0931,resume\n",
        "0931,split,10\n",
        "0931,dividend,0.25\n",
        "0931,symbol change,NEW\n",
        "0931,book,100.01x200,100.02x150,0.14\n",
        "0931,book,,5.00x0.5,-1.00\n",
        "0931,10.00,10.00,10.00,10.00,1\n",
    ]
    assert [each.bar.bars for each in consumer.records("s")] == [0] * 9 + [1]


def test_lines_of_several_symbols_begin_with_theirs() -> None:
    row = np.zeros(1, BAR)[0]
    row["n_ticks"], row["leg"], row["v_high"], row["interval"] = STATUS, 1, HALT, SECOND
    assert event_line(row, LineSpec(symbols=("A", "B")), "") == "B,000000,halt\n"


def test_compact_lines_have_no_words_and_the_next_bar_says_what_came() -> None:
    writer, second = RecordWriter(64), SECOND
    put(writer, TRADE, 60 * second, (10 * SECOND, SECOND, 0, 0, 0))
    put(writer, TEXT, 61 * second, words="news")
    put(writer, TRADE, 130 * second, (10 * SECOND, SECOND, 0, 0, 0))
    put(writer, TRADE, 190 * second, (10 * SECOND, SECOND, 0, 0, 0))
    flags = events_code(dict.fromkeys(EVENTS, "flag"))
    _, consumer = lines_of(writer.records, CompactSpec(2), events=flags)
    assert [each.flags for each in consumer.records("s")] == [NEWS, 0, 0]


@pytest.mark.parametrize("late", ["drop", "amend"])
def test_the_first_bar_behind_a_split_resets_the_window(late: str) -> None:
    """Prices behind it are no jump, and late records of bars before it are no corrections."""
    writer, minute = RecordWriter(256), 60 * SECOND
    for n in range(80):
        put(writer, TRADE, n * minute, ((100 + n % 2) * SECOND, SECOND, 0, 0, 0))
    put(writer, ACTION, 80 * minute, (10 * SECOND, 0, 0, 0, 0), x=SPLIT)
    put(writer, TRADE, 81 * minute, (10 * SECOND, SECOND, 0, 0, 0))
    put(writer, TRADE, 82 * minute, (10 * SECOND, SECOND, 0, 0, 0))
    put(writer, TRADE, 78 * minute, (100 * SECOND, SECOND, 0, 0, 0))
    consumer = Consumer()
    policy = BarPolicy(minute, late=late, on_split="reset", price_jump=5.0)  # type: ignore[arg-type]
    with plane_on([SessionSpec("s", one_each(1, policy)[0], LineSpec(0, 0))], consumer) as (plane, ring, _):
        ring.push(writer.records)
        plane.step()
        plane.flush()
    at = next(n for n, (_, each) in enumerate(consumer.seen) if isinstance(each, Restart))
    assert consumer.seen[at][1] == Restart(None, ())
    behind = [each for _, each in consumer.seen[at + 1 :]]
    assert text_of(consumer.seen[at - 1][1].tokens) == "0120,split,10\n"  # type: ignore[union-attr]
    assert [text_of(each.tokens) for each in behind] == [  # type: ignore[union-attr]
        "0121,10,10,10,10,1\n", "0122,10,10,10,10,1\n"
    ]  # fmt: skip
    assert behind[0].flags & RESETS  # type: ignore[union-attr]
    assert behind[0].flags & (BITS["split"] | 16) == BITS["split"]  # type: ignore[union-attr]


@pytest.mark.parametrize("together", [True, False])
def test_compact_lines_are_reset_with_the_first_bar_behind_a_split(together: bool) -> None:
    writer, second = RecordWriter(64), SECOND
    for n, price in enumerate((100, 101, 100, 0, 10, 10, 11)):
        values = (10 * SECOND, 0, 0, 0, 0) if price == 0 else (price * SECOND, SECOND, 0, 0, 0)
        put(writer, TRADE if price else ACTION, n * second, values, x=0 if price else SPLIT)
    consumer, code = Consumer(), events_code(dict.fromkeys(EVENTS, "flag"))
    policy = BarPolicy(second, events=code, on_split="reset")
    with plane_on([SessionSpec("s", one_each(1, policy)[0], CompactSpec(2))], consumer) as (plane, ring, _):
        for batch in [writer.records] if together else np.split(writer.records, len(writer)):
            ring.push(batch)
            plane.step()
        plane.flush()
    (_, first), *_, (_, again), (_, bar), (_, _), (_, _) = consumer.seen
    assert isinstance(first, Restart)
    assert isinstance(again, Restart)
    assert again.anchor is not None
    assert (again.window, again.anchor.reference) == ((), 10 * SECOND)
    assert bar.flags & RESETS  # type: ignore[union-attr]


def rows_with(number: int) -> Bars:
    rows = np.zeros(1, BAR)
    rows["flags"], rows["n_ticks"], rows["c"] = EVENT, TEXT, number
    return rows


@given(st.text(max_size=600), st.lists(st.integers(1, 12), max_size=12))
def test_words_cross_the_ring_in_any_batches(text: str, cuts: list[int]) -> None:
    line, texts = on_one_line(text), Texts()
    assert line == on_one_line(line)
    assert len(line.encode()) <= MAX_BYTES
    assert "\n" not in line
    writer = RecordWriter(16)
    put(writer, TEXT, 1, words=line)
    for batch in batches(writer.records, cuts):
        texts.take(batch)
    assert texts.find(number_of(line)) == line
    assert texts.cut([number_of(line), 5]) == ({number_of(line): line} if line else {})


def test_words_that_the_ring_overwrote_are_lost_and_say_so() -> None:
    writer, texts = RecordWriter(16), Texts()
    put(writer, TEXT, 1, words="x" * 100)
    texts.take(writer.records[1:])
    assert texts.find(number_of("x" * 100)) == LOST


def test_texts_that_no_row_has_are_forgotten() -> None:
    texts, used = Texts(), number_of("text 3")
    for n in range(400):
        writer = RecordWriter(4)
        put(writer, TEXT, 1, words=f"text {n}")
        texts.take(writer.records)
        if texts.many:
            texts.forget({used})
    assert not texts.many
    assert texts.find(used) == "text 3"
    assert texts.find(number_of("text 399")) == "text 399"
    assert texts.find(number_of("text 4")) == LOST


@given(st.text(min_size=1, max_size=200), st.integers(1, 60))
def test_a_text_is_cut_to_its_tokens(text: str, most: int) -> None:
    row, spec, words = rows_with(1)[0], LineSpec(), on_one_line(text)
    row["interval"] = SECOND
    tokens = event_tokens(row, spec, words, characters, most)
    line, without = text_of(tokens), event_line(row, spec, "")
    assert len(tokens) - len(without) <= most
    assert line.startswith(without[:-1])
    assert line.endswith("\n")
    assert words.startswith(line[len(without) - 1 : -1])


def test_an_event_that_came_before_is_a_duplicate() -> None:
    writer = RecordWriter(4)
    for moment in (5, 5, 6):
        writer.add(TEXT, 0, moment, moment, (0, 0, 0, 77, 0), token=9, stream=1, offset=len(writer))
    builder = BarBuilder(one_each(1, BarPolicy(10)))
    rows = builder.update(writer.records, 0)
    assert (rows["ts_open"].tolist(), builder.counts("duplicates")) == ([5, 6], [1])
    assert builder.totals[:, len(COUNTS) :].tolist() == [[2, 0, 0, 0]]
