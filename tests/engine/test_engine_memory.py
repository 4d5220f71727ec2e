"""What was measured is remembered by CPU, threads, question and code, and never read from a torn file."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import measurement_cache as module
from engine.cpu import cpu_identity
from engine.measurement_cache import Memory

QUESTION = {"about": "a test", "shape": "1 x 2"}


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(lambda: tmp_path / "measured")


def test_what_was_found_is_found_again(memory: Memory) -> None:
    assert memory.recall(QUESTION, int) is None
    memory.remember(QUESTION, 5)
    assert memory.recall(QUESTION, int) == 5
    memory.remember(QUESTION, 6)
    assert memory.recall(QUESTION, int) == 6
    assert [each.name for each in memory.directory().iterdir()] == [memory.path(QUESTION).name]
    assert memory.recall({**QUESTION, "shape": "1 x 3"}, int) is None


@pytest.mark.parametrize("what", ["cpu_name", "cpu_features"])
def test_another_cpu_measures_for_itself(memory: Memory, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.remember(QUESTION, 5)
    monkeypatch.setattr(module, what, lambda: "another")
    assert memory.recall(QUESTION, int) is None


def test_so_does_another_number_of_threads(memory: Memory, threads: Callable[[int], None]) -> None:
    memory.remember(QUESTION, 5)
    threads(torch.get_num_threads() + 1)
    assert memory.recall(QUESTION, int) is None


def test_other_code_measures_into_the_same_file(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.remember(QUESTION, 5)
    path = memory.path(QUESTION)
    monkeypatch.setattr(module, "code", lambda: "of tomorrow")
    assert memory.recall(QUESTION, int) is None
    assert memory.path(QUESTION) == path
    memory.remember(QUESTION, 7)
    assert memory.recall(QUESTION, int) == 7


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=80), cut=st.integers(0, 400), middle=st.booleans())
def test_a_file_that_is_not_whole_is_none(memory: Memory, content: bytes, cut: int, middle: bool) -> None:
    """Replaced, torn, or with foreign bytes in its middle."""
    memory.remember(QUESTION, 5)
    path = memory.path(QUESTION)
    whole = path.read_bytes()
    torn = whole[:cut] + content + (whole[cut:] if middle else b"")
    path.write_bytes(torn)
    found = memory.recall(QUESTION, int)
    try:  # bytes that say the same: white space, or nothing
        same = json.loads(torn) == json.loads(whole)
    except ValueError:
        same = False
    assert found == (5 if same else None) or _differs_in_what_was_found(torn, whole)
    memory.remember(QUESTION, 8)
    assert memory.recall(QUESTION, int) == 8


def _differs_in_what_was_found(torn: bytes, whole: bytes) -> bool:
    """A digit more in the number: a whole file again."""
    one, other = json.loads(torn), json.loads(whole)
    return all(one[name] == other[name] for name in ("question", "code"))


def test_a_find_of_another_kind_is_none(memory: Memory) -> None:
    memory.remember(QUESTION, "text")
    assert memory.recall(QUESTION, int) is None


def test_the_questions_in_a_file_must_be_the_one(memory: Memory) -> None:
    """Two questions may have one digest."""
    memory.remember(QUESTION, 5)
    path = memory.path(QUESTION)
    entry = msgspec.json.decode(path.read_bytes())
    entry["question"]["about"] = "another"
    path.write_bytes(msgspec.json.encode(entry))
    assert memory.recall(QUESTION, int) is None


def test_without_a_directory_every_start_measures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    memory = Memory(lambda: tmp_path / "file" / "measured")
    with caplog.at_level("INFO"):
        memory.remember(QUESTION, 5)
    assert "every start measures" in caplog.text
    assert memory.recall(QUESTION, int) is None


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: a b\n", "Some CPU @ 2 GHz"),
        ("processor\t: 0\nmodel name\t: A: B\nmodel name\t: C\n", "A: B"),
        ("model name :\n", cpu_identity.platform.machine()),
        ("", cpu_identity.platform.machine()),
    ],
)
def test_the_cpu_has_its_makers_name(cpuinfo: str, name: str) -> None:
    assert cpu_identity.model_name(cpuinfo) == name
