"""`[[signals]]` and `[[webhooks]]`: the rules that they declare, and what is wrong with them."""

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from fnmatch import fnmatchcase
from importlib.util import find_spec
from urllib.parse import urlsplit

from msgspec import structs

from daemon.config.answerable import terse_of, terse_text
from daemon.config.errors import ConfigProblem
from daemon.config.schema import ClauseConfig, Config, ModelConfig, SessionConfig, SignalConfig
from daemon.config.standing import questions_of
from feeds.decimals import Fixed
from flash.confidence import UNCALIBRATED
from flash.question import Question
from flash.signals import Clause, SignalRule

_NONE = "NONE"
"""What a model that reads words is taken to say where a question is undefined."""
Questions = Mapping[str, Mapping[str, Question]]
"""By session and name."""


def rules_reading(
    config: Config, sessions: Mapping[str, SessionConfig], session: str
) -> Iterator[SignalRule]:
    """The rules that read the answers of ``session``; ``sessions``: all of the configuration, by name."""
    for signal in config.signals:
        named = {clause.session for clause in signal.when}
        own = [session] if "" in named else []
        for name in _homes(signal, sessions if session in named else own):
            if name in sessions and (name == session or session in named):
                yield _rule(config, signal, name, sessions[name])


def rules_of(config: Config) -> list[SignalRule]:
    """One for each signal and session that has it."""
    sessions = {each.name: each for each in config.sessions}
    found = (rule for name in sessions for rule in rules_reading(config, sessions, name))
    return list({(rule.name, rule.session): rule for rule in found}.values())


def _homes(signal: SignalConfig, sessions: Iterable[str]) -> list[str]:
    """The sessions that have the signal; that of the first clause, where all clauses name theirs."""
    if all(clause.session for clause in signal.when):
        return [clause.session for clause in signal.when[:1]]
    if not signal.sessions:
        return list(sessions)
    return [name for name in sessions if any(fnmatchcase(name, each) for each in signal.sessions)]


def _rule(config: Config, signal: SignalConfig, name: str, session: SessionConfig) -> SignalRule:
    return SignalRule(
        signal.name,
        name,
        tuple(_clause(each, each.session or name) for each in signal.when),
        int(signal.cooldown),
        signal.cooldown_bars,
        signal.withheld_by,
        none_of(config.model_of(session)),
    )


def _clause(asked: ClauseConfig, session: str) -> Clause:
    return Clause(
        session,
        asked.question,
        asked.answer,
        asked.before,
        asked.changed,
        _decimal(asked.above),
        _decimal(asked.below),
        asked.min_probability,
        _decimal(asked.rearm),
        asked.for_bars,
    )


def _decimal(number: Fixed | None) -> Decimal | None:
    return None if number is None else Decimal(str(number))


def none_of(model: ModelConfig) -> str:
    """What the model says where a question is undefined."""
    terse = terse_of(model)
    return _NONE if terse is None else terse.none


