"""What was right: the rule of an answer's question on the bars of its window, as `daemon.engine.rule_labels`.

A rule is that of a question of the tape model, of a question of the configuration with `rule`, of a question
pack that was taught by one, or of a file that is named.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from daemon.audit.bar_table import BarRow, BarTable, ns_of
from daemon.config.label_rules import rules_of
from daemon.config.schema import Config, SessionConfig
from daemon.config.standing import question_of
from daemon.engine.labelled_bars import ClosedBar, label_of
from daemon.engine.rule_labels import WINDOW
from engine.model.question_pack import located, read_head
from feeds.market_data import Answer
from flash.question import EXACT_VALUE, PAPER_SIX, Question
from ingest.compact import Anchor, CompactSpec, units_in
from ingest.lines import decimal, round_half_even
from ingest.volumes import SCALE, Volume
from tapes.question_file import QuestionFile, read_question, rule_of
from tapes.rules import RULES, UNDEFINED, Rule

_APART = {"rolled", "split", "action"}
"""Flags of a bar whose prices are not those of the bars before it."""


class RightAnswers:
    """Of a configuration's sessions, over ``bars``. ``files``: rules of further questions, by their names.

    Raises ValueError for a rule or a pack that cannot be read.
    """

    def __init__(self, config: Config, bars: BarTable, files: Iterable[Path] = ()) -> None:
        self._bars = bars
        self._rules = _own() | _taught(config) | rules_of(config)
        self._named = {rule.name: rule for rule in map(read_question, files)}
        self._sessions = {each.name: each for each in config.sessions if _has_one_series(config, each)}

    def of(self, answer: Answer) -> str | None:
        """The right answer; None where no rule has one, or not all of its bars are there."""
        session, basis = self._sessions.get(answer.session), answer.basis
        rule = self._rules.get(answer.question_hash) or self._named.get(answer.question)
        is_number = answer.question_hash == EXACT_VALUE.hash
        if session is None or basis is None or (rule is None and not is_number):
            return None
        series = self._bars.series(session.name, answer.symbol)
        opening = series.opening(answer.as_of, answer.answer_id)
        if opening is None:
            return None
        if rule is None:
            return _close(series.rows[opening].close, session, basis.anchor)
        end, shown = bisect_left(series.opened, opening) + 1, min(basis.window_bars, WINDOW)
        around = [series.rows[at] for at in series.opened[max(0, end - shown) : end + rule.horizon]]
        return _right(rule, session, around, shown)


def _close(close: str, session: SessionConfig, numbers: Sequence[str]) -> str:
    """As its answer is printed; ``numbers``: of the compact lines' anchor, whose levels round prices."""
    price = units_in(close, session.scale)
    if numbers:
        reference, unit, volume = numbers
        anchor = Anchor.of(reference, unit, volume, session.price_decimals, session.scale)
        price = anchor.reference + anchor.unit * round_half_even(price - anchor.reference, anchor.unit)
    return decimal(price, session.price_decimals, session.scale)


def _right(rule: Rule, session: SessionConfig, around: Sequence[BarRow], shown: int) -> str | None:
    """By the last ``shown + rule.horizon`` bars; none reaches across a split or a roll."""
    breaks = [at for at, row in enumerate(around) if _APART & {*row.flags.split()}]
    if len(around) < shown + rule.horizon or any(at >= shown for at in breaks):
        return None
    since = around[max(breaks, default=0) :]
    spec = CompactSpec(session.price_decimals, price_scale=session.scale)
    value = label_of(rule, [_closed(row, session.scale) for row in since], spec)
    return None if value == UNDEFINED else rule.choices[value]


def _closed(row: BarRow, scale: int) -> ClosedBar:
    """As the engine has it. A file of an older version has no time of the newest record."""
    opens, newest = ns_of(row.opens), ns_of(row.newest or row.opens)
    o, h, low, c = (units_in(text, scale) for text in (row.open, row.high, row.low, row.close))
    return ClosedBar(opens, newest, o, h, low, c, *Volume.of(units_in(row.volume, SCALE)))


def _own() -> dict[str, Rule]:
    """Rules of the tape model's questions, which are asked by their text, by name, or as the paper has it."""
    paper = {each.name: each.text for each in PAPER_SIX}
    return {
        Question(rule.name, text, rule.choices).hash: rule
        for rule in RULES
        for text in (rule.text, rule.name, paper.get(rule.name, rule.text))
    }


def _taught(config: Config) -> dict[str, Rule]:
    """Rules of the configuration's packs, by the hash of their question."""
    found = {}
    for asked in config.questions:
        taught_by = read_head(located(asked.pack)[0]).question if asked.pack else {}
        if taught_by.get("rule"):  # "" where it was taught by labels, or a Python function
            members = {name: taught_by[name] for name in QuestionFile.__struct_fields__ if name in taught_by}
            found[question_of(asked).hash] = rule_of(msgspec.convert(members, QuestionFile))
    return found


def _has_one_series(config: Config, session: SessionConfig) -> bool:
    """Whether a rule can read its bars: of one symbol, and of one length."""
    return not session.more_symbols and session.bars(config.bars).ready == "same"
