"""Grouped prefill against its definition, also when prompts change."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.grouping import HEAD, Grouping
from scheduler.interfaces import Limits, PriorityClass
from scheduler.request import Request
from tests.kit.scheduler.fakes import FakeMemory, FakePrompt, request_of
from tests.kit.scheduler.harness import Harness

POOL = PriorityClass.POOL
SOURCE = list(range(10, 50))


def in_kv(prompt: Sequence[int], computed: int, salt: str = "", *, complete: bool = True) -> Request:
    """A request with the first `computed` tokens of its prompt in KV."""
    reader = FakePrompt(FakeMemory(64, 4))
    spec = {"open_prompt": lambda: reader, "salt": salt, "complete": complete}
    request = request_of(reader.memory, list(prompt), 2, POOL, **spec)
    reader.update(request.prompt)
    assert reader.acquire(computed)
    reader.write(request.prompt[:computed])
    request.reader = reader
    return request


def may_read(request: Request, source: Request, n: int) -> bool:
    """The definition: the source's chunk holds the request's next tokens, but for its last one."""
    end = min(source.computed + n, len(request.prompt) - 1)
    return (
        request.spec.salt == source.spec.salt
        and request.computed == source.computed < end
        and request.prompt[:end] == source.prompt[:end]
    )


PROMPTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(0, 2), st.sampled_from("ab")),
    min_size=2,
    max_size=12,
)


@given(PROMPTS, st.integers(1, 20))
def test_groups_are_those_of_the_definition(prompts: list[tuple[int, int, int, str]], n: int) -> None:
    """No request reads tokens other than its own prompt's; those read whose next eight are the source's."""
    groups, sources = Grouping(), list[tuple[Request, int]]()
    for common, computed, other, salt in prompts:
        prompt = [*SOURCE[:common], 100, 100, 100 + other]
        request = in_kv(prompt, min(computed, len(prompt) - 1), salt)
        found = groups.source_of(request)
        expected = [
            source
            for source, chunk in sources
            if may_read(request, source, chunk) and heads(request) == heads(source) and request.remaining > 1
        ]
        assert found is (expected[0] if expected else None)
        if found is None:
            chunk = min(n, request.remaining)
            groups.add_source(request, chunk)
            if request.remaining > 1:
                sources.append((request, chunk))


def heads(request: Request) -> Sequence[int]:
    return request.prompt[request.computed : request.computed + HEAD]


def test_another_prompt_at_the_same_place_is_looked_up_again() -> None:
    """An update that keeps the KV changes the next tokens, and with them the group."""
    old, new = in_kv(SOURCE[:20], 4), in_kv([*SOURCE[:4], *range(70, 90)], 4)
    changing = in_kv(SOURCE[:22], 4, complete=False)
    groups = Grouping()
    groups.add_source(old, 10)
    groups.add_source(new, 10)
    assert groups.source_of(changing) is old
    changing.replace([*SOURCE[:4], *range(70, 95)], now=1)
    assert changing.computed == 4
    assert groups.source_of(changing) is new


def test_requests_that_generate_or_have_one_token_left_read_from_no_source() -> None:
    groups = Grouping()
    groups.add_source(in_kv(SOURCE[:20], 5), 10)
    generating, nearly = in_kv(SOURCE[:20], 5), in_kv(SOURCE[:6], 5)
    generating.output.append(3)
    assert groups.source_of(generating) is None
    assert groups.source_of(nearly) is None
    assert groups.source_of(in_kv(SOURCE[:20], 5)) is not None


BEGINNINGS = st.lists(
    st.tuples(st.integers(0, 24), st.lists(st.integers(0, 9), min_size=1, max_size=9), st.booleans()),
    min_size=2,
    max_size=7,
)


@settings(max_examples=50)
@given(BEGINNINGS, st.integers(12, 40))
def test_grouped_or_not_the_answers_are_the_same_and_no_token_is_computed_in_vain(
    prompts: list[tuple[int, list[int], bool]], blocks: int
) -> None:
    """In pools down to two prompts; the fakes check the tokens that are read, and answer by hash."""
    computed = {}
    for grouping in (True, False):
        limits = Limits(
            max_batch_tokens=24,
            max_batch_requests=6,
            chunk_min=3,
            chunk_max=8,
            cell_budget_fraction=1.0,
            grouping=grouping,
        )
        h = Harness(blocks, limits)
        asked = [h.prompt([*SOURCE[:common], *own], salt="ab"[salt]) for common, own, salt in prompts]
        h.run()
        for request in asked:
            h.check(request)
            assert grouping or not request.cached_tokens
        assert h.memory.free_blocks == h.memory.total_blocks
        if not any(request.preempted_by for request in asked):
            computed[grouping] = sum(len(c.tokens) for batch in h.executor.batches for c in batch)
    if len(computed) == 2:
        assert computed[True] <= computed[False]


def test_what_was_found_equal_is_forgotten_with_the_prompt_that_it_was_found_in() -> None:
    """Comparison resumes after the known common prefix, until one of the prompts changes."""
    source, request = in_kv(SOURCE[:20], 4, complete=False), in_kv(SOURCE[:30], 4)
    groups = Grouping()
    groups.add_source(source, 12)
    assert groups.source_of(request) is source
    source.replace([*SOURCE[:13], 99, *SOURCE[14:20]], now=1)  # behind the next eight
    assert source.computed == 4
    changed = Grouping()
    changed.add_source(source, 12)
    assert changed.source_of(request) is None
