"""`foretick doctor`: a verdict and one next step for the machine, the brokers, the files and the daemon."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import click

from daemon.cli.check import findings
from daemon.cli.options import EXIT_CONFIG, EXIT_FAILED, config_option, overrides_of, set_option
from daemon.config.load import ConfigError, load_config
from daemon.config.schema import Config, LogConfig
from daemon.doctor.diagnosis import Diagnosis, Verdict, fine
from daemon.doctor.examination import Facts, gather, judge
from daemon.doctor.redaction import Redactor
from daemon.logs import set_up_logging

SHOWN: dict[Verdict, str] = {
    "ok": "ok     ",
    "warning": "WARNING",
    "problem": "PROBLEM",
    "skipped": "skipped",
}
_SEEN_CLOSER = (".bootstrap", ".topic", ".progress_topic")
"""Keys of `foretick check` that `daemon.doctor.brokers` says more about."""

unit_option = click.option(
    "--unit", default="foretick", show_default=True, help="the daemon's systemd unit, whose log is read"
)


@click.command("doctor")
@config_option
@set_option
@unit_option
@click.option("--json", "as_json", is_flag=True, help="a JSON list")
def command(config_path: Path, settings: tuple[str, ...], unit: str, as_json: bool) -> None:
    """Look at the machine, the brokers, the files and the daemon, which may run or not.

    Prints a verdict for each, and one next step where it is not ok. Nothing is changed. Exit status 1 where
    there is a problem, 2 where the file cannot be used.
    """
    try:
        config = load_config(config_path, None, overrides_of(settings))
    except ConfigError as error:
        show([unusable(error)], as_json)
        sys.exit(EXIT_CONFIG)
    _, diagnoses = examine(config, unit)
    show(diagnoses, as_json)
    sys.exit(EXIT_FAILED if any(each.verdict == "problem" for each in diagnoses) else 0)


def unusable(error: ConfigError) -> Diagnosis:
    """A file that neither a start nor a reload takes."""
    step = "correct it; `foretick check` looks again. A daemon that runs goes on with what it has"
    return Diagnosis("configuration", "problem", str(error), step, "configuration.md")


def show(diagnoses: Sequence[Diagnosis], as_json: bool) -> None:
    """Print them, as JSON or as lines."""
    if as_json:
        click.echo(json.dumps([asdict(each) for each in diagnoses], indent=1))
    else:
        for each in diagnoses:
            click.echo(shown(each))
        counts = Counter(each.verdict for each in diagnoses)
        click.echo(", ".join(f"{counts[verdict]} {verdict}" for verdict in SHOWN))


def examine(config: Config, unit: str) -> tuple[Facts, list[Diagnosis]]:
    """All that can be seen, and what to think of it, without secrets."""
    set_up_logging(LogConfig(level="error"), "doctor")
    facts, redactor = gather(config, unit), Redactor.of(config)
    found = [*judge(facts, config, datetime.now(UTC)), *_checked(config, facts.daemon.running)]
    return facts, [replace(each, seen=redactor.clean(each.seen)) for each in found]


def shown(diagnosis: Diagnosis) -> str:
    """As one line, and a second one with the next step, if any."""
    line = f"{SHOWN[diagnosis.verdict]} {diagnosis.check}: {diagnosis.seen}"
    guide = f" (docs/{diagnosis.guide})" if diagnosis.guide else ""
    return f"{line}\n        next: {diagnosis.step}{guide}" if diagnosis.step else line


def _checked(config: Config, running: bool) -> Iterator[Diagnosis]:
    """What `foretick check` finds; of a running daemon neither its model nor its ports, which it has."""
    found = [each for each in findings(config, running=running) if not each.key.endswith(_SEEN_CLOSER)]
    for each in found:
        if not each.ok:
            step = f"correct {each.key}; `foretick check` looks again"
            yield Diagnosis(each.key, "problem", each.message, step, "configuration.md")
    yield fine("check", f"{sum(each.ok for each in found)} of {len(found)} settings can be used as they are")
