"""The options of `foretick questions set`: the keys of a standing question, read as the configuration's."""

from dataclasses import asdict

import msgspec
import pytest
from click.testing import CliRunner

from daemon.api.messages import QuestionInfo
from daemon.cli.questions import question_from, set_, shown
from daemon.config.schema import QuestionConfig
from daemon.config.standing import question_of
from flash.question import Question

ASKED = {"name": "quiet", "text": "Is it quiet?"}


def test_every_key_has_an_option() -> None:
    options = {option.lstrip("-").replace("-", "_") for each in set_.params for option in each.opts}
    keys = {field.encode_name for field in msgspec.structs.fields(QuestionConfig)}
    own = {"endpoint", "secret_key", "server_key", "session", "choice"}
    assert options - own == keys - {"choices", "sessions"}


def test_without_options_a_question_is_that_of_a_table_without_keys() -> None:
    defaults = {p.name: p.default for p in set_.params if p.name in {"level", "ask_every", "publish_when"}}
    assert question_from(ASKED | defaults) == question_from(ASKED) == question_of(QuestionConfig(**ASKED))


def test_values_are_read_as_in_the_file() -> None:
    keys = {
        "answer": "number",
        "publish_when": "crossed",
        "level": "61250.5",
        "max_tokens": "12",
        "ask_every": "1m",
        "answer_within": "250ms",
        "min_probability": "0.9",
    }
    assert question_from(ASKED | keys) == Question(
        "quiet",
        "Is it quiet?",
        max_tokens=12,
        answer="number",
        publish_when="crossed",
        min_probability=0.9,
        level="61250.5",
        ask_every_ns=60 * 10**9,
        answer_within_ns=250 * 10**6,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--publish-when", "sometimes"], "'sometimes' is not one of"),
        (["--level", "high"], "Invalid value for --level"),
        (["--ask-every", "soon"], "Invalid value for --ask-every"),
        (["--publish-every", "0"], "Invalid value for --publish-every: expected int >= 1"),
        (["--min-probability", "2"], "Invalid value for --min-probability: expected float <= 1"),
        (["--ask-every", "1m", "--ask-every-bars", "5"], "every n bars or every n seconds, not both"),
        (["--", "not a name", "Up?"], "Invalid value for NAME"),
        (["--choice", "YES"], "needs at least two choices"),
    ],
)
def test_a_wrong_option_is_named_before_the_daemon_is_asked(options: list[str], message: str) -> None:
    positional = [] if "--" in options else ["quiet", "Is it quiet?"]
    result = CliRunner().invoke(set_, ["aaa", *positional, *options])
    assert result.exit_code == 2
    assert message in result.output


def test_a_listed_question_shows_what_differs_from_the_defaults() -> None:
    def listed(question: Question) -> str:
        return shown(QuestionInfo(**asdict(question) | {"choices": question.choices or ()}))

    assert listed(Question("free", "Why?", max_tokens=3)) == "free: Why? [text of at most 3 tokens]"
    often = Question("quiet", "Quiet?", ("YES", "NO"), publish_when="changed", ask_every_bars=5)
    assert listed(often) == "quiet: Quiet? [YES | NO] publish_when=changed ask_every_bars=5"
