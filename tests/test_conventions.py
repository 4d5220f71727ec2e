"""How the tests themselves are written."""

import ast
from pathlib import Path

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
