"""Several models in the configuration: who has which session and question, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from daemon.config.answerable import refusal_of, terse_of
from daemon.config.by_model import by_model, keys_of_file, of_session
from daemon.config.changes import changes, of_known_models
from daemon.config.errors import ConfigError
from daemon.config.load import load_config
from daemon.config.schema import Config, ModelConfig
from daemon.config.standing import questions_of
from feeds.connector import SettingError
from flash.question import PAPER_SIX, Question

TOML = """
standing = "none"

[model]
name = "tape"
threads = 2

[[models]]
name = "chat"
path = "untrained"
blocks = 4096
host_blocks = 16
aliases = ["gpt-x"]

[[sessions]]
name = "btc"
symbol = "V:BTC"

[[sessions]]
name = "btc-words"
symbol = "V:BTC"
model = "chat"

[[sessions]]
name = "eth"
symbol = "V:ETH"
model = "tape"

[[sessions]]
match = "V:X*"
model = "chat"

[[questions]]
name = "trend"
text = "trend"

[[questions]]
name = "calm"
text = "Is the market calm?"
choices = ["YES", "NO"]

[[questions]]
name = "size"
text = "volume"
choices = ["BIG", "SMALL"]
sessions = ["btc*"]
"""


def config_of(path: Path, text: str = TOML) -> Config:
    file = path / "foretick.toml"
    file.write_text(text)
    return load_config(file, environment={})


def test_each_part_is_what_a_daemon_with_that_model_alone_would_have(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    tape, chat = by_model(config)
    assert [each.name for each in tape.sessions] == ["btc", "eth"]
    assert [each.name for each in chat.sessions] == ["btc-words"]
    assert ([each.match for each in tape.patterns], [each.match for each in chat.patterns]) == ([], ["V:X*"])
    assert (tape.pool.blocks, chat.pool.blocks, chat.pool.host_blocks) == (0, 4096, 16)
    assert (tape.model.path, chat.model.path) == ("", "untrained")
    assert tape.model.threads == chat.model.threads == 2
    assert not tape.models
    assert not chat.models
    assert by_model(tape) == (tape,)
    assert [of_session(config, each) for each in config.sessions] == [tape, chat, tape]


def test_a_question_is_asked_where_the_model_can_answer_it(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    asked = [(each.session, each.key, each.question.name) for each in questions_of(config)]
    assert asked == [
        ("btc", "questions[0]", "trend"),
        ("btc-words", "questions[0]", "trend"),
        ("btc-words", "questions[1]", "calm"),
        ("btc-words", "questions[2]", "size"),
        ("eth", "questions[0]", "trend"),
    ]
    parts = [each for part in by_model(config) for each in questions_of(part)]
    assert sorted((each.session, each.key, each.question.name) for each in parts) == sorted(asked)
    one = structs.replace(config, models=(), sessions=config.sessions[:1], patterns=())
    assert len([*questions_of(one)]) == 3  # its engine refuses what the model cannot answer


def test_the_paper_s_six_and_all_it_says_of_itself_are_the_tape_model_s(tmp_path: Path) -> None:
    terse = terse_of(ModelConfig())
    assert terse is not None
    for each in PAPER_SIX:
        assert not refusal_of(ModelConfig(), each)
    for name, own in terse.questions.items():
        for text in (name, own.text, own.token):
            assert not refusal_of(ModelConfig(), Question("x", text, own.choices or None))
    assert "it answers these questions" in refusal_of(ModelConfig(), Question("x", "Why?"))
    assert "its answers are" in refusal_of(ModelConfig(), Question("x", "trend", ("BULL", "BEAR")))
    (tmp_path / "config.json").write_text("{")
    for words in ("untrained", "model.gguf", str(tmp_path), str(tmp_path / "none")):
        assert not refusal_of(ModelConfig(path=words), Question("x", "Why?"))


@pytest.mark.parametrize(
    ("old", "new", "key", "why"),
    [
        (
            'model = "chat"',
            'model = "chatt"',
            "sessions[1].model",
            "no model named 'chatt'; there are: tape, chat",
        ),
        ('model = "tape"', 'model = "x"', "sessions[2].model", "no model named 'x'"),
        ('name = "chat"', 'name = "tape"', "models[0].name", "'tape' is already model.name"),
        ('aliases = ["gpt-x"]', 'aliases = ["tape"]', "models[0].aliases", "'tape' is already model.name"),
        ('aliases = ["gpt-x"]', "threads = 3", "models[0].threads", "set model.threads"),
        ('aliases = ["gpt-x"]', 'aliases = [""]', "models[0].aliases[0]", "must not be empty"),
        ('name = "chat"\n', "", "models[0]", "name"),
        (
            'choices = ["YES", "NO"]',
            'choices = ["YES"]',
            "questions[1].choices",
            "a single choice decides nothing",
        ),
        ("blocks = 4096", "blocks = 20", "models[0].blocks", "20 blocks of"),
        ('["btc*"]', '["btc"]', "questions[2].text", "no session's model can answer it: this model does not"),
        ('["btc*"]', '["btc", "btc-words"]', "questions[2].sessions", "btc: this model does not answer"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, old: str, new: str, key: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, TOML.replace(old, new, 1))
    found = {each.key: each.message for each in refused.value.problems}
    assert key in found, found
    assert why in found[key]


def test_other_models_need_a_restart_and_a_session_that_changes_its_model_begins_again(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    fewer: Any = structs.replace(config.models[0], aliases=())
    assert changes(config, structs.replace(config, models=(fewer,))).fixed == ("models",)
    moved = structs.replace(config.sessions[0], model="chat")
    found = changes(config, structs.replace(config, sessions=(moved, *config.sessions[1:])))
    assert (found.removed, [each.name for each in found.added], found.fixed) == (("btc",), ["btc"], ())


def test_sessions_of_models_that_come_with_a_restart_stay_as_they_are(tmp_path: Path) -> None:
    old = config_of(tmp_path)
    more = structs.replace(old.models[0], name="more")
    moved = structs.replace(old.sessions[0], model="more")
    added = structs.replace(moved, name="new")
    pattern = structs.replace(old.patterns[0], model="more")
    new = structs.replace(
        old,
        models=(*old.models, more),
        sessions=(moved, *old.sessions[1:], added),
        patterns=(*old.patterns, pattern),
    )
    kept = of_known_models(old, new)
    assert (kept.sessions, kept.patterns) == (old.sessions, old.patterns)
    assert changes(old, kept).fixed == ("models",)
    assert not changes(old, kept)
    # a pattern that gets another model, rather than one more
    assert of_known_models(old, structs.replace(new, patterns=(pattern,))).patterns == old.patterns


@pytest.mark.parametrize(
    ("number", "key", "in_file"),
    [
        (0, "model.path", "model.path"),
        (1, "model.path", "models[0].path"),
        (1, "pool.blocks", "models[0].blocks"),
        (0, "pool.blocks", "pool.blocks"),
        (1, "pool.memory", "models[0].memory"),
        (1, "pool.frame_limit", "pool.frame_limit"),
        (1, "sessions[0].lines", "sessions[1].lines"),
        (0, "sessions[1].lines", "sessions[2].lines"),
        (1, "questions[1].text", "questions[1].text"),
    ],
)
def test_errors_of_a_part_name_the_file_s_keys(tmp_path: Path, number: int, key: str, in_file: str) -> None:
    with pytest.raises(SettingError) as refused, keys_of_file(config_of(tmp_path), number):
        raise SettingError(key, "why")
    assert refused.value.key == in_file
