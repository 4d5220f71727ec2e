"""Questions of the configuration whose answers their own rule labels, as bars close."""

from pathlib import Path

from daemon.config.schema import Config, QuestionConfig, SessionConfig
from daemon.config.standing import is_asked, question_of
from tapes.question_file import read_question
from tapes.rules import Rule


def rule_of_table(asked: QuestionConfig) -> Rule:
    """The rule in its file. Raises ValueError for a file of another question."""
    rule = read_question(Path(asked.rule))
    if (rule.text, rule.choices) != (asked.text, asked.choices):
        choices = ", ".join(rule.choices)
        raise ValueError(f"{asked.rule} is of another question: {rule.text!r} with the choices {choices}")
    return rule


def rules_of(config: Config) -> dict[str, Rule]:
    """The rules by the hash of their question. Raises ValueError, which `problem` has said before."""
    return {question_of(asked).hash: rule_of_table(asked) for asked in config.questions if asked.rule}


def problem(config: Config, asked: QuestionConfig) -> str:
    """Why answers cannot be labelled by the rule; "" where they can."""
    try:
        rule = rule_of_table(asked)
    except ValueError as error:
        return str(error)
    if asked.provisional:
        return "answers behind open bars have no label: remove provisional"
    sessions = [each for each in config.all_sessions if is_asked(asked, each.name)]
    return next(filter(None, (_problem(rule, each) for each in sessions)), "")


def _problem(rule: Rule, session: SessionConfig) -> str:
    if session.more_symbols:
        return f"{session.name} has several symbols, and a rule reads the bars of one"
    kept = session.retention_records
    if 0 < kept < rule.bars:
        return f"it reads {rule.bars} bars, and {session.name} keeps {kept} (retention_records)"
    return ""
