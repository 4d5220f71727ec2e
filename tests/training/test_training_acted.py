"""What acting within an error comes to: on answers made up, on a few tapes, and, long, on all of them."""

import os
import random
from pathlib import Path

import pytest

from flash.acting import ActDecision, Acting, bin_of
from flash.confidence import QuestionCalibration
from tests.training.test_training_ahead import bars_file
from training.acted import FIVE, TAPES_OF, Asked, act, answers, loaded, recorded, shifted, tape
from training.sources import Recorded

FITTED = QuestionCalibration(
    name="q", text="Q?", choices=["UP", "DOWN"], temperature=1.0, mean_gap=1.0, labels=20_000,
    scores=[n / 1000 for n in range(1, 450)] + [0.6, 0.8],
)  # fmt: skip
REGIME = "usual/00-06"


def made_up(n: int, seed: int = 0) -> list[Asked]:
    rng = random.Random(seed)
    risks = [min(0.5, 10 ** rng.uniform(-4, -0.3)) for _ in range(n)]
    return [Asked(bar, REGIME, risk, rng.random() < risk) for bar, risk in enumerate(risks)]


def test_an_answer_knows_the_labels_of_those_before_its_delay() -> None:
    """Against a loop over moments."""
    asked, delay = made_up(800), 3
    found, ours = act(asked, Acting(0.05, FITTED), delay), Acting(0.05, FITTED)
    told: list[ActDecision] = []
    for each in asked:
        if each.bar >= delay:
            past = asked[each.bar - delay]
            ours.label(told[each.bar - delay], wrong=past.wrong)
        told.append(ours.decide(each.risk, each.regime))
    acted = [each.wrong for each, decided in zip(asked, told, strict=True) if decided.act]
    assert (found.acted, found.error) == (len(acted) / 800, sum(acted) / len(acted))
    assert found.by_regime == {REGIME: sum(acted) / len(acted)}
    assert sum(found.reasons.values()) == 800 - len(acted)
    never = act(asked, Acting(0.05, FITTED), -1)
    first = Acting(0.05, FITTED)
    assert never.acted == sum(first.decide(each.risk, REGIME).act for each in asked) / 800
    assert bin_of(0.5) == 3


def test_each_bar_behind_the_first_window_is_asked_once(tmp_path: Path) -> None:
    found = recorded(Recorded(bars_file(tmp_path / "bars.csv", 400), "btc_perp_bars"))
    assert [each.first for each in found] == [64, 128, 192, 256, 320]
    assert all(len(each.regimes) == 64 for each in found)
    assert found[1].regimes[151 - 128].endswith("/gap"), "the night"
    assert all(each.drawn.levels.close.shape == (1, 128) for each in found)


def test_the_tape_models_answers_come_in_time_order() -> None:
    reader, calibration = loaded()
    stretches = shifted(1)
    found = answers(reader, calibration, stretches)
    assert set(found) <= set(FIVE)
    for each in found.values():
        assert [one.bar for one in each] == sorted({one.bar for one in each})
        assert sum(one.wrong for one in each) < 0.3 * len(each)
    assert [each.first for each in stretches] == [64 * n for n in range(6)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["shifts", *TAPES_OF])
def test_the_error_is_kept_on_every_tape(name: str) -> None:
    """At most 2 % of those acted on, in each regime and rolling thousand; how many are is in accuracy.md."""
    folder = os.environ.get("FORETICK_DATA")
    if name != "shifts" and not folder:
        pytest.skip("set FORETICK_DATA to the directory with the real data files")
    reader, calibration = loaded()
    stretches = tape(name, Path(folder) if folder else None, 60)
    for question, asked in answers(reader, calibration, stretches).items():
        fitted = next(each for each in calibration.questions if each.name == question)
        found = act(asked, Acting(0.02, fitted))
        assert found.error <= 0.02, question
        assert found.worst <= 0.02, question
        assert max(found.by_regime.values(), default=0.0) <= 0.02, question
