"""`foretick train`, `evaluate` and `calibrate`. Heavy modules are imported on use."""

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_WRITTEN = click.Path(dir_okay=False, path_type=Path)
_PLACEMENTS = ("terse", "numbered")
_LINES = ("compact", "decimal", "table", "words")
_TRIED = 16
"""Batches of tapes on which a question's rule is tried before a model is asked."""
_int, _option = click.IntRange, partial(click.option, show_default=True)


@click.command()
@_option("--out", type=_DIRECTORY, required=True, help="Directory of the checkpoints, and of the adapter.")
@_option(
    "--base",
    type=click.Path(exists=True, path_type=Path),
    help="Train a LoRA adapter of this language model, a directory or a GGUF file, in place of a tape model.",
)
@_option("--rank", type=_int(1), default=32, help="With --base: rank of the adapter.")
@_option("--upper", type=_int(0), default=0, help="With --base: train its last layers only; 0 is all.")
@_option("--lines", type=click.Choice(_LINES), default="decimal", help="With --base: how bars are written.")
@_option("--reading", type=_int(0), default=0, help="With --base: first steps, in which nothing is asked.")
@_option("--window", type=_int(32), default=64, help="With --base: bars of a tape.")
@_option("--cuts", type=_int(1), default=4, help="With --base: bars of a tape behind which it is asked.")
@_option("--rate", type=click.FloatRange(0, min_open=True), default=1.5e-4, help="With --base: its rate.")
@_option("--labels", type=_int(1), default=400, help="With --base: labels of each question at the end.")
@_option("--steps", type=_int(1), default=7900, help="Steps, cooldown included.")
@_option("--cooldown", type=_int(0), default=1600, help="Last steps, over which the rate falls to nothing.")
@_option("--short", type=_int(0), default=1000, help="First steps, with windows of 32 bars.")
@_option("--tokens", type=_int(256), default=4096, help="Tokens of a worker's step.")
@_option("--hidden", type=_int(20), default=128, help="Width of the model.")
@_option("--layers", type=_int(2), default=6, help="Layers of the model.")
@_option("--heads", type=_int(1), default=4, help="Heads of a layer.")
@_option("--inner", type=_int(8), default=352, help="Width of the feed-forward part.")
@_option("--seed", type=_int(0), default=0, help="Seed of weights and tapes.")
@_option("--workers", type=_int(1), default=1, help="Processes, one thread each.")
@_option("--resume", type=_FILE, help="Checkpoint to continue from, such as last.pt.")
@_option("--export", "directory", type=_DIRECTORY, help="Write a transformers directory at the end.")
@_option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), default="float32", help="Of the exported weights."
)
def train(
    out: Path,
    base: Path | None,
    workers: int,
    resume: Path | None,
    directory: Path | None,
    dtype: str,
    **options: Any,
) -> None:
    """Train the tape model on generated tapes, from the beginning or from a checkpoint.

    Checkpoints are `last.pt` (every 100 steps) and `stable.pt` (before the cooldown). Equal seeds, steps and
    workers make equal models. A checkpoint that has all --steps is not trained further, only exported.

    With --base a language model learns to read such --lines and to answer the paper's five questions and
    for the exact value, in words as the daemon asks them; texts of its own, mixed in, keep it talking. --out
    is then the adapter, for `model.adapter` and `foretick evaluate --adapter`, with `last.pt`, a log and a
    report. --steps, --cooldown, --tokens, --seed and --resume count; sizes of the tape model do not.
    """
    if base is not None:
        _train_adapter(base, out, resume, options)
        return
    if options["hidden"] % options["heads"] or options["hidden"] // options["heads"] % 2:
        raise click.UsageError("--hidden must be a multiple of --heads, and the quotient even")
    import torch
    from torch.multiprocessing.spawn import spawn

    from training.export import export
    from training.train import load

    out.mkdir(parents=True, exist_ok=True)
    arguments = (out, workers, resume, options, _free_port())
    if workers == 1:
        _work(0, *arguments)
    else:
        spawn(_work, arguments, workers)  # type: ignore[no-untyped-call]  # torch's own has no annotation
    if directory is not None:
        done = (
            resume if resume is not None and load(resume)[1]["step"] >= options["steps"] else out / "last.pt"
        )
        model, state = load(done)
        try:
            export(model, directory, getattr(torch, dtype))
        except ValueError as error:
            raise click.ClickException(str(error)) from None
        click.echo(f"step {state['step']} written to {directory}")


