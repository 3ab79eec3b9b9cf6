"""Tensors that members sum have a type of their own: torch's default type may differ between processes meanwhile."""

from __future__ import annotations

import ast
from pathlib import Path

import freetrain_parsl

PACKAGE = Path(freetrain_parsl.__file__).parent
ROOMS = ("training/group", "training/replicas", "extensions/sharding")


def calls_without_type(source: str) -> list[str]:
    """Return the calls in a module that make tensors of torch's default type."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = ("torch.zeros", "torch.ones", "torch.full")
    return [
        ast.unparse(call)
        for call in calls
        if ast.unparse(call.func) in made and "dtype" not in {keyword.arg for keyword in call.keywords}
    ]


def test_a_call_without_a_type_is_found() -> None:
    assert calls_without_type("a = torch.zeros(1)\nb = torch.zeros(1, dtype=torch.int64)") == ["torch.zeros(1)"]


def test_members_exchange_no_tensor_of_the_default_type() -> None:
    modules = [module for room in ROOMS for module in (PACKAGE / room).glob("*.py")]
    assert modules
    assert {str(m): found for m in modules if (found := calls_without_type(m.read_text(encoding="utf-8")))} == {}
