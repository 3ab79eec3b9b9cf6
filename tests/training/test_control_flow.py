"""Equal programs have equal steps, whatever their layout; every change of what a program does changes them."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
import types
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.training.checkpoints.code.control_flow import steps_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def steps(source: str) -> list[str]:
    return steps_of(compile(source, "script", "exec").co_consts[0], describe)


def describe(constant: object) -> str:
    return str(steps_of(constant, describe)) if isinstance(constant, types.CodeType) else repr(constant)


SAME = {
    "test over several lines": (
        "def f(a, b):\n return [x for x in a if x and b]",
        "def f(a, b):\n return [\n  x\n  for x in a\n  if x\n  and b\n ]",
    ),
    "arguments on their own lines": (
        "def f(a, b):\n return g(a, b, c=a)",
        "def f(a, b):\n return g(\n  a,\n  b,\n  c=a,\n )",
    ),
    "returns on their own lines": (
        "def f(a):\n if a: return 1\n return None",
        "def f(a):\n if a:\n  return 1\n\n return None",
    ),
    "condition of a loop": (
        "def f(a):\n while a or g():\n  a = a - 1\n  if a: continue\n  h(a)",
        "def f(a):\n while (\n  a\n  or g()\n ):\n  a = a - 1\n  if a:\n   continue\n  h(a)",
    ),
    "handlers": (
        "def f(a):\n try: return g(a)\n except ValueError: pass\n finally: h(a)",
        "def f(a):\n try:\n  return g(\n   a\n  )\n except ValueError:\n  pass\n finally:\n  h(a)",
    ),
}
DIFFERENT = {
    "operator": ("def f(a, b): return a + b", "def f(a, b): return a - b"),
    "order": ("def f(a, b): return a - b", "def f(a, b): return b - a"),
    "condition": ("def f(a, b): return a and b", "def f(a, b): return a or b"),
    "branches": ("def f(a):\n  if a: return 1\n  return 2", "def f(a):\n  if a: return 2\n  return 1"),
    "test for None": ("def f(a):\n  if a is None: g()", "def f(a):\n  if a is not None: g()"),
    "test for truth": ("def f(a):\n  if a: g()", "def f(a):\n  if a is not None: g()"),
    "end of a loop": (
        "def f(a):\n  for x in a:\n    if x: break\n    g(x)",
        "def f(a):\n  for x in a:\n    if x: continue\n    g(x)",
    ),
    "number of repeats": ("def f(a): g(a); g(a)", "def f(a): g(a); g(a); g(a)"),
    "what is covered": (
        "def f(a):\n  try: g(a)\n  except ValueError: h(a)\n  g(a)",
        "def f(a):\n  try: g(a); g(a)\n  except ValueError: h(a)",
    ),
    "raised error": ("def f(a):\n  raise ValueError", "def f(a):\n  raise ValueError from None"),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_the_layout_does_not_count(pair: tuple[str, str]) -> None:
    one, other = pair
    assert steps(one) == steps(other)


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_what_a_program_does_counts(pair: tuple[str, str]) -> None:
    one, other = pair
    assert steps(one) != steps(other)


def test_every_changed_operator_comparison_condition_and_branch_counts() -> None:
    """Mutants of a large function of the standard library."""
    function = ast.parse(textwrap.dedent(inspect.getsource(inspect.getsourcefile))).body[0]
    before = steps(ast.unparse(function))
    mutants = list(_mutants(function))
    assert len(mutants) > 15
    assert [mutant for mutant in mutants if steps(mutant) == before] == []


def _mutants(tree: ast.AST) -> Iterator[str]:
    nodes = list(ast.walk(tree))
    for number in range(len(nodes)):
        changed = copy.deepcopy(tree)
        node = list(ast.walk(changed))[number]
        if isinstance(node, ast.BoolOp):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        elif isinstance(node, ast.Compare):
            node.ops[0] = {ast.In: ast.NotIn, ast.IsNot: ast.Is, ast.Is: ast.IsNot, ast.Eq: ast.NotEq}.get(
                type(node.ops[0]), ast.Lt
            )()
        elif isinstance(node, ast.If):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Call) and node.args:
            node.args.append(node.args[0])
        elif isinstance(node, ast.Attribute):
            node.attr += "x"
        else:
            continue
        yield ast.unparse(ast.fix_missing_locations(changed))
