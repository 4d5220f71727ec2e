"""The signals that follow from published answers."""

from collections.abc import Iterable
from decimal import Decimal

from feeds.market_data import Answer
from flash.signals import Said, SessionSignals, SignalRule, stepped


def ids_of(rules: Iterable[SignalRule], answers: Iterable[Answer]) -> list[str]:
    """Ids of what ``rules``, each of one session, make of all answers of that session, version by version."""
    found: list[str] = []
    versions: dict[tuple[str, int, int], list[Answer]] = {}
    for answer in answers:
        versions.setdefault((answer.session, answer.epoch, answer.data_version), []).append(answer)
    states: dict[str, SessionSignals] = {}
    for (session, _, version), of_version in sorted(versions.items()):
        said = {
            each.question: Said(
                each.answer_id,
                version,
                each.text,
                None if each.value is None else Decimal(each.value),
                each.probability,
                each.flags,
            )
            for each in of_version
        }
        own = [rule for rule in rules if rule.sessions == (session,)]
        states[session], made = stepped(own, states, session, version, of_version[0].as_of, said)
        found += [each.signal_id for each in made if not each.suppressed]
    return found
