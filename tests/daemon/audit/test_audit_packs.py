"""Answers by a question pack are explained and derived again, while it is the pack that gave them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.config.load import load_config
from engine.model.question_pack import pinned, write_pack
from feeds.market_data import Answer
from feeds.mock_broker import MockBroker
from tests.daemon.audit.test_audit_reproduce import Ran, answered, config_of, topics_of
from tests.kit.models import terse_directory
from tests.kit.packs import CHOICES, TEXT, random_pack

SECONDS = 9
pytestmark = pytest.mark.timeout(900)  # a daemon and several engines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packs")


@pytest.fixture(scope="module")
def pack(folder: Path) -> Path:
    write_pack(folder / "near.pack", random_pack(terse_directory(folder / "model"), tokens=2))
    return folder / "near.pack"


@pytest.fixture(scope="module")
def ran(folder: Path, pack: Path) -> Iterator[Ran]:
    """A daemon at ease ran on a mock broker, which is still there. Bars have left its window."""
    asked = f'[[questions]]\nname = "near"\ntext = "{TEXT}"\nchoices = {[*CHOICES]}\npack = "{pack}"'
    with MockBroker() as broker:
        bootstrap = topics_of(broker)
        file = config_of(folder, bootstrap, str(folder / "model"), "retention_records = 6", asked)
        config = load_config(file)
        yield Ran("packs", file, config, bootstrap, asyncio.run(answered(config, bootstrap, SECONDS)))


@pytest.fixture
def near(ran: Ran) -> list[Answer]:
    return [each for each in ran.answers if each.question == "near"]


def test_an_answer_by_a_pack_is_derived_again_and_its_window_explained(ran: Ran, near: list[Answer]) -> None:
    assert [each.data_version for each in near] == [*range(1, SECONDS + 1)]
    ran.check(near[3], near[-1])
    result = ran.invoke("reproduce", near[-1].answer_id, "--bits", "--from", "0")
    assert "equal to the last bit" in result.output, result.output
    asked = ran.told("explain", near[-1].answer_id)["question"]
    assert (asked["text"], len(asked["tokens"])) == (TEXT, 2)


def test_another_pack_in_its_place_derives_no_answer_of_the_former(
    ran: Ran, near: list[Answer], folder: Path, pack: Path, tmp_path: Path
) -> None:
    """Answers to other questions are derived as before; without the file there is no configuration."""
    written = pack.read_bytes()
    saved = ran.saved(tmp_path, near[-1])
    try:
        write_pack(pack, random_pack(folder / "model", tokens=2, seed=1))
        result = ran.invoke("reproduce", saved)
        assert result.exit_code == 3
        assert f"is answered by another question pack, {pinned(str(pack))}" in result.output
        ran.check(ran.of(SECONDS))
        pack.unlink()
        result = ran.invoke("explain", saved)
        assert result.exit_code == 2
        assert "questions[0].pack: cannot read the question pack" in result.output
    finally:
        pack.write_bytes(written)
