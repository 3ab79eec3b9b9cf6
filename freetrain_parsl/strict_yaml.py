"""Reading small YAML files strictly and within bounds: site files, campaigns, lists of trainers, scaling curves.

Scalars follow YAML 1.2 (``no`` is a text, ``1e-3`` a number). Tags are refused. Depth, size and the expansion of
aliases are bounded. Every refusal names file and line.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import yaml

from freetrain_parsl.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["LARGEST", "NULL", "compose", "construct", "read_text", "resolve_tag", "shown"]

LARGEST = 1_000_000
"""Maximum number of characters of a file."""

NULL = "tag:yaml.org,2002:null"

_DEEPEST = 20
_MOST_VALUES = 100_000
_MOST_DIGITS = 308  # as in the largest float


class _Loader(yaml.SafeLoader):
    """Composes nodes; PyYAML's own resolvers follow YAML 1.1, where ``no`` is false and ``1:30`` is 90."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own attribute

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[int, int] = {}  # id of a complete node -> scalars in it with all aliases expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node within the bounds."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's
        if getattr(event, "tag", None) is not None:
            raise _refusal(f"the tag {event.tag!r} is not supported; remove it (quotes make a text)", event)
        if isinstance(event, yaml.AliasEvent) and id(self.anchors.get(event.anchor)) not in self._sizes:
            raise _refusal(f"the anchor {event.anchor!r} is not there, or contains itself", event)
        if self._depth > _DEEPEST:
            raise _refusal(f"it is nested more than {_DEEPEST} levels deep", event)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None:
            parts = [item for pair in node.value for item in pair] if isinstance(node, yaml.MappingNode) else node.value
            size = 1 if isinstance(node, yaml.ScalarNode) else sum(self._sizes[id(item)] for item in parts)
            if size > _MOST_VALUES:
                raise _refusal(f"its aliases expand to more than {_MOST_VALUES:,} values", event)
            self._sizes[id(node)] = size
        return node


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), [*_first, *([""] if _kind == "null" else [])]
    )


def read_text(file: Path, what: str, *, opener: Callable[[str, int], int] | None = None) -> str:
    """Read a file that the user named.

    Parameters
    ----------
    file, what
        The file, and a term for it in messages.
    opener
        Opens it, as for `open`; its errors other than OSError and ValueError are passed on.

    Raises
    ------
    InvalidInput
        It cannot be read, is not text, or is larger than `LARGEST`; the message names file and `what`.
    """
    try:
        with open(file, encoding="utf-8-sig", opener=opener) as opened:
            text = opened.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte, or bytes that are not text
        why = "it is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else error
        why = getattr(error, "strerror", None) or why
        raise InvalidInput(f"{shown(file)}: cannot read the {what}: {why}") from None
    if len(text) > LARGEST:
        raise InvalidInput(f"{shown(file)}: cannot read the {what}: it has more than {LARGEST:,} characters")
    return text


def compose(text: str, file: str) -> yaml.Node | None:
    """Parse a document to its node tree; ``None`` if it is empty. `file` is its name in messages.

    Raises
    ------
    InvalidInput
        It is not YAML, has tags, or exceeds a bound.
    """
    try:
        loader: Any = _Loader(text)
        node: yaml.Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise InvalidInput(f"{file}{line}: not YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        number = text.count("\n", 0, error.position) + 1
        raise InvalidInput(f"{file}:{number}: not YAML: the character #x{error.character:02x} is not allowed") from None
    except (ValueError, OverflowError):  # PyYAML's own: an escape beyond Unicode, a version of thousands of digits
        raise InvalidInput(f"{file}:{loader.line + 1}: not YAML: an escape or a number is out of range") from None
    return node


def resolve_tag(text: str) -> str:
    """Return the tag of a scalar that is written without quotes."""
    return str(_Loader("").resolve(yaml.ScalarNode, text, (True, False)))  # type: ignore[no-untyped-call]  # PyYAML's


def construct(tag: str, text: str) -> Any:
    """Return the value of a scalar: ``None``, a truth value, a number or the text.

    Raises
    ------
    InvalidInput
        It is a number that is out of range.
    """
    kind = tag.rpartition(":")[2]
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int" and len(text) <= _MOST_DIGITS:
        return int(text)
    if kind not in ("int", "float"):
        return text
    number = float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))
    if math.isinf(number) and "inf" not in text.lower():
        raise InvalidInput(f"{text[:80]} is too large for a number; quotes make a text of it")
    return number


def shown(file: Path) -> str:
    """Return a path for a message: without control characters, and not too long."""
    text = str(file)
    return text if text.isprintable() and len(text) <= 300 else repr(f"{text[:80]}…")


def _refusal(problem: str, event: Any) -> yaml.composer.ComposerError:
    return yaml.composer.ComposerError(None, None, problem, event.start_mark)
