"""`import freetrain_parsl`: its public names and its import cost."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import freetrain_parsl

PACKAGE = Path(freetrain_parsl.__file__).parent
HEAVY = ("torch", "highspy", "sklearn", "matplotlib", "numpy")


def _statement_names() -> set[str]:
    """Return the names imported by the package's ``if TYPE_CHECKING`` block, for type checkers."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.name
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_public_names_are_sorted_and_unique():
    """`__all__` is sorted, without duplicates."""
    assert freetrain_parsl.__all__ == sorted(set(freetrain_parsl.__all__))


def test_public_names_are_complete():
    """`__all__`, the lazy table, the type checkers' imports and `dir()` agree."""
    public = set(freetrain_parsl.__all__) - {"__version__"}
    assert public == set(freetrain_parsl._HOMES) == _statement_names()
    assert dir(freetrain_parsl) == freetrain_parsl.__all__


@pytest.mark.parametrize("name", sorted(freetrain_parsl._HOMES))
def test_public_name_is_documented_and_lives_where_the_table_says(name):
    """Each name can be imported, has a docstring, and comes from the module in the table."""
    value = getattr(freetrain_parsl, name)
    assert inspect.getdoc(value)
    assert value.__module__ == freetrain_parsl._HOMES[name]


def test_unknown_name_is_an_attribute_error():
    """A misspelt name raises Python's usual error, so that `hasattr` and `from … import` work."""
    with pytest.raises(AttributeError, match="no attribute 'train_app'"):
        _ = freetrain_parsl.train_app


def _modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in result.stdout.split()}


def test_import_loads_nothing_heavy():
    """`import freetrain_parsl` loads neither torch nor HiGHS, nor even Parsl."""
    assert not _modules_after("import freetrain_parsl") & {*HEAVY, "parsl"}


def test_decorator_loads_neither_torch_nor_the_solver():
    """A script that only decorates and submits does not import torch or HiGHS."""
    assert not _modules_after("from freetrain_parsl import training_app") & {"torch", "highspy"}


def test_package_is_typed():
    """The marker for type checkers exists."""
    assert (PACKAGE / "py.typed").is_file()
