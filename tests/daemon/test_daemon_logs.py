"""Log lines: one line an event whatever it says, with keys or as JSON, priorities for the journal, traces."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.config.schema import LogConfig
from daemon.doctor.service_log import judge_log
from daemon.logs import JsonLines, KeyValueLines, Priorities, add_trace, set_up_logging
from daemon.traces.trace_context import TraceContext, current

CONTEXT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
FORMS = {"text": KeyValueLines("gateway"), "json": JsonLines("gateway")}
KEY = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|[^ "=]+)')


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook, warnings.showwarning)
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level
    sys.excepthook, threading.excepthook, warnings.showwarning = hooks


def record(message: str, *arguments: object, error: BaseException | None = None, **extra: object):  # type: ignore[no-untyped-def]
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("daemon.x", logging.WARNING, "f.py", 1, message, arguments, exc_info)
    vars(made).update(extra)
    return made


def raised() -> BaseException:
    try:
        raise ValueError('two\nlines "quoted"')
    except ValueError as error:
        return error


@given(st.text(), st.text())
def test_an_event_is_one_line_from_which_its_keys_are_read(message: str, value: str) -> None:
    line = FORMS["text"].format(record("%s", message, note=value))
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    keys = dict(KEY.findall(line[line.rindex(" process=") :]))
    note = keys["note"]
    assert (json.loads(note) if note.startswith('"') else note) == value
    told = json.loads(FORMS["json"].format(record("%s", message, note=value)))
    assert (told["message"], told["note"]) == (message, value)


def test_a_line_of_text_begins_with_time_level_and_event() -> None:
    line = FORMS["text"].format(record("session %s is late", "a", trace_id="ab"))
    at = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    told = "WARNING session a is late process=gateway logger=daemon.x trace_id=ab"
    assert re.fullmatch(f"{at} {re.escape(told)}", line)


@pytest.mark.parametrize("form", FORMS)
def test_a_traceback_is_folded_into_the_line(form: str) -> None:
    line = FORMS[form].format(record("it failed", error=raised()))
    assert "\n" not in line
    text = json.loads(line)["traceback"] if form == "json" else json.loads(line.split("traceback=")[1])
    assert text.splitlines()[0] == "Traceback (most recent call last):"
    assert text.endswith('ValueError: two\nlines "quoted"')


@pytest.mark.parametrize("form", FORMS)
def test_the_journal_gets_each_priority(form: str) -> None:
    levels = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
    for name, priority in levels.items():
        made = record("x")
        made.levelname, made.levelno = name, getattr(logging, name)
        line = Priorities(FORMS[form]).format(made)
        assert line.startswith(f"<{priority}>")
        assert line[3:] == FORMS[form].format(made)


@pytest.mark.parametrize("form", FORMS)
def test_the_doctor_finds_warnings_and_errors(form: str) -> None:
    told = judge_log([FORMS[form].format(record("is late"))])
    assert told.seen.startswith("1 of the newest 1")


def test_lines_within_a_request_name_its_trace() -> None:
    plain, told = record("x"), record("x")
    add_trace(plain)
    token = current.set(CONTEXT)
    own = record("x", trace_id="own")
    add_trace(told)
    add_trace(own)
    current.reset(token)
    assert not hasattr(plain, "trace_id")
    assert (told.trace_id, own.trace_id) == (CONTEXT.trace_id, "own")
    assert json.loads(FORMS["json"].format(told))["trace_id"] == CONTEXT.trace_id


PROGRAM = """
import logging, sys, threading, warnings
from daemon.config.schema import LogConfig
from daemon.logs import set_up_logging
if __name__ == "__main__":
    set_up_logging(LogConfig(json=sys.argv[1] == "json"), "engine")
    warnings.warn("odd\\nthing")
    thread = threading.Thread(target=lambda: 1 / 0, name="worker 1")
    thread.start()
    thread.join()
    raise RuntimeError("the end")
"""


@pytest.mark.parametrize("journal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_whatever_a_process_says_is_lines(tmp_path: Path, form: str, journal: bool) -> None:
    """Warnings, threads that fail, and the error that ends it."""
    file, said = tmp_path / "program.py", tmp_path / "said"
    file.write_text(PROGRAM)
    with said.open("wb") as stream:
        found = os.fstat(stream.fileno())
        named = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino if journal else 1}"}
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, file, form], stderr=stream, env={**os.environ, **named, **paths}
        )
    assert done.returncode == 1
    lines = said.read_text().splitlines()
    assert len(lines) == 3
    assert [line[:3] for line in lines] == ["<4>", "<3>", "<2>"] or not journal
    lines = [line[3 * journal :] for line in lines]
    for line, words in zip(lines, ("odd", "worker 1", "the end"), strict=True):
        assert words in line
        if form == "json":
            assert json.loads(line)["process"] == "engine"
        else:
            assert " process=engine " in line


def test_a_stream_without_a_file_is_no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    set_up_logging(LogConfig(), "gateway")
    logging.getLogger("x").warning("two\nlines")
    assert "WARNING two\\nlines process=gateway logger=x\n" in stream.getvalue()
