"""The table of questions in the documentation is the one in the code."""

from tapes.rules import RULES
from tests.tapes import questions_table


def test_the_table_of_questions_is_the_rules() -> None:
    """`python -m tests.tapes.questions_table` writes it."""
    assert questions_table.committed() == questions_table.table()


def test_names_and_texts_differ_and_every_rule_says_when_it_holds() -> None:
    assert len({rule.name for rule in RULES}) == len({rule.text for rule in RULES}) == len(RULES)
    assert all(rule.means and len(rule.choices) in (2, 3) for rule in RULES)
