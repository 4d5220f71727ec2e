"""Sessions of a test's own for the live page: versions with prices, answers, labels and signals."""

from collections.abc import Sequence
from typing import Any

import msgspec

from daemon.api import messages
from daemon.api.messages import PastAnswer, PastVersion, SessionInfo
from feeds.market_data import Answer, Signal, SignalCause
from tests.daemon.api.doors import Daemon
from tests.daemon.api.test_api_query import PUBLISHED
from tests.kit import SECOND, START

QUESTIONS = ("trend", "breakout")
VERSIONS = 40
_CHOICES = {"trend": ("UP", "DOWN"), "breakout": ("YES", "NO")}


def session(name: str, symbol: str, **fields: Any) -> SessionInfo:
    info = SessionInfo(name, symbol, VERSIONS, 90, 9, START + VERSIONS * SECOND, 2 * SECOND, QUESTIONS)
    return msgspec.structs.replace(info, **fields)


def question(name: str) -> messages.QuestionInfo:
    text = f"What of the {name}?"
    return messages.QuestionInfo(name, text, _CHOICES[name], 1, "text", "always", 0.8, 2.0, "0", 1, 1, 0, 0)


def answered(name: str, version: int) -> PastAnswer:
    """Every third is wrong, and the newest ten have no label yet."""
    text, other = _CHOICES[name] if version % 2 else _CHOICES[name][::-1]
    sets = ((text,), (text, other), ())
    label = None if version > VERSIONS - 10 else other if version % 3 == 0 else text
    return PastAnswer(name, text, 1.5, 0.5 + version % 5 / 10, sets[version % 3], label=label)


def versions() -> tuple[PastVersion, ...]:
    return tuple(
        PastVersion(n, START + n * SECOND, f"{100 + n * 7 % 11}.25", tuple(answered(q, n) for q in QUESTIONS))
        for n in range(1, VERSIONS + 1)
    )


def answer(info: SessionInfo, name: str, **fields: Any) -> Answer:
    past = answered(name, VERSIONS)
    members = {each: getattr(past, each) for each in ("text", "logit_gap", "probability", "choice_set")}
    about = {"session": info.name, "symbol": info.symbol, "question": name, "data_version": VERSIONS}
    return msgspec.structs.replace(
        PUBLISHED, **(about | members | {"choice": past.text, "flags": ()} | fields)
    )


def signal(info: SessionInfo, version: int, name: str = "turn") -> Signal:
    cause = SignalCause(info.name, "trend", f"a{version}", version, "UP")
    return Signal(
        session=info.name, name=name, owner=info.name, signal_id=f"{info.name}{version}", symbol=info.symbol,
        data_version=version, as_of=START + version * SECOND, bar=START, close="101.25", answers=[cause],
        published_at=version,
    )  # fmt: skip


def tell(daemon: Daemon, infos: Sequence[SessionInfo], signals: Sequence[Signal] = ()) -> None:
    """Let the daemon reply with these sessions."""
    told: list[tuple[messages.ClientRequest, messages.Reply]] = [
        (messages.ListSessions(0), messages.SessionsReply(0, tuple(infos))),
        (messages.ListSignals(0), messages.SignalsReply(0, (), tuple(signals))),
    ]
    for info in infos:
        name, asked = info.name, tuple(question(each) for each in info.questions if each in _CHOICES)
        kept = versions() if info.data_version else ()
        newest = tuple(answer(info, each) for each in info.questions if each in _CHOICES)
        span = (kept[0].data_version, kept[-1].data_version) if kept else (0, 0)
        told += [
            (messages.Answers(0, name), messages.AnswersReply(0, name, newest)),
            (messages.ListQuestions(0, name), messages.QuestionsReply(0, name, asked)),
            (messages.ListVersions(0, name), messages.VersionsReply(0, name, 0, *span, kept)),
        ]
    daemon.replies = told
