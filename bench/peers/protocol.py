"""What conductor and contestant send each other, pickled: a reply for each message.

Only the standard library: a contestant runs in the environment of the engine that it stands for.
"""

from dataclasses import dataclass

Record = list[int]
"""Token ids of one bar."""


@dataclass(frozen=True)
class Opening:
    """The first message: what to load, and the sessions to open. All token ids are of that model.

    ``frozen``: what every session begins with; ``tokens``: most tokens of a session, its frozen ones
    included; ``questions`` at once, of at most ``question`` tokens with their answers. ``file``: the GGUF
    file that the directory ``model`` was expanded from, or "".
    """

    model: str
    dtype: str
    threads: int
    frozen: list[int]
    sessions: int
    tokens: int
    questions: int
    question: int
    file: str = ""


@dataclass(frozen=True)
class Opened:
    """Reply to `Opening`. ``about``: engine and versions; ``absent``: what is missing, if it cannot run."""

    about: str = ""
    absent: str = ""


@dataclass(frozen=True)
class Update:
    """New bars of every session."""

    records: list[list[Record]]


@dataclass(frozen=True)
class Took:
    """Reply to `Update`: ns until a question may come; None where nothing is done before one comes."""

    ns: int | None


@dataclass(frozen=True)
class Ask:
    """Questions that come at once, each of a session, and the length of each greedy answer in tokens."""

    questions: list[tuple[int, list[int]]]
    tokens: int = 1


@dataclass(frozen=True)
class Answered:
    """Reply to `Ask`, in the order of its questions.

    ``first_ns``: until every question has its first token; ``ns``: until all have all. ``leads``: of each
    first token over the second best, in logits, where the engine tells.
    """

    answers: list[list[int]]
    first_ns: int
    ns: int
    leads: list[float] | None = None


Message = Opening | Update | Ask
Reply = Opened | Took | Answered
