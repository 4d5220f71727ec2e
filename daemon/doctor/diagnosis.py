"""A verdict on one part of a deployment, and the next step."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True)
class Diagnosis:
    """What was ``seen`` of what ``check`` names, and one next ``step``, empty where nothing is to be done.

    ``guide``: the page and section of `docs/` that says more, empty without one.
    """

    check: str
    verdict: Verdict
    seen: str
    step: str = ""
    guide: str = ""


def fine(check: str, seen: str) -> Diagnosis:
    """Nothing is to be done."""
    return Diagnosis(check, "ok", seen)


def skipped(check: str, why: str, step: str = "") -> Diagnosis:
    """It was not looked at, or says nothing."""
    return Diagnosis(check, "skipped", why, step)


def of_outcome(check: str, good: bool, seen: str, step: str, guide: str = "") -> Diagnosis:
    """A warning with its step, unless it is ``good``."""
    return fine(check, seen) if good else Diagnosis(check, "warning", seen, step, guide)