def signal_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Each key of `[[signals]]` that makes no sense, and why; none while questions make none."""
    asked: dict[str, dict[str, Question]] = {}
    try:
        standing = list(questions_of(config))
    except ValueError:  # which another check says
        return
    for each in standing:
        asked.setdefault(each.session, {})[each.question.name] = each.question
    first: dict[str, int] = {}
    for index, signal in enumerate(config.signals):
        here = f"signals[{index}]"
        if (at := first.setdefault(signal.name, index)) != index:
            yield f"{here}.name", f"{signal.name!r} is already signals[{at}].name"
        yield from _shape_problems(here, signal)
        for number, clause in enumerate(signal.when):
            problems = list(_clause_problems(clause))
            problems = problems or list(_answer_problems(config, signal, clause, asked))
            yield from ((f"{here}.when[{number}].{key}", why) for key, why in problems)
        yield from _contradictions(here, signal)


def unmet_clauses(config: Config, unjudged: Mapping[tuple[str, str], str]) -> Iterator[ConfigProblem]:
    """Clauses that never hold: they ask for a probability of answers that have none.

    ``unjudged``: such questions by session and name, with why, a key of `UNCALIBRATED`.
    """
    signals = {each.name: number for number, each in enumerate(config.signals)}
    found: dict[str, dict[str, str]] = {}
    for rule in rules_of(structs.replace(config, sessions=config.all_sessions)):
        for number, clause in enumerate(rule.clauses):
            read = clause.session, clause.question
            if clause.min_probability is not None and read in unjudged:
                key = f"signals[{signals[rule.name]}].when[{number}].min_probability"
                found.setdefault(key, {})[clause.session] = clause.question
    for key, questions in found.items():
        session, question = next(iter(questions.items()))
        others = f" and {len(questions) - 1} more" if len(questions) > 1 else ""
        step = UNCALIBRATED[unjudged[session, question]]
        why = f"answers to {question} of {session}{others} have no probability, so this never holds: {step}"
        yield ConfigProblem(key, why)


def webhook_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Each key of `[[webhooks]]` that makes no sense, and why."""
    first: dict[str, int] = {}
    names = [each.name for each in config.signals]
    for index, webhook in enumerate(config.webhooks):
        here = f"webhooks[{index}]"
        if (at := first.setdefault(webhook.name, index)) != index:
            yield f"{here}.name", f"{webhook.name!r} is already webhooks[{at}].name"
        if webhook.name in config.sink.connectors:
            yield f"{here}.name", f"{webhook.name!r} is a sink's: name it otherwise"
        if not is_address(webhook.url):
            yield f"{here}.url", f"{webhook.url!r} is no address such as https://desk.example/signals"
        elif find_spec("httpx2") is None:
            yield f"{here}.url", "httpx2 is not installed: pip install 'foretick[webhooks]'"
        for name in webhook.signals:
            if name not in names:
                yield (
                    f"{here}.signals",
                    f"there is no signal named {name!r}; there are: {', '.join(names) or 'none'}",
                )
        if not names:
            yield here, "there are no [[signals]] that it could send"


def is_address(url: str) -> bool:
    """Whether HTTP can be spoken there; without a password, which logs would show."""
    try:
        address = urlsplit(url)
        valid = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        return False
    return valid and address.username is None


def _shape_problems(here: str, signal: SignalConfig) -> Iterator[tuple[str, str]]:
    if not signal.when:
        yield f"{here}.when", "a signal without a clause never fires: say which answer it waits for"
    elif signal.sessions and all(each.session for each in signal.when):
        yield (
            f"{here}.sessions",
            "each clause names its session: remove the key, or leave out a clause's session",
        )
    if signal.cooldown_bars and any(each.session for each in signal.when):
        yield f"{here}.cooldown_bars", "several sessions count their own data versions: use cooldown"


def _clause_problems(clause: ClauseConfig) -> Iterator[tuple[str, str]]:
    """What a clause says that contradicts itself, or says nothing."""
    levels = [each for each in (clause.above, clause.below) if each is not None]
    if not (clause.answer or clause.changed or levels or clause.min_probability is not None):
        yield (
            "question",
            "nothing is asked of its answers: add answer, changed, above, below or min_probability",
        )
    if levels and (clause.answer or clause.changed):
        yield (
            "above" if clause.below is None else "below",
            "only a number has a level: remove answer and changed",
        )
    if clause.before and not clause.changed:
        yield "before", "is for changed: add changed = true, or remove it"
    if clause.changed and clause.for_bars > 1:
        yield "for_bars", "a change lasts one answer: remove changed, and say the answer that it must keep"
    if not clause.changed and clause.min_probability == 0 and not (clause.answer or levels):
        yield (
            "min_probability",
            "every answer has a probability of 0 or more, so this is always met: raise it",
        )
    if len(levels) == 2 and levels[0] >= levels[1]:
        yield "below", f"no number is at {clause.above} or above it and below {clause.below}"
    if clause.rearm is not None:
        yield from _rearm_problems(clause, levels)


