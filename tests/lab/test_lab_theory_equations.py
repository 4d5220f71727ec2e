"""The capacity equations of *Attention Once*, against the paper's numbers and brute force."""

from math import isclose

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from daemon.engine.capacity_metrics import sessions_estimate
from flash.capacity import k_max
from lab.theory.equations import (
    background_time,
    kv_bytes,
    mean_latency,
    sessions_max,
)

times = st.integers(0, 10_000)


@given(st.integers(1, 10_000), times, times, st.integers(1, 500))
def test_k_max_is_the_most_questions_that_fit(data: int, ingest: int, header: int, flash: int) -> None:
    most = k_max(data, ingest, header, flash)
    fitting = [k for k in range(data + 1) if background_time(ingest, header, k, flash) <= data]
    assert most == max(fitting, default=0)


def test_the_papers_k_max() -> None:
    """T_data = 1 s and T_f = 33 ms give about 25 questions, beside 0.15 s of ingestion and header."""
    assert k_max(1.0, 0.1, 0.05, 0.033) == 25
    assert k_max(0.3, 0.0, 0.0, 0.1) == 3
    assert k_max(1.0, 2.0, 0.0, 0.033) == 0


@pytest.mark.parametrize("wrong", [(0, 0, 0, 1), (1, 0, 0, 0), (1, -1, 0, 1), (1, 0, -1, 1)])
def test_times_that_make_no_sense_are_refused(wrong: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        k_max(*wrong)


def test_the_papers_kv() -> None:
    """Equation 22: Llama-3.1-8B with 32K tokens in fp16, without grouped heads, takes about 17 GB."""
    session = kv_bytes(32, 4096, 32768, 2)
    assert session == 17_179_869_184
    assert sessions_max(141e9, 16e9, session) == 7
    assert sessions_max(10e9, 16e9, session) == 0
    with pytest.raises(ValueError, match="0 bytes"):
        sessions_max(1, 0, 0)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**4))
def test_sessions_max_is_the_most_that_fit(available: int, model: int, session: int) -> None:
    most = sessions_max(available, model, session)
    assert most == 0 or model + most * session <= available
    assert model + (most + 1) * session > available


def test_the_papers_hit_mix() -> None:
    """60 to 80 % hits and 10 to 20 % exits bring 43 ms down to single digits (section 3.9.7)."""
    assert isclose(mean_latency(0.8, 0.2, 2, 2, 43), 2)
    assert isclose(mean_latency(0.6, 0.2, 2, 2, 43), 10.2)
    assert isclose(mean_latency(0, 0, 2, 2, 43), 43)
    for shares in ((-0.1, 0.0), (0.7, 0.4)):
        with pytest.raises(ValueError, match="hit shares"):
            mean_latency(*shares, 2, 2, 43)


@given(st.lists(st.sampled_from("fsc"), min_size=1, max_size=200), st.integers(1, 99), st.integers(1, 99))
def test_mean_latency_is_the_mean_over_asks(asks: list[str], quick: int, slow: int) -> None:
    assume(asks)
    took = {"f": quick, "s": 2 * quick, "c": slow}
    shares = [asks.count(kind) / len(asks) for kind in "fs"]
    expected = sum(took[kind] for kind in asks) / len(asks)
    assert isclose(mean_latency(shares[0], shares[1], quick, 2 * quick, slow), expected, abs_tol=1e-6)


def test_sessions_estimate() -> None:
    assert sessions_estimate(10, 0.25) == 40
    assert sessions_estimate(3, 0.1) == 30
    assert sessions_estimate(10, 0.0) == 0
