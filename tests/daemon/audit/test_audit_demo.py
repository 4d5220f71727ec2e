"""What `foretick demo --keep` writes is the demo's own configuration."""

from pathlib import Path

import pytest

from daemon.cli.demo import demo_config, demo_file
from daemon.config.fingerprint import fingerprint
from daemon.config.load import load_config
from daemon.config.standing import questions_of


@pytest.mark.parametrize("model", [None, Path("untrained")])
def test_the_file_that_the_demo_keeps_is_the_configuration_that_answers(
    model: Path | None, tmp_path: Path
) -> None:
    config, file = demo_config("127.0.0.1:1", model=model), tmp_path / "foretick.toml"
    file.write_text(demo_file(config, "tcp://127.0.0.1:7777", 7778))
    read = load_config(file)
    assert [each.name for each in read.sessions] == [each.name for each in config.sessions]
    for ours, theirs in zip(config.sessions, read.sessions, strict=True):
        asked = [each.question for each in questions_of(config) if each.session == ours.name]
        assert fingerprint(config, ours, asked) == fingerprint(read, theirs, asked)
    assert list(questions_of(read)) == list(questions_of(config))
    assert read.models == config.models
    assert (read.query.endpoint, read.http.port) == ("tcp://127.0.0.1:7777", 7778)
    assert read.source.kafka == config.source.kafka
    assert read.sink.kafka == config.sink.kafka