def _rearm_problems(clause: ClauseConfig, levels: list[Fixed]) -> Iterator[tuple[str, str]]:
    rearm, least = clause.rearm, clause.min_probability
    assert rearm is not None
    if len(levels) == 2:
        yield "rearm", "there are two levels, so it is not clear which one it belongs to: remove it"
    elif clause.above is not None and rearm >= clause.above:
        yield "rearm", f"{rearm} is not below above, {clause.above}"
    elif clause.below is not None and rearm < clause.below:
        yield "rearm", f"{rearm} is less than below, {clause.below}"
    elif not levels and (least is None or clause.changed):
        yield "rearm", "there is no threshold that it belongs to: add above, below or min_probability"
    elif not levels and least is not None and not 0 <= Decimal(str(rearm)) <= Decimal(str(least)):
        yield "rearm", f"{rearm} is not between 0 and min_probability, {least}"


def _answer_problems(
    config: Config, signal: SignalConfig, clause: ClauseConfig, asked: Questions
) -> Iterator[tuple[str, str]]:
    """What the sessions of a clause, and their questions, do not have. A pattern may open any session."""
    names = [each.name for each in config.sessions]
    homes = [clause.session] if clause.session else _homes(signal, names)
    if not clause.session:
        for pattern in signal.sessions:
            if not config.patterns and not any(fnmatchcase(each, pattern) for each in names):
                yield "session", f"there is no session named {pattern!r}, as signals.sessions says"
    for name in homes:
        if name not in names:
            if not config.patterns:
                known = ", ".join(names) or "none"
                yield "session", f"there is no session named {name!r}; there are: {known}"
            return
        questions = asked.get(name, {})
        question = questions.get(clause.question)
        if question is None:
            known = ", ".join(questions) or "none"
            yield "question", f"session {name} has no standing question {clause.question!r}; it has: {known}"
            return
        session = next(each for each in config.sessions if each.name == name)
        if problem := _impossible(config.model_of(session), question, clause):
            yield problem
            return


def _impossible(model: ModelConfig, question: Question, clause: ClauseConfig) -> tuple[str, str] | None:
    """What the question cannot be answered with."""
    none, choices = none_of(model), question.choices or ()
    if (terse := terse_of(model)) is not None:
        try:
            choices = choices or terse.find(terse_text(question)).choices
        except ValueError:  # said of the question
            return None
    if choices and (clause.above is not None or clause.below is not None):
        key = "above" if clause.above is not None else "below"
        return key, f"{question.name} is answered by one of {', '.join(choices)}, which is no number"
    for key, words in (("answer", clause.answer), ("before", clause.before)):
        if choices and (wrong := [each for each in words if each not in (*choices, none)]):
            return (
                key,
                f"{question.name} is never answered {wrong[0]!r}; it may be {', '.join((*choices, none))}",
            )
    if clause.min_probability is not None and not choices:
        return "min_probability", f"{question.name} is answered in free text, which has no probability"
    if clause.min_probability is not None and model.calibration == "off":
        why = "model.calibration is off, so no answer has a probability: remove one of the keys"
        return "min_probability", why
    return None


def _contradictions(here: str, signal: SignalConfig) -> Iterator[tuple[str, str]]:
    """Two clauses that want different answers of one question."""
    wanted: dict[tuple[str, str], set[str]] = {}
    for number, clause in enumerate(signal.when):
        if not clause.answer:
            continue
        key = clause.session, clause.question
        both = wanted[key] = wanted.get(key, set(clause.answer)) & set(clause.answer)
        if not both:
            yield (
                f"{here}.when[{number}].answer",
                f"no answer to {clause.question} meets this and the clause before",
            )
