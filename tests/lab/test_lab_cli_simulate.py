"""`foretick simulate` from the command line."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from daemon.cli.main import main
from lab.simulation.experiment import ExperimentResult
from lab.simulation.report import table


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", "--requests", "30", *arguments])


def test_policies_and_rates_side_by_side(tmp_path: Path) -> None:
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    policies = "vllm-ns,fcfs,klpm:2"
    found = simulate("--policy", policies, "--qps", "1,4", "--json", str(out), "--plot", str(png))
    assert found.exit_code == 0, found.output
    outcome = msgspec.json.decode(out.read_bytes(), type=ExperimentResult)
    assert [(run.qps, run.policy) for run in outcome.runs] == [
        (rate, policy) for rate in (1.0, 4.0) for policy in policies.split(",")
    ]
    assert all(run.requests == 30 and not run.failures for run in outcome.runs)
    streamed, at_once = outcome.runs[1], outcome.runs[0]
    assert streamed.ttft_s.p50 < at_once.ttft_s.p50
    assert table(outcome.runs) in found.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_saved_trace_gives_the_run_it_was_saved_from(tmp_path: Path) -> None:
    trace, first, again = (str(tmp_path / name) for name in ("t.jsonl", "a.json", "b.json"))
    workload = ("--workload", "anns", "--qps", "2", "--delay", "3", "--policy", "lcas")
    assert simulate(*workload, "--save-trace", trace).exit_code == 0
    assert simulate(*workload, "--json", first).exit_code == 0
    assert simulate("--trace", trace, "--policy", "lcas", "--json", again).exit_code == 0
    one, other = (
        msgspec.json.decode(Path(name).read_bytes(), type=ExperimentResult).runs[0] for name in (first, again)
    )
    found = msgspec.structs.replace(other, workload="anns", qps=2.0)
    assert found == one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "sjf"), "there is no policy 'sjf'"),
        (("--policy", "lpm:3"), "only klpm takes a number"),
        (("--workload", "mail"), "there is no workload 'mail'"),
        (("--profile", "h300"), "h300: no profile"),
        (("--qps", "1,x"), "could not convert string to float: 'x'"),
        (("--qps", "0"), "qps must be above 0"),
        (("--pool-tokens", "3"), "at least one block"),
    ],
)
def test_invalid_arguments_end_with_status_2_and_a_message(arguments: tuple[str, str], message: str) -> None:
    found = simulate(*arguments)
    assert found.exit_code == 2
    assert message in found.stderr


def test_a_broken_trace_is_named_by_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"time_ns": 0, "request": 0, "op": "open", "tokens": [1], "last": true}\nnonsense\n')
    found = simulate("--trace", str(trace))
    assert found.exit_code == 2
    assert found.stderr.startswith("line 2: ")
