"""What `foretick simulate` runs: every policy at every rate, over the same requests."""

from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path

import msgspec

from lab.simulation.inputs import Input, read_trace, write_trace
from lab.simulation.report import NON_STREAMING, Summary, summarize
from lab.simulation.run import Setup, paper_limits, simulate
from lab.simulation.workload import WORKLOADS, Load, whole
from scheduler.costs import load
from scheduler.interfaces import Eviction
from scheduler.policies import Ordering


class Experiment(msgspec.Struct, frozen=True):
    """The parameters of `run`. Times in seconds, memory in tokens of KV.

    With `trace`, a file, the workload, its rates, its delay and the answers' length come from the file.
    """

    policies: tuple[str, ...]
    """Names as in the configuration, also `vllm-ns`, and `klpm:4` for k = 4."""
    workload: str
    qps: tuple[float, ...]
    requests: int
    delay: float
    seed: int
    max_tokens: int
    trace: str | None
    profile: str
    eviction: Eviction
    pool_tokens: int
    host_tokens: int
    batch_tokens: int
    batch_requests: int
    prefix_cache: bool
    grouping: bool


class ExperimentResult(msgspec.Struct, frozen=True):
    """The results, as written to JSON."""

    plan: Experiment
    runs: list[Summary]


def run(plan: Experiment) -> Iterator[Summary]:
    """Simulate every policy at every rate, in order of the rates.

    Raises ValueError for an unknown workload, policy or profile, for numbers that make no sense, and for an
    invalid line of a trace; OSError for a file that cannot be read.
    """
    costs = load(plan.profile)
    setups = {policy: _setup(plan, policy, costs.block_size) for policy in plan.policies}
    rates: tuple[float | None, ...] = plan.qps if plan.trace is None else (None,)
    for qps, policy in product(rates, plan.policies):
        with closing(inputs(plan, qps)) as pieces:
            result = simulate(whole(pieces) if policy == NON_STREAMING else pieces, setups[policy], costs)
        yield summarize(
            result,
            workload=plan.trace or plan.workload,
            qps=qps,
            policy=policy,
            eviction=plan.eviction,
            profile=plan.profile,
        )


def inputs(plan: Experiment, qps: float | None) -> Generator[Input]:
    """The inputs of the workload from its beginning; equal at each call."""
    if plan.trace is not None:
        with Path(plan.trace).open("rb") as lines:
            yield from read_trace(lines)
        return
    if plan.workload not in WORKLOADS:
        raise ValueError(f"there is no workload {plan.workload!r}; choose one of {', '.join(WORKLOADS)}")
    assert qps is not None  # only a trace has no rate
    yield from WORKLOADS[plan.workload](Load(qps, plan.requests, plan.delay, plan.seed, plan.max_tokens))


def save_trace(plan: Experiment, path: Path) -> None:
    """Write the workload at its first rate as a trace."""
    with path.open("wb") as file:
        file.writelines(write_trace(inputs(plan, plan.qps[0])))


def ordering(name: str) -> Ordering:
    """The policy of a name as in `Experiment`. Raises ValueError for an unknown one."""
    if name == NON_STREAMING:
        return Ordering("vllm")
    policy, colon, k = name.partition(":")
    if not colon:
        return Ordering(policy)
    if policy != "klpm" or not k.isdecimal():
        raise ValueError(f"{name!r} is no policy; only klpm takes a number, as in klpm:4")
    return Ordering(policy, int(k))


def _setup(plan: Experiment, policy: str, block_size: int) -> Setup:
    return Setup(
        pool_tokens=plan.pool_tokens,
        host_tokens=plan.host_tokens,
        block_size=block_size,
        ordering=ordering(policy),
        limits=paper_limits(
            max_batch_tokens=plan.batch_tokens,
            max_batch_requests=plan.batch_requests,
            chunk_min=plan.batch_tokens,
            chunk_max=plan.batch_tokens,
            eviction=plan.eviction,
            grouping=plan.grouping,
        ),
        prefix_cache=plan.prefix_cache,
        seed=plan.seed,
    )
