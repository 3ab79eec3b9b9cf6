"""The messages on the troubleshooting page are those of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "howto" / "troubleshooting.md"
MESSAGES = re.findall(r"^```text\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)

_FIXED = 15  # a message has more characters than this that are not values


@cache
def texts_of_the_code() -> frozenset[str]:
    """Return the strings in the package that may contain a message, with ``…`` for each value in an f-string."""
    return frozenset(
        text
        for module in (ROOT / "freetrain_parsl").rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if len(text := _text(node)) > _FIXED
    )


def _text(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
        case _:
            return ""


def is_printed(message: str) -> bool:
    """Return whether a text of the code contains the message; each ``…`` stands for anything."""
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
    return any(pattern.search(text) for text in texts_of_the_code())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_each_message_is_in_the_code(message):
    assert len(message.replace("…", "").strip()) > _FIXED, "too little of it is fixed"
    assert is_printed(message)


def test_a_message_that_is_not_in_the_code_is_found():
    assert len(MESSAGES) > 15
    assert not is_printed("the … that nobody prints")
