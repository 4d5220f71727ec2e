"""How the tests themselves are written."""

import ast
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.sampling import split

TESTS = Path(__file__).parent
MAX_WORDS = 4
"""Of the text that an expected error is matched with."""
MODULES = {path.relative_to(TESTS).as_posix(): ast.parse(path.read_text()) for path in TESTS.rglob("*.py")}


def imported(tree: ast.Module) -> set[str]:
    """The modules that a module imports, as they are written."""
    names = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    return names | {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_what_tests_share_with_e2e_is_in_the_kit() -> None:
    others = {name: imported(tree) for name, tree in MODULES.items() if not name.startswith("e2e/")}
    assert {name for name, found in others.items() if any(f.startswith("tests.e2e") for f in found)} == set()


def test_an_expected_error_is_named_by_a_key_and_not_by_its_sentence() -> None:
    calls = [
        (name, node.lineno, each.value.value)
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises"
        for each in node.keywords
        if each.arg == "match" and isinstance(each.value, ast.Constant)
    ]
    assert [call for call in calls if len(call[2].split()) > MAX_WORDS] == []


@dataclass(frozen=True)
class Case:
    """An item, as far as `split` looks. ``module``: the mark is on its module; ``name``: of a rotated one."""

    test: str
    case: str = ""
    module: bool = False
    most: int = 2
    name: str = ""

    @property
    def nodeid(self) -> str:
        return f"m.py::{self.test}" + (f"[{self.case}]" if self.case else "")

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(id=self.case) if self.case else None

    def iter_markers_with_node(self, name: str) -> list[tuple[Any, pytest.Mark]]:
        node = SimpleNamespace(nodeid="m.py") if self.module else self
        of = (self.most, self.name) if self.name else (self.most,)
        mark = getattr(pytest.mark, "rotated" if self.name else "sampled")(*of).mark
        return [(node, mark)] if self.most and mark.name == name else []


def test_a_seed_draws_the_same_cases_and_all_of_them_have_their_turn() -> None:
    items: Any = [Case("a", str(n)) for n in range(9)] + [Case("b"), Case("c", "x", most=0)]
    drawn = set()
    for seed in range(40):
        kept, left = split(items, str(seed))
        assert split(items, str(seed)) == (kept, left)
        assert [each for each in items if each in kept or each in left] == items
        assert sum(each.test == "a" for each in kept) == 2
        assert kept[2:] == items[-2:]
        drawn |= set(kept)
    assert drawn == set(items)


def test_tests_of_a_marked_module_have_the_same_cases() -> None:
    items: Any = [Case(test, str(n), module=True) for test in "ab" for n in range(9)]
    kept, _ = split(items, "7")
    assert [each.case for each in kept if each.test == "a"] == [
        each.case for each in kept if each.test == "b"
    ]
    assert len(kept) == 4


def test_of_rotated_tests_whole_ones_have_their_turn() -> None:
    """Wherever they are; a module is one of them."""
    alone: Any = [Case(test, case, name="x") for test, case in (("a", "1"), ("a", "2"), ("b", ""), ("c", ""))]
    module: Any = [Case(test, module=True, name="x") for test in "de"]
    drawn = set()
    for seed in range(40):
        kept, left = split([*alone, *module], str(seed))
        names = {"module" if each.module else each.test for each in kept}
        assert len(names) == 2
        assert names.isdisjoint("module" if each.module else each.test for each in left)
        drawn |= names
    assert drawn == {"a", "b", "c", "module"}
