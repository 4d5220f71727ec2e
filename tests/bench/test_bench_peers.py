"""Contestants: the protocol, one running at a time, deaths and absences, and the same answers from all."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench.peers.conductor import Conductor, Peer, conducting
from bench.peers.contestant import Contestant
from bench.peers.kept import Kept
from bench.peers.measure import (
    KEPT,
    OURS,
    RESENT,
    WARMED,
    Results,
    figures,
    file,
    peers_of,
    race,
    released,
    taking_part,
)
from bench.peers.ours import Ours
from bench.peers.protocol import Answered, Ask, Opening, Took, Update
from bench.peers.scenarios import BURST, GROW, MULTI, RELEASED, Plan, Run, run_of
from bench.run import MeasurementFailed, SuiteRun
from engine.model.chat_format import PromptFormat
from engine.model.embedded import embedded_directory
from tests.kit.weights import smollm2_directory, smollm2_file

OPENING = Opening("nowhere", "float32", 1, [1, 2, 3], 2, 100, 1, 10)
UPDATE, ASK = Update([[[5, 6], [7]], [[8]]]), Ask([(1, [9]), (0, [4, 4])], 2)
ROOT = Path(__file__).parents[2]


def fake(name: str, kind: str) -> Peer:
    return Peer(name, f"tests.bench.fake_peers:{kind}", environment={"OMP_NUM_THREADS": "1"})


@pytest.fixture
def conductor(tmp_path: Path) -> Iterator[Conductor]:
    with conducting(Conductor(tmp_path, 1, lambda text: None, wait_s=60.0)) as conductor:
        yield conductor


def test_contestants_answer_what_they_are_told(conductor: Conductor) -> None:
    """What one prints is no reply; one that reads only when asked has no time of reading."""
    conductor.start([fake("a", "Echo"), fake("b", "Lazy")], OPENING)
    assert conductor.about == {"a": "echo, threads 1", "b": "echo, threads 1"}
    found = conductor.turn(UPDATE, ASK)
    for name, (took, answered) in found.items():
        assert isinstance(took, Took)
        assert (took.ns is None) == (name == "b")
        assert isinstance(answered, Answered)
        assert answered.answers == [[4, 9], [6, 4]]
        assert 0 < answered.first_ns <= answered.ns


def test_one_runs_at_a_time_in_a_drawn_order(tmp_path: Path) -> None:
    """All are held between turns; the order changes from turn to turn, and is the same for the same seed."""
    orders = []
    for _ in range(2):
        with conducting(Conductor(tmp_path, 5, lambda text: None, wait_s=60.0)) as conductor:
            conductor.start([fake(name, "Echo") for name in "abc"], OPENING)
            assert all(_stopped(each.pid) for each in conductor.running.values())
            orders.append([list(conductor.turn(ASK)) for _ in range(6)])
            assert all(_stopped(each.pid) for each in conductor.running.values())
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders[0]}) > 1


def test_one_that_dies_is_reported_and_the_others_go_on(conductor: Conductor) -> None:
    """Its whole group is ended, also what it left behind."""
    conductor.start([fake("a", "Echo"), fake("b", "Dies")], OPENING)
    group = conductor.running["b"].pid
    assert set(conductor.turn(UPDATE)) == {"a", "b"}
    assert set(conductor.turn(UPDATE, ASK)) == {"a"}
    assert "status 1" in conductor.lost["b"]
    assert "RuntimeError: the engine is gone" in conductor.lost["b"]
    _gone(group)
    assert set(conductor.turn(ASK)) == {"a"}


def test_one_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    with conducting(Conductor(tmp_path, 1, lambda text: None, wait_s=20.0)) as conductor:
        conductor.start([fake("a", "Slow")], OPENING)
        conductor.wait_s = 0.1
        assert conductor.turn(ASK) == {}
        assert conductor.lost["a"].startswith("no reply in time")


def test_absent_ones_are_named(conductor: Conductor, tmp_path: Path) -> None:
    """No such module, no such interpreter, an interpreter that is none."""
    nothing, text = tmp_path / "bin" / "python", tmp_path / "text"
    text.write_text("no program")
    peers = [fake("a", "Absent"), replace(fake("b", "Echo"), python=nothing)]
    conductor.start([*peers, replace(fake("c", "Echo"), python=text)], OPENING)
    assert conductor.lost["a"].startswith("absent: no module an_engine_that_nobody_has in ")
    assert "bin/python cannot be started: No such file" in conductor.lost["b"]
    assert "text cannot be started" in conductor.lost["c"]
    assert conductor.about == conductor.running == {}


def test_all_are_ended_with_the_conductor(tmp_path: Path) -> None:
    """By an exception, by SIGTERM, and by SIGKILL, which it does not see."""
    groups = []

    def fail() -> None:
        with conducting(Conductor(tmp_path, 1, lambda text: None)) as conductor:
            conductor.start([fake("a", "Echo")], OPENING)
            groups.append(conductor.running["a"].pid)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    _gone(*groups)
    program = (
        "import sys, time; from pathlib import Path; from bench.peers.protocol import Opening; "
        "from bench.peers.conductor import Conductor, Peer, conducting; "
        f"opening = Opening('', '', 1, [], 1, 1, 1, 1); directory = Path({str(tmp_path)!r})\n"
        "with conducting(Conductor(directory, 1, lambda text: None)) as conductor:\n"
        "    conductor.start([Peer('a', 'tests.bench.fake_peers:Echo')], opening)\n"
        "    print(conductor.running['a'].pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)
        with process:
            assert process.stdout is not None
            group = int(process.stdout.readline())
            process.send_signal(number)
        _gone(group)


def _stopped(pid: int) -> bool:
    """A stop takes effect when the kernel next looks at the process."""
    for _ in range(600):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.05)
    return False


def _gone(group: int) -> None:
    """Wait for the end of all processes of a group: the kernel ends them one after the other."""
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"group {group} lives")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_directory(tmp_path_factory.mktemp("models"), hidden=64, layers=2)


def scenario(plan: Plan, model: Path, rounds: int = 0) -> Run:
    """In small sizes, or in full ones with this many rounds."""
    prompt = PromptFormat.of(AutoTokenizer.from_pretrained(model))
    plan = replace(plan, size=replace(plan.size, rounds=rounds)) if rounds else plan.quick
    return run_of(plan, prompt, str(model), "float32", 1)


@pytest.mark.parametrize("plan", [GROW, BURST, MULTI])
def test_all_give_the_same_answers(plan: Plan, model: Path) -> None:
    """Ours and the kept cache, token by token."""
    run = scenario(plan, model)
    contestants: list[Contestant] = [Ours(), Kept()]
    for contestant in contestants:
        assert "torch" in contestant.open(run.opening)
        for update in run.fill:
            assert contestant.read(update.records)
    asked = 0
    for each in run.rounds:
        for contestant in contestants:
            contestant.read(each.update.records)
        for ask in run.asks:
            ours, *rest = (contestant.ask(ask) for contestant in contestants)
            assert [len(answer) for answer in ours.answers] == [ask.tokens] * len(ask.questions)
            for other in rest:
                assert other.answers == ours.answers
                assert other.leads is not None
                assert min(other.leads) > 0, "equal logits would make either answer right"
            asked += len(ask.questions)
    expected = plan.quick.size.rounds * plan.quick.sessions * plan.quick.questions
    assert asked == expected + (plan.quick.size.rounds if plan.decoded else 0)


@pytest.mark.parametrize(
    ("plan", "bars", "asked"), [(GROW, 55, [(1, 1), (1, 9)]), (BURST, 55, [(6, 1)]), (MULTI, 20, [(8, 1)])]
)
def test_scenarios_have_their_sizes(plan: Plan, bars: int, asked: list[tuple[int, int]], model: Path) -> None:
    """100 bars in each session, then 15 updates; what a contestant keeps has room for all of it."""
    assert plan.size.rounds == 15
    run = scenario(plan, model, rounds=2)
    assert sum(len(update.records[0]) for update in run.fill) == 100
    for each in run.rounds:
        assert [len(own) for own in each.update.records] == [bars] * run.opening.sessions
        assert each.context <= run.opening.tokens
    assert [(len(ask.questions), ask.tokens) for ask in run.asks] == asked
    assert run.opening.sessions == plan.sessions


def test_peers_come_from_the_environments_given() -> None:
    settings = SuiteRun(threads=3, vllm=Path("/v/bin/python"))
    peers = {peer.name: peer.python for peer in peers_of(settings)}
    assert peers == {KEPT: None, OURS: None, RESENT: settings.vllm, WARMED: settings.vllm}
    assert {peer.environment["OMP_NUM_THREADS"] for peer in peers_of(settings)} == {"3"}


def results(ns: list[int], *tokens: int, reading: bool = True) -> Results:
    found = Results()
    for each, token in zip(ns, tokens, strict=True):
        found.add([Took(2_000_000 if reading else None), Answered([[token]], each, each, [0.25])])
    return found


def test_ratios_are_of_the_same_step_and_answers_are_compared() -> None:
    """A contestant that was lost after two rounds is compared in these two."""
    million = 1_000_000
    found = {
        KEPT: results([4 * million, 8 * million, 16 * million], 1, 2, 3),
        OURS: results([2 * million, 4 * million, 4 * million], 1, 2, 3),
        WARMED: results([4 * million, 2 * million], 1, 7, reading=False),
    }
    rows = list(figures(GROW, "float32", found, [100, 200, 300]))
    setting = [row.setting.get("contestant", row.setting.get("context")) for row in rows]
    by = {(row.name, row.table, row.against, of): row for row, of in zip(rows, setting, strict=True)}
    assert by["question P50", "float32", KEPT, OURS].ratio == 0.5
    assert by["question P50", "float32", KEPT, WARMED].ratio == 0.625
    agreed = by["answers equal", "float32", "compared", WARMED]
    assert (agreed.ours, agreed.reference) == (1, 2)
    assert by["largest lead of another answer", "float32", "", WARMED].ours == 0.25
    over = by["question P50", "Ours over the others, float32", WARMED, None]
    assert (over.ratio, over.verdict) == (1.25, "missed")
    assert by["question P50", "Ours by context, float32", WARMED, 200].ratio == 2.0
    assert ("reading P50", "float32", KEPT, WARMED) not in by
    taken = taking_part("float32", found, {KEPT: "torch 2", WARMED: "vllm 1"}, {WARMED: "ended\n    log"})
    engines = {row.setting["contestant"]: (row.ours, row.setting["engine"]) for row in taken}
    assert engines[KEPT] == (3, "torch 2")
    assert engines[WARMED] == (2, "vllm 1; ended")
    assert engines["llama.cpp"] == (0, "absent: no environment given")


@pytest.mark.parametrize(
    ("plan", "dtype", "compared"),
    [(GROW, "bfloat16", 2), (RELEASED, "float32", 2), (RELEASED, "bfloat16", 1)],
)
def test_ties_of_a_released_model_are_not_compared(plan: Plan, dtype: str, compared: int) -> None:
    """Its second answer leads by 0.1 logits, which rounding to bfloat16 may turn round."""
    answered = [Answered([[token]], 8, 8, [lead]) for token, lead in ((1, 0.25), (2, 0.1))]
    found = {KEPT: Results(asked=answered), OURS: results([4, 4], 1, 3)}
    rows = figures(plan, dtype, found, [100, 200])
    (agreed,) = (row for row in rows if row.name == "answers equal" and row.setting["contestant"] == OURS)
    assert (agreed.ours, agreed.reference) == (1, compared)


@pytest.mark.parametrize("room", [1500, 4000])
def test_a_plan_fits_the_context(model: Path, room: int) -> None:
    prompt = PromptFormat.of(AutoTokenizer.from_pretrained(model, local_files_only=True))
    plan = RELEASED.within(prompt, room)
    opening = run_of(plan, prompt, str(model), "float32", 1).opening
    assert 0.7 * room < opening.tokens + opening.question <= room
    assert (plan.size.rounds, plan.decoded) == (RELEASED.size.rounds, RELEASED.decoded)


def test_a_whole_race_is_run(conductor: Conductor, model: Path) -> None:
    """Of echoes; what every part of the suite does with real contestants. A cold start is not measured."""
    run = scenario(GROW, model)
    found = race(run, [fake(KEPT, "Echo"), fake(OURS, "Cold"), fake("b", "Dies")], conductor)
    assert {name: len(each.asked) for name, each in found.items()} == {KEPT: 3, OURS: 3}
    assert {len(each.longer) for each in found.values()} == {3}
    rows = figures(GROW, "float32", found, [each.context for each in run.rounds])
    agreed = [row for row in rows if row.name == "answers equal"]
    assert [(row.ours, row.reference) for row in agreed] == [(6, 6)]


@pytest.mark.weights
def test_the_codes_of_a_file_answer_as_its_expanded_weights_do() -> None:
    """The part `file` on SmolLM2: its codes are exactly what they expand to, so no answer differs."""
    run = SuiteRun(threads=1, quick=True, say=lambda text: None, model=smollm2_file(), dtypes=["float32"])
    smollm2_directory()
    rows = list(file(run))
    engines = {row.setting["contestant"]: row.setting["engine"] for row in rows if row.name == "rounds"}
    assert "weights in int" in str(engines[OURS])
    (equal,) = (row for row in rows if row.name == "answers equal" and row.setting["contestant"] == OURS)
    assert equal.ours == equal.reference
    assert equal.ours > 0


def test_each_part_on_released_weights_names_the_model_that_it_needs(tmp_path: Path) -> None:
    for part, model in ((file, tmp_path), (file, None), (released, None)):
        with pytest.raises(MeasurementFailed, match="needs --model"):
            list(part(SuiteRun(model=model)))
