"""Words that a stranger must ask about: there are no more of them than there were, and renamed things stay
renamed.
"""

from __future__ import annotations

import pytest

from tests.docs.vocabulary import HOME_MADE, MAX_WORDS, RENAMED, files, found


@pytest.mark.parametrize("kind", MAX_WORDS)
def test_home_made_words_only_become_fewer(kind: str) -> None:
    words = [word for path in files(kind) for word in found(path, HOME_MADE)]
    assert len(words) <= MAX_WORDS[kind], words


@pytest.mark.parametrize("kind", MAX_WORDS)
def test_names_that_were_changed_do_not_come_back(kind: str) -> None:
    assert [word for path in files(kind) for word in found(path, RENAMED)] == []
