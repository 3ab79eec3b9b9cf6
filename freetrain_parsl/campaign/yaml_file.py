"""Reading YAML strictly: every refusal names file, line and key; nothing is guessed, nothing is ignored.

Scalars are kept as they are written until a getter says what they should be, so that ``00:10:00`` is not 600 and
``no`` not false. Free values (arguments of a training) follow YAML 1.2: ``1e-3`` is a number.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from freetrain_parsl.campaign.quantities import parse_duration, parse_memory
from freetrain_parsl.errors import InvalidInput, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import timedelta
    from pathlib import Path

    from typing_extensions import Self

__all__ = ["Section", "Variables", "read_text"]

T = TypeVar("T")

_VARIABLE = re.compile(r"(?P<escaped>\$\$\{)|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
_DEEPEST = 20
_NULL = "tag:yaml.org,2002:null"


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1, where ``no`` is false, ``1:30`` is 90 and ``1e-3`` is a text; this one follows 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own attribute


for _tag, _pattern, _first in (
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
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), [*_first, *([""] if _tag == "null" else [])]
    )
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda _, node: _number(node.value))


def _number(text: str) -> float:
    return float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))


class Variables:
    """What ``${NAME}`` stands for in a file: what ``--set`` gave, else the environment, else ``${NAME:-default}``.

    Parameters
    ----------
    given
        From the command line; case does not matter.
    environment
        Asked next; default: of this process.

    Attributes
    ----------
    used : dict of str to str
        What was looked up and what it was, so that a later driver finds the same.
    """

    def __init__(self, given: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._given = {name.upper(): value for name, value in (given or {}).items()}
        self._environment = os.environ if environment is None else environment
        self._asked: set[str] = set()
        self.used: dict[str, str] = {}

    @classmethod
    def parse(cls, settings: Iterable[str]) -> Self:
        """Read the words of the command line, each ``name=value``.

        Raises
        ------
        InvalidInput
            One has no ``=``.
        """
        given = {}
        for setting in settings:
            name, equals, value = setting.partition("=")
            if not (equals and name):
                raise InvalidInput(f"--set {setting}: write --set name=value")
            given[name] = value
        return cls(given)

    def value(self, name: str, default: str | None) -> str | None:
        """Look a variable up; ``None`` if it has no value."""
        self._asked.add(name.upper())
        value = self._given.get(name.upper(), self._environment.get(name) or default)
        if value is not None:
            self.used[name] = value
        return value

    def refuse_unused(self) -> None:
        """Refuse a ``--set`` that no file asked for.

        Raises
        ------
        InvalidInput
            It names the variables that there are.
        """
        for name in self._given:
            if name not in self._asked:
                known = ", ".join(sorted(self._asked)) or "none"
                raise InvalidInput(
                    f"--set {name.lower()}=…: the files have no ${{{name}}}; theirs are: {known}"
                    f"{did_you_mean(name, (word.lower() for word in self._asked))}"
                )


def read_text(file: Path, what: str) -> str:
    """Read a file that the user named.

    Raises
    ------
    InvalidInput
        It cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{what} {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{what} {file}: it is not text in UTF-8") from None


class Section:
    """A mapping in a YAML file, with getters that say what each key should be.

    Getters return ``None`` for a key that is absent or empty. `done` refuses the keys that nobody asked for.
    """

    def __init__(self, file: str, title: str, node: yaml.MappingNode | None, line: int, variables: Variables) -> None:
        self._file = file
        self._title = title
        self._line = line
        self._variables = variables
        self._nodes: dict[str, yaml.Node] = {}
        self._known: set[str] = set()
        for key, value in node.value if node is not None else ():
            if not isinstance(key, yaml.ScalarNode):
                raise InvalidInput(f"{file}:{key.start_mark.line + 1}: a key must be a word")
            if key.value in self._nodes:
                raise InvalidInput(f"{file}:{key.start_mark.line + 1}: {self._named(key.value)} is there twice")
            self._nodes[key.value] = value

    @classmethod
    def parse(cls, text: str, file: str, variables: Variables) -> Section:
        """Read the text of a whole file.

        Raises
        ------
        InvalidInput
            It is not YAML, or not a mapping.
        """
        try:
            node = yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f":{mark.line + 1}" if mark else ""
            raise InvalidInput(f"{file}{line}: not YAML: {error.problem or error.context}") from None
        except yaml.YAMLError as error:
            raise InvalidInput(f"{file}: not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(node, yaml.MappingNode):
            raise InvalidInput(f"{file}:1: it should be a list of 'key: value', one a line")
        return cls(file, "", node, 1, variables)

    def where(self, key: str | None = None) -> str:
        """Name the file and the line of a key, or of the section."""
        node = self._nodes.get(key) if key is not None else None
        return f"{self._file}:{self._line if node is None else node.start_mark.line + 1}"

    def refusal(self, message: str, key: str | None = None) -> InvalidInput:
        """Make the error that says what is wrong where."""
        named = f"{self._named(key)}: " if key is not None else (f"{self._title}: " if self._title else "")
        return InvalidInput(f"{self.where(key)}: {named}{message}")

    def checked(self, make: Callable[..., T], *arguments: Any, key: str | None = None, **named: Any) -> T:
        """Call `make`, and say where in the file it went wrong if it refuses."""
        try:
            return make(*arguments, **named)
        except UsageError as error:
            raise self.refusal(str(error), key) from None

    def has(self, key: str) -> bool:
        """Whether the key is there and not empty."""
        self._known.add(key)
        node = self._nodes.get(key)
        return node is not None and node.tag != _NULL

    def text(self, key: str) -> str | None:
        """Return a text, just as it is written."""
        node = self._scalar(key, "a text")
        return None if node is None else self._resolved(node)

    def required(self, key: str, example: str) -> str:
        """Return a text that must be there."""
        value = self.text(key)
        if not value:
            raise self.refusal(f"is missing; give it like '{key}: {example}'", key)
        return value

    def choice(self, key: str, choices: Iterable[str]) -> str | None:
        """Return one of a few words."""
        value, words = self.text(key), list(choices)
        if value is not None and value not in words:
            raise self.refusal(f"must be {' or '.join(words)}, got {value!r}{did_you_mean(value, words)}", key)
        return value

    def count(self, key: str, least: int = 1) -> int | None:
        """Return a whole number of at least `least`."""
        value = self.text(key)
        if value is None:
            return None
        if not re.fullmatch(r"[-+]?\d+", value) or int(value) < least:
            raise self.refusal(f"must be a whole number of at least {least}, got {value!r}", key)
        return int(value)

    def number(self, key: str) -> float | None:
        """Return a finite number."""
        value = self.text(key)
        if value is None:
            return None
        try:
            return float(value)
        except ValueError:
            raise self.refusal(f"must be a number, got {value!r}", key) from None

    def flag(self, key: str) -> bool | None:
        """Return true or false."""
        words = {"true": True, "yes": True, "false": False, "no": False}
        value = self.text(key)
        if value is not None and value.lower() not in words:
            raise self.refusal(f"must be true or false, got {value!r}", key)
        return None if value is None else words[value.lower()]

    def duration(self, key: str) -> timedelta | None:
        """Return a length of time."""
        value = self.text(key)
        return None if value is None else self.checked(parse_duration, value, key=key)

    def memory(self, key: str) -> int | None:
        """Return an amount of memory, bytes."""
        value = self.text(key)
        return None if value is None else self.checked(parse_memory, value, key=key)

    def section(self, key: str) -> Section:
        """Return a mapping; one without keys if it is absent."""
        if not self.has(key):
            return Section(self._file, self._named(key), None, self._line, self._variables)
        node = self._nodes[key]
        if not isinstance(node, yaml.MappingNode):
            raise self.refusal("should be a mapping, 'key: value' lines that are indented below it", key)
        return Section(self._file, self._named(key), node, node.start_mark.line + 1, self._variables)

    def sections(self, key: str) -> list[Section]:
        """Return a list of mappings."""
        if not self.has(key):
            return []
        node = self._nodes[key]
        items = node.value if isinstance(node, yaml.SequenceNode) else [None]
        if not all(isinstance(item, yaml.MappingNode) for item in items):
            raise self.refusal("should be a list, each item '- key: value' lines", key)
        return [
            Section(self._file, f"{self._named(key)}[{number}]", item, item.start_mark.line + 1, self._variables)
            for number, item in enumerate(items, start=1)
        ]

    def value(self, key: str) -> Any:
        """Return whatever stands there: numbers, texts, lists, mappings."""
        return self._plain(self._nodes[key], key) if self.has(key) else None

    def values(self) -> dict[str, Any]:
        """Return all keys with whatever stands there."""
        return {key: self.value(key) for key in self._nodes}

    def done(self) -> None:
        """Refuse a key that no getter has asked for.

        Raises
        ------
        InvalidInput
            It names the key's line, and the known key that is nearest.
        """
        for key in self._nodes:
            if key not in self._known:
                hint = did_you_mean(key, self._known) or f"; known here: {', '.join(sorted(self._known))}"
                raise InvalidInput(f"{self.where(key)}: unknown key {self._named(key)!r}{hint}")

    def _named(self, key: str) -> str:
        return f"{self._title}.{key}" if self._title else key

    def _scalar(self, key: str, what: str) -> yaml.ScalarNode | None:
        if not self.has(key):
            return None
        node = self._nodes[key]
        if not isinstance(node, yaml.ScalarNode):
            raise self.refusal(f"should be {what}, not a list or a mapping", key)
        return node

    def _resolved(self, node: yaml.ScalarNode) -> str:
        """Put the values of variables into a scalar."""

        def replace(match: re.Match[str]) -> str:
            if match["escaped"]:
                return "${"
            value = self._variables.value(match["name"], match["default"])
            if value is None:
                key = next((key for key, item in self._nodes.items() if item is node), "")
                name = match["name"]
                raise InvalidInput(
                    f"{self._file}:{node.start_mark.line + 1}: {self._named(key)} needs a value for ${{{name}}}; "
                    f"give it with --set {name.lower()}=…, or export {name}=…"
                )
            return value

        return _VARIABLE.sub(replace, node.value)

    def _plain(self, node: yaml.Node, key: str, depth: int = 0) -> Any:
        """Construct a free value, with variables put in."""
        if depth > _DEEPEST:
            raise self.refusal("is nested too deeply, or contains itself", key)
        if isinstance(node, yaml.ScalarNode):
            resolved = self._resolved(node)
            if resolved == node.value or node.style is not None:
                tag, value = node.tag, resolved
            else:  # what a variable stands for may be a number
                value = resolved
                tag = _Loader("").resolve(yaml.ScalarNode, value, (True, False))  # type: ignore[no-untyped-call]  # PyYAML's
            return _construct(yaml.ScalarNode(tag, value, node.start_mark, node.end_mark), self.where(key))
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, key, depth + 1) for item in node.value]
        plain = {}
        for name, item in node.value:
            word = self._plain(name, key, depth + 1)
            if not isinstance(word, str | int | float):
                raise self.refusal("keys must be words or numbers", key)
            plain[word] = self._plain(item, key, depth + 1)
        return plain


def _construct(node: yaml.ScalarNode, where: str) -> Any:
    loader = _Loader("")
    try:
        return loader.construct_object(node)
    except yaml.YAMLError as error:
        raise InvalidInput(f"{where}: {getattr(error, 'problem', error)}") from None
    finally:
        loader.dispose()