def _train_adapter(base: Path, out: Path, resume: Path | None, options: dict[str, Any]) -> None:
    from engine.model.architectures import ModelError
    from training.tune import TunePlan
    from training.tune_run import tune

    names = ("steps", "cooldown", "seed", "reading", "tokens", "window", "cuts", "rank", "upper", "lines")
    plan = TunePlan(**{name: options[name] for name in names}, learning_rate=options["rate"])
    if base.suffix == ".gguf":
        base = _expanded(base, "auto")
    try:
        tune(base, out, plan, resume, options["labels"], _console())
    except ModelError as error:
        raise click.BadParameter(str(error), param_hint="--base") from None


def _work(
    rank: int, out: Path, workers: int, resume: Path | None, options: dict[str, Any], port: int
) -> None:
    """One worker's training; the first shows the progress."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from training.model import Shape
    from training.train import Plan
    from training.train import train as steps

    torch.set_num_threads(1)
    if workers > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.distributed.init_process_group("gloo", rank=rank, world_size=workers)
    plan = Plan(
        options["steps"], options["cooldown"], options["short"], options["seed"], tokens=options["tokens"]
    )
    shape = Shape(options["hidden"], options["layers"], options["heads"], options["inner"])
    description = TextColumn("{task.description}")
    columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), description
    with Progress(*columns, disable=rank > 0) as progress:
        task = progress.add_task("", total=plan.steps)
        for log in steps(plan, out, shape, resume, rank, workers):
            mean = sum(log["loss"].values()) / len(log["loss"])
            rate = log["tokens"] / max(log["seconds"], 1)
            progress.update(task, completed=log["step"], description=f"loss {mean:.3f}, {rate:,.0f} tokens/s")
    if workers > 1:
        torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _asked(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which model is asked what."""
    options = (
        _option(
            "--model", "path", type=click.Path(exists=True, path_type=Path), required=True,
            help="Directory of a model.",
        ),
        _option("--adapter", type=_DIRECTORY, help="Directory of an adapter that was trained on it."),
        _option(
            "--tape", default="generated",
            help="`generated`, or a recorded file; never one that the model was trained on.",
        ),
        _option("--format", "form", help="Format of the file: a built-in name, or a TOML file."),
        _option("--labels", type=_int(1), default=20_000, help="Labels of each question."),
        _option("--window", type=_int(32), default=64, help="Bars that the model sees."),
        _option(
            "--placement", "placements", type=click.Choice(_PLACEMENTS), multiple=True, default=_PLACEMENTS,
            help="How questions are asked: by their token, or by number from the frozen prefix.",
        ),
        _option("--max-tapes", type=_int(1), default=20_000, help="Where to stop."),
        _option(
            "--lines", type=click.Choice(_LINES),
            help="How bars are written, for a model asked prompt by prompt. Default: as it reads best.",
        ),
        _option(
            "--examples", type=_int(0, 8), default=0,
            help="Worked examples before the bars, as `model.examples`; not for compact lines.",
        ),
        _option(
            "--weights", type=click.Choice(["auto", "float", "int8", "int4", "fp8"]), default="auto",
            help="How the model's weights are held, as model.weights; a calibration is for one way.",
        ),
        _option(
            "--kv-dtype", type=click.Choice(["auto", "bfloat16", "int8"]), default="auto",
            help="Type of the model's KV, as model.kv_dtype; a calibration is for one type.",
        ),
        _option(
            "--question", "questions", type=_FILE, multiple=True,
            help="A question of your own with its rule, labeller or labels, in TOML, in place of the "
            "eighteen; may be repeated.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_asked
@_option(
    "--windows",
    type=_int(1, 8),
    multiple=True,
    default=(1, 2, 3),
    help="Windows of bars read before a question: 1 is a fresh window, others slide.",
)
@_option("--seed", type=_int(0), default=1, help="Seed of generated tapes.")
@_option("--calibration", type=_FILE, help="Default: calibration.json in the model's directory.")
@_option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    help="Ask the tape model too as the daemon serves it, prompt by prompt, in this dtype.",
)
@_option("--json", "json_file", type=_WRITTEN, help="Write scores here.")
@_option(
    "--plots",
    type=_WRITTEN,
    help="Write NAME-...-reliability.png, -risk-coverage.png and -distance.png for each setting.",
)
@_option("--folds", type=_int(1), default=5, help="Test folds of questions about what comes next.")
@_option("--embargo", type=_int(0), help="Bars behind a test fold that are in none. Default: the horizon.")
@_option(
    "--early-exit",
    is_flag=True,
    help="Score asks that exit at the ready position (flash.early_exit), by logit gap, in place of all.",
)
def evaluate(
    path: Path,
    adapter: Path | None,
    tape: str,
    form: str | None,
    labels: int,
    window: int,
    placements: tuple[Any, ...],
    windows: tuple[int, ...],
    seed: int,
    max_tapes: int,
    calibration: Path | None,
    dtype: str | None,
    lines: Any,
    examples: int,
    weights: Any,
    kv_dtype: Any,
    questions: tuple[Path, ...],
    json_file: Path | None,
    plots: Path | None,
    early_exit: bool,
    **ahead: Any,
) -> None:
    """Score a model's answers against computed labels, next to two baselines.

    The tape model reads a tape once for all questions. Any other model, a directory or a GGUF file, is asked
    prompt by prompt on the engine, which takes its time: begin with few --labels. It reads the last window
    only, as exact sessions do.

    Generated tapes are drawn from wider ranges than training's, with seeds of their own. Shares are in
    percent, `95 %` is the interval of the balanced accuracy. `majority` gives the most frequent answer,
    `simple` a plain guess from the last bars. ECE, `at 80 %` (share right among the most confident 80 %) and
    `covered` (choice sets with the right answer) are of calibrated probabilities where there are any.

    A question with a horizon, or with a file of labels, is asked in the order of a recorded --tape, and
    scored walk-forward: every test fold by what its past had fitted, whatever --calibration says.
    """
    import msgspec
    from rich.progress import Progress

    from tapes.generate import EVALUATION
    from training.evaluate import Report, score, tables
    from training.sources import Setting, collect

    if plots is not None:
        from training.plots import plot

    source = _source(tape, form, seed, EVALUATION)
    asked = _asked_of(questions, source, window)
    read_as = dtype or ("auto" if early_exit else None)
    model, name, revision = _read_model(path, read_as, lines, asked, adapter, examples, weights, kv_dtype)
    if early_exit:
        _evaluate_exits(model, source, Setting(placements[0], 1, window), labels, (name, revision), json_file)
        return
    if model.asked.in_time:
        from training.ahead_commands import evaluate_ahead

        evaluate_ahead(model, source, placements, window, labels, (name, revision), json_file, **ahead)
        return
    # the one in the directory is of its weights and KV as they are
    other = (weights, kv_dtype) != ("auto", "auto") and calibration is None
    fitted = None if other else _read_calibration(adapter or path, revision, model.lines, calibration)
    console, settings = _console(), {}
    for placement in dict.fromkeys(placements):
        for read in dict.fromkeys(windows):
            setting = Setting(placement, read, window)
            with Progress(console=console, transient=True) as progress:
                task = progress.add_task(setting.name)
                advance = partial(_advance, progress, task)
                answers = collect(model, source, setting, labels, max_tapes, advance)
            settings[setting.name] = [score(each, fitted, setting.numbered) for each in answers]
            if plots is not None:
                plot(plots.with_name(f"{plots.stem}-{placement}-{read}"), answers, fitted, setting.numbered)
    report = Report(name, revision, source.described, settings, model.lines)
    for table in tables(report):
        console.print(table)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def _evaluate_exits(
    model: Any, source: Any, setting: Any, labels: int, named: tuple[str, str], json_file: Path | None
) -> None:
    """Print and write what becomes of asks that exit early."""
    import msgspec
    from rich.progress import Progress

    from training.early_exit import ask_all, report, table
    from training.served import Served

    if not isinstance(model, Served) or model.asked.in_time:
        why = "a model that a daemon serves, and for no question that is asked in time order"
        raise click.UsageError(f"--early-exit is for {why}")
    console = _console()
    with Progress(console=console, transient=True) as progress:
        advance = partial(_advance, progress, progress.add_task("early exits"))
        asked, fast = ask_all(model, source, setting, labels, advance)
    made = report(asked, fast, lambda token: model.prompt.decode([token]), named, source.described)
    console.print(table(made))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")


@click.command()
@_asked
@_option("--out", type=_WRITTEN, help="Default: calibration.json in the directory.")
@_option("--seed", type=_int(0), default=2, help="Seed of generated tapes.")
@_option("--until", default="", help="With a horizon or a file of labels: fit on bars up to this time only.")
def calibrate(
    path: Path,
    adapter: Path | None,
    tape: str,
    form: str | None,
    labels: int,
    window: int,
    placements: tuple[Any, ...],
    out: Path | None,
    seed: int,
    max_tapes: int,
    lines: Any,
    examples: int,
    weights: Any,
    kv_dtype: Any,
    questions: tuple[Path, ...],
    until: str,
) -> None:
    """Fit probabilities and choice sets of a model's answers on labelled tapes.

    Half of the labels are asked in fresh windows, half in sliding ones; each placement has a calibration of
    its own, as models answer less well by number. Generated tapes are drawn from training's ranges with
    seeds of their own, so that `foretick evaluate` shows what a shift costs. The file is for this model and
    its line schema only; the daemon refuses it for another. With --question it keeps what the file has of
    other questions. A question with a horizon, or with a file of labels, is fitted on the first half of a
    recorded --tape and scored on the second one, and the file says until when.
    """
    from flash.confidence import Calibration, write_calibration
    from tapes.generate import TRAINING
    from training.calibrate import fit  # a missing library comes before the model

    source = _source(tape, form, seed, TRAINING)
    asked = _asked_of(questions, source, window)
    model, _, revision = _read_model(path, None, lines, asked, adapter, examples, weights, kv_dtype)
    trained = adapter or path
    if out is None and ((weights, kv_dtype) != ("auto", "auto") or not trained.is_dir()):
        raise click.UsageError("--out is needed with --weights or --kv-dtype, and where --model is a file")
    target = out or trained / "calibration.json"
    kept = _read_calibration(trained, revision, model.lines, target) if questions else None
    if model.asked.in_time:
        from training.ahead_commands import calibrate_ahead

        found = calibrate_ahead(model, source, placements, window, labels, until)
    elif until:
        raise click.UsageError("--until is for questions with a horizon, or with a file of labels")
    else:
        found = _fit(fit, model, source, placements, window, labels, max_tapes)
    if not found:
        raise click.ClickException("no question has enough labels; ask for more --labels")
    others: list[Any] = (
        [each for each in kept.questions if each.name not in model.asked.names] if kept else []
    )
    described = {**source.described, "window": window, "labels": labels}
    calibration = Calibration(
        model=revision,
        lines=model.lines,
        data=kept.data if kept and others else described,
        questions=[*others, *found],
    )
    write_calibration(target, calibration)
    until = found[0].fitted_until
    known = f", of labels known at {until}: an answer before it has seen what came" if until else ""
    click.echo(f"{len(found)} calibrations written to {target}{known}")


def _fit(
    fit: Callable[..., list[Any]],
    model: Any,
    source: Any,
    placements: tuple[Any, ...],
    window: int,
    labels: int,
    max_tapes: int,
) -> list[Any]:
    """Calibrations from fresh windows and from sliding ones."""
    from rich.progress import Progress

    from training.sources import Setting, collect, joined

    texts = dict(zip(model.asked.names, model.asked.texts, strict=True))
    found = []
    with Progress() as progress:
        for placement in dict.fromkeys(placements):
            parts, settings = [], [Setting(placement, read, window) for read in (1, 2)]
            for setting in settings:
                advance = partial(_advance, progress, progress.add_task(setting.name))
                parts.append(collect(model, source, setting, -(-labels // 2), max_tapes, advance))
            found += fit(joined(parts), texts, settings[0].numbered)
    return found


def _console() -> Any:
    """As wide as the terminal, or as the tables."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 140
    return console


def _advance(progress: Any, task: Any, share: float) -> None:
    progress.update(task, completed=100 * share)


def _asked_of(files: tuple[Path, ...], source: Any, window: int) -> Any:
    """The questions of these files; None without any. Each choice must be right somewhere on the tapes."""
    from itertools import islice

    from tapes.expressions import ExpressionError
    from tapes.question_file import QuestionError, check_labels
    from training.batches import Vocabulary
    from training.taught_question import read_labelled

    if not files:
        return None
    try:
        rules = [read_labelled(file, window, source) for file in files]
        if any(rule.horizon or rule.partial for rule in rules):
            return _asked_in_time(rules, source)
        drawn = [each.levels for each in islice(source.batches(Vocabulary(), 2 * window, window), _TRIED)]
        for rule in rules:
            check_labels(rule, drawn)
    except (QuestionError, ExpressionError) as error:
        raise click.ClickException(str(error)) from None
    return _of_own(rules)


def _of_own(rules: list[Any]) -> Any:
    from training.sources import Asked

    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        raise click.ClickException(f"two questions have one name: {', '.join(names)}")
    return Asked(tuple(rules), exact=False)


def _asked_in_time(rules: list[Any], source: Any) -> Any:
    """About what comes next, or with labels of some bars; labels are tried on the tape as it is read."""
    from training.sources import Recorded

    if not all(rule.horizon or rule.partial for rule in rules):
        raise click.ClickException("questions with a horizon or a file of labels and others go in two runs")
    if not isinstance(source, Recorded):
        why = "of a generated tape means nothing: give a recorded file, --tape FILE --format FORMAT"
        raise click.ClickException(f"what comes next {why}")
    return _of_own(rules)


def _read_model(
    path: Path,
    dtype: str | None = None,
    lines: Any = None,
    asked: Any = None,
    adapter: Path | None = None,
    examples: int = 0,
    weights: Any = "auto",
    kv_dtype: Any = "auto",
) -> tuple[Any, str, str]:
    """A reader of tapes, its name and revision.

    With ``dtype``, ``weights``, ``kv_dtype`` or ``adapter``, as the daemon serves the model. ``lines``: what
    bars are written in, where it is asked prompt by prompt. ``asked``: None for the eighteen.
    """
    import torch

    from engine.model.architectures import ModelError
    from engine.model.lora import AdapterError
    from engine.model.revision import name_of, revision_of
    from training.export import is_packed, tape_model
    from training.served import Served
    from training.sources import Packed
    from training.train import load

    if path.suffix == ".gguf":
        path = _expanded(path, dtype or "auto")
    if path.suffix == ".pt" and adapter is not None:
        raise click.UsageError("--adapter is for a model directory, not for a checkpoint")
    if path.suffix == ".pt":
        torch.set_num_threads(1)
        return Packed(load(path)[0].eval()), path.name, "checkpoint"
    if not (path / "config.json").exists():
        raise click.ClickException(f"{path} is no model: it has no config.json")
    by_prompt = examples > 0 or (weights, kv_dtype) != ("auto", "auto")
    by_prompt = by_prompt or any(each is not None for each in (asked, dtype, lines, adapter))
    if by_prompt or not is_packed(path):
        try:
            served = Served.load(path, dtype or "auto", lines, asked, adapter, examples, weights, kv_dtype)
            return served, name_of(path, adapter), served.engine.model.revision
        except AdapterError as error:
            raise click.BadParameter(str(error), param_hint="--adapter") from None
        except ModelError as error:
            raise click.ClickException(str(error)) from None
    torch.set_num_threads(1)
    return Packed(tape_model(path, torch.bfloat16)), path.name, revision_of(path)


def _expanded(file: Path, dtype: str) -> Path:
    from engine.model.architectures import ModelError
    from engine.model.gguf import gguf_directory

    try:
        return gguf_directory(file, dtype)
    except ModelError as error:
        raise click.ClickException(str(error)) from None


def _read_calibration(path: Path, revision: str, lines: str, file: Path | None) -> Any:
    """The calibration to evaluate with; None where there is no file."""
    from flash.confidence import CalibrationError, read_calibration

    file = file or path / "calibration.json"
    if not file.exists():
        return None
    try:
        return read_calibration(file, revision, lines)
    except CalibrationError as error:
        raise click.ClickException(str(error)) from None


def _source(tape: str, form: str | None, seed: int, ranges: Any) -> Any:
    from training.sources import Generated, Recorded

    if tape == "generated":
        return Generated(seed, ranges)
    if not Path(tape).exists():
        raise click.UsageError(f"--tape {tape}: there is no such file; `generated` is the other choice")
    if form is None:
        raise click.UsageError("--tape FILE needs --format, such as btc_perp_bars")
    return Recorded(Path(tape), form)
