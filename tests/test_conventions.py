"""How the tests themselves are written."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
MODULES = {path.relative_to(TESTS).as_posix(): ast.parse(path.read_text()) for path in TESTS.rglob("*.py")}


def imported(tree: ast.Module) -> set[str]:
    """The modules that a module imports, as they are written."""
    names = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    return names | {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_what_tests_share_with_e2e_is_in_the_kit() -> None:
    others = {name: imported(tree) for name, tree in MODULES.items() if not name.startswith("e2e/")}
    assert {name for name, found in others.items() if any(f.startswith("tests.e2e") for f in found)} == set()
