"""`foretick bench data --part past` in its smallest size."""

import pytest

from bench.data.past import measure
from bench.run import SuiteRun


def test_a_version_is_measured_beside_its_passes() -> None:
    found = {
        figure.name: figure for figure in measure(SuiteRun(threads=1, quick=True, say=lambda text: None))
    }
    a_version = found["a version"]
    assert (a_version.against, a_version.unit) == ("its two passes", "ms")
    assert a_version.ratio is not None
    assert a_version.setting["bars in the window"] == 64
    assert found["times real time"].ours == pytest.approx(60 * found["versions a second"].ours)
