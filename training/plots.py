"""Images of an evaluation: reliability, risk by coverage, and accuracy by distance to the boundary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from flash.confidence import Calibration
from flash.temperature import calibrated_probabilities, softmax
from tapes.rules import Floats
from training.evaluate import by_distance, distance_of, given_confidence
from training.scores import Bin, reliability, risk_coverage
from training.sources import Answers

AXES = {
    "reliability": ("confidence", "share right"),
    "risk-coverage": ("coverage", "share wrong"),
    "distance": ("distance to the boundary, at least", "share right"),
}
"""The images of an evaluation, and what their axes show."""


def plot(
    path: Path, answers: Sequence[Answers], calibration: Calibration | None, numbered: bool = False
) -> None:
    """An image for each of AXES, named after ``path``; a panel a question."""
    shown = [each.defined for each in answers if each.choices and len(each.defined.label)]
    columns = 5
    rows = -(-len(shown) // columns)
    for kind, (x, y) in AXES.items():
        figure = Figure(figsize=(3 * columns, 2.8 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel in panels[len(shown) :]:
            panel.axis("off")
        for panel, each in zip(panels, shown, strict=False):
            panel.set_title(each.name, fontsize=9)
            panel.tick_params(labelsize=7)
            _draw(panel, kind, each, calibration, numbered)
        if kind != "distance":
            panels[0].legend(fontsize=7)
        figure.supxlabel(x)
        figure.supylabel(y)
        figure.savefig(path.with_name(f"{path.stem}-{kind}.png"), dpi=110)


def _draw(panel: Any, kind: str, answers: Answers, calibration: Calibration | None, numbered: bool) -> None:
    if kind == "distance":
        bands = by_distance(distance_of(answers), answers.right)
        panel.bar([str(band.begin) for band in bands], [band.accuracy for band in bands])
        panel.axhline(1 / len(answers.choices), color="0.8", linewidth=1)
        return
    for label, confidence in _confidences(answers, calibration, numbered).items():
        if kind == "reliability":
            _reliability(panel, label, reliability(confidence, answers.right))
        else:
            curve = risk_coverage(confidence, answers.right)
            panel.plot(curve.coverage, curve.risk, label=label)


def _reliability(panel: Any, label: str, bins: list[Bin]) -> None:
    panel.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    panel.plot([part.confidence for part in bins], [part.right for part in bins], marker=".", label=label)
    panel.set_xlim(min(part.confidence for part in bins) - 0.03, 1.01)


def _confidences(answers: Answers, calibration: Calibration | None, numbered: bool) -> dict[str, Floats]:
    logits = answers.logits[:, :-1]
    found = {"raw": given_confidence(logits, softmax(logits))}
    fitted = calibration.find(answers.name, answers.choices, numbered) if calibration else None
    if fitted is not None:
        found["calibrated"] = given_confidence(logits, calibrated_probabilities(fitted, logits))
    return found
