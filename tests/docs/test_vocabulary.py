"""Words that a stranger must ask about: no more than there were, and renamed things stay renamed."""

from tests.docs import vocabulary


def test_home_made_words_only_become_fewer_and_changed_names_do_not_come_back() -> None:
    assert vocabulary.problems() == []
