"""Sets of standing questions by name: our own, and those of plug-ins. Importing it raises PluginError."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from flash.question import PAPER_SIX, Question
from support import plugins

_OWN: Mapping[str, Sequence[Question]] = {"paper_six": PAPER_SIX, "none": ()}


def _are_questions(found: object) -> TypeGuard[Sequence[Question]]:
    """Each of another name."""
    if not (isinstance(found, Sequence) and all(isinstance(each, Question) for each in found)):
        return False
    return len({each.name for each in found}) == len(found)


SETS: Mapping[str, Sequence[Question]] = {
    **_OWN,
    **plugins.load(plugins.QUESTIONS, _OWN, "sequence of questions of different names", _are_questions),
}
