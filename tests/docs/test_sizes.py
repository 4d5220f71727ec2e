"""Functions of the product fit a screen, and classes a reader's memory."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["run"]["source"]
MAX_LINES = 60
MAX_ATTRIBUTES = 20
LONG = {
    "engine/attention/triton_kernels.py:attend": "a Triton kernel, which shares its state with what it calls",
}
"""Functions that are longer, and why."""


def defined() -> Iterator[tuple[str, ast.AST]]:
    """Every function and class of the product, by module and name."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield f"{path.relative_to(ROOT)}:{node.name}", node


def attributes(cls: ast.ClassDef) -> set[str]:
    """The attributes that its methods set on ``self``."""
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def test_only_named_kernels_are_longer_than_a_screen() -> None:
    lines = {
        name: (node.end_lineno or 0) - node.lineno + 1
        for name, node in defined()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: n for name, n in lines.items() if n > MAX_LINES and name not in LONG} == {}
    assert all(lines.get(name, 0) > MAX_LINES for name in LONG), "an exception is not needed any more"


def test_no_class_has_more_attributes_than_can_be_kept_in_mind() -> None:
    wide = {name: len(attributes(node)) for name, node in defined() if isinstance(node, ast.ClassDef)}
    assert {name: n for name, n in wide.items() if n > MAX_ATTRIBUTES} == {}
