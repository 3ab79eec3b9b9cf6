"""Strict YAML reader: every error names file, line and key; nothing is guessed or ignored.

Scalars stay text until a getter converts them to the expected type, so that ``00:10:00`` is not 600 and ``no`` is not
false. Free values (arguments of a training job) follow YAML 1.2: ``1e-3`` is a number.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from freetrain_parsl.errors import InvalidInput, UsageError, did_you_mean
from freetrain_parsl.strict_yaml import NULL, compose, construct, resolve_tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from typing_extensions import Self

__all__ = ["Section", "Variables", "user_path"]

T = TypeVar("T")

_VARIABLE = re.compile(r"(?P<escaped>\$\$\{)|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # line feed and tab are allowed
_STARTS_WITH_DATE = re.compile(r"\d{4}-\d")
_MOST = 10**15  # default limit of a count


class Variables:
    """Values of ``${NAME}`` in a file: from ``--set``, else the environment, else ``${NAME:-default}``.

    Parameters
    ----------
    given
        From the command line; case does not matter.
    environment
        Used next; default: that of this process.

    Attributes
    ----------
    used : dict of str to str
        Values looked up so far, so that a later driver uses the same.
    """

    def __init__(self, given: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._given = {name.upper(): value for name, value in (given or {}).items()}
        self._environment = os.environ if environment is None else environment
        self._asked: set[str] = set()
        self.used: dict[str, str] = {}

    @classmethod
    def parse(cls, settings: Iterable[str]) -> Self:
        """Parse command-line settings, each ``name=value``.

        Raises
        ------
        InvalidInput
            A setting has no ``=``.
        """
        given = {}
        for setting in settings:
            name, equals, value = setting.partition("=")
            if not (equals and name):
                raise InvalidInput(f"--set {setting}: write --set name=value")
            given[name] = value
        return cls(given)

    def value(self, name: str, default: str | None) -> str | None:
        """Look up a variable; ``None`` if it has no value."""
        self._asked.add(name.upper())
        value = self._given.get(name.upper(), self._environment.get(name) or default)
        if value is not None:
            self.used[name] = value
        return value

    def refuse_unused(self) -> None:
        """Reject a ``--set`` variable that no file uses.

        Raises
        ------
        InvalidInput
            It lists the variables in use.
        """
        for name in self._given:
            if name not in self._asked:
                known = ", ".join(sorted(self._asked)) or "none"
                raise InvalidInput(
                    f"--set {name.lower()}=…: the files have no ${{{name}}}; theirs are: {known}"
                    f"{did_you_mean(name, (word.lower() for word in self._asked))}"
                )


def user_path(text: str) -> Path:
    """Convert user input to a path, with ``~`` expanded.

    Raises
    ------
    InvalidInput
        The user does not exist.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InvalidInput(f"{text!r}: there is no user {text.partition('/')[0][1:]!r} with a home directory") from None


class Section:
    """A mapping in a YAML file, with a getter for each expected type.

    Getters return ``None`` for a key that is absent or empty. `done` rejects keys that no getter has read.
    """

    def __init__(self, file: str, title: str, node: yaml.MappingNode | None, line: int, variables: Variables) -> None:
        self._file = file
        self._title = title
        self._line = line
        self._variables = variables
        self._nodes: dict[str, yaml.Node] = {}
        self._known: set[str] = set()
        for key, value in node.value if node is not None else ():
            if not (isinstance(key, yaml.ScalarNode) and key.value.isprintable()):
                raise InvalidInput(f"{file}:{key.start_mark.line + 1}: a key must be a word")
            if key.value in self._nodes:
                raise InvalidInput(f"{file}:{key.start_mark.line + 1}: {self._named(key.value)} is duplicated")
            self._nodes[key.value] = value

    @classmethod
    def parse(cls, text: str, file: str, variables: Variables) -> Section:
        """Parse the text of a whole file.

        Raises
        ------
        InvalidInput
            It is not YAML, or not a mapping.
        """
        node = compose(text, file)
        if not isinstance(node, yaml.MappingNode):
            raise InvalidInput(f"{file}:1: must be a list of 'key: value', one per line")
        return cls(file, "", node, 1, variables)

    def where(self, key: str | None = None) -> str:
        """Return file and line of a key, or of the section."""
        node = self._nodes.get(key) if key is not None else None
        return f"{self._file}:{self._line if node is None else node.start_mark.line + 1}"

    def refusal(self, message: str, key: str | None = None) -> InvalidInput:
        """Make an error with the location and the problem."""
        named = f"{self._named(key)}: " if key is not None else (f"{self._title}: " if self._title else "")
        return InvalidInput(f"{self.where(key)}: {named}{' '.join(message.splitlines())}")

    def checked(self, make: Callable[..., T], *arguments: Any, key: str | None = None, **named: Any) -> T:
        """Call `make`, and add the location in the file to its error."""
        try:
            return make(*arguments, **named)
        except UsageError as error:
            raise self.refusal(str(error), key) from None

    def has(self, key: str) -> bool:
        """Return whether the key is present and not empty."""
        self._known.add(key)
        node = self._nodes.get(key)
        return node is not None and node.tag != NULL

    def text(self, key: str) -> str | None:
        """Return a text unchanged; control characters other than line feeds and tabs are errors."""
        node = self._scalar(key, "a text")
        if node is None:
            return None
        text = self._resolved(node)
        if match := _CONTROL.search(text):
            raise self.refusal(f"contains the control character {match[0]!r}; remove it", key)
        return text

    def path(self, key: str) -> Path | None:
        """Return a path, with ``~`` expanded."""
        value = self.text(key)
        return None if value is None else self.checked(user_path, value, key=key)

    def required(self, key: str, example: str) -> str:
        """Return a required text."""
        value = self.text(key)
        if not value:
            raise self.refusal(f"is missing; give it like '{key}: {example}'", key)
        return value

    def choice(self, key: str, choices: Iterable[str]) -> str | None:
        """Return one of the allowed words."""
        value, words = self.text(key), list(choices)
        if value is not None and value not in words:
            raise self.refusal(
                f"must be {' or '.join(words)}, got {_brief(value)}{did_you_mean(value[:80], words)}", key
            )
        return value

    def count(self, key: str, least: int = 1, most: int = _MOST) -> int | None:
        """Return a whole number of at least `least` and at most `most`."""
        value = self.text(key)
        if value is None:
            return None
        if not re.fullmatch(r"[-+]?[0-9]{1,300}", value) or int(value) < least:
            raise self.refusal(f"must be a whole number of at least {least}, got {_brief(value)}", key)
        if int(value) > most:
            raise self.refusal(f"must be at most {most:,}, got {_brief(value)}", key)
        return int(value)

    def number(self, key: str, *, positive: bool = False, least: float = -math.inf) -> float | None:
        """Return a finite number of at least `least`; with `positive`, zero is an error."""
        value = self.text(key)
        if value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self.refusal(f"must be a number, got {_brief(value)}", key)
        if positive and number <= 0:
            raise self.refusal(f"must be more than zero, got {_brief(value)}", key)
        if number < least:
            raise self.refusal(f"must be at least {least:g}, got {_brief(value)}", key)
        return number

    def flag(self, key: str) -> bool | None:
        """Return true or false."""
        words = {"true": True, "yes": True, "false": False, "no": False}
        value = self.text(key)
        if value is not None and value.lower() not in words:
            raise self.refusal(f"must be true or false, got {_brief(value)}", key)
        return None if value is None else words[value.lower()]

    def duration(self, key: str, *, positive: bool = False) -> timedelta | None:
        """Return a duration; with `positive`, zero is an error."""
        value = self.text(key)
        duration = None if value is None else self.checked(parse_duration, value, key=key)
        if positive and duration is not None and duration <= timedelta(0):
            raise self.refusal("must be longer than zero", key)
        return duration

    def time_or_duration(self, key: str) -> datetime | timedelta | None:
        """Return a time such as ``2026-11-30 08:00``, or a positive duration."""
        value = self.text(key)
        if value is None:
            return None
        if not _STARTS_WITH_DATE.match(value):
            return self.duration(key, positive=True)
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            raise self.refusal(f"{value!r} is not a time such as '2026-11-30 08:00'", key) from None

    def memory(self, key: str) -> int | None:
        """Return an amount of memory, bytes."""
        value = self.text(key)
        return None if value is None else self.checked(parse_memory, value, key=key)

    def fields_of(
        self, kind: type, *, positive: bool = False, zero: Iterable[str] = (), without: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Read the fields of a dataclass by their types; those that are not given, or of other types, are left out.

        Parameters
        ----------
        kind
            The dataclass, with its annotations as text.
        positive
            Whether no duration may be zero.
        zero
            Counts that may be zero.
        without
            Fields that are not keys of this section.
        """
        readers: dict[str, Callable[[str], Any]] = {
            "int": lambda key: self.count(key, least=0 if key in zero else 1),
            "float": self.number,
            "timedelta": lambda key: self.duration(key, positive=positive),
            "datetime | timedelta": self.time_or_duration,
        }
        found = {}
        for item in fields(kind):
            read = readers.get(str(item.type).removesuffix(" | None"))
            if read is not None and item.name not in without and (value := read(item.name)) is not None:
                found[item.name] = value
        return found

    def section(self, key: str) -> Section:
        """Return a mapping; an empty one if it is absent."""
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
        """Return a free value: number, text, list or mapping."""
        return self._plain(self._nodes[key], key) if self.has(key) else None

    def keys(self) -> tuple[str, ...]:
        """Return all keys, in the order of the file."""
        return tuple(self._nodes)

    def values(self) -> dict[str, Any]:
        """Return all keys with their free values."""
        return {key: self.value(key) for key in self._nodes}

    def done(self) -> None:
        """Reject a key that no getter has read.

        Raises
        ------
        InvalidInput
            It names the key's line, and the nearest known key.
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
        """Substitute variables in a scalar."""

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

    def _plain(self, node: yaml.Node, key: str) -> Any:
        """Construct a free value, with variables substituted."""
        if isinstance(node, yaml.ScalarNode):
            resolved = self._resolved(node)
            # The value of a variable may be a number.
            tag = node.tag if resolved == node.value or node.style is not None else resolve_tag(resolved)
            return self.checked(construct, tag, resolved, key=key)
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, key) for item in node.value]
        plain = {}
        for name, item in node.value:
            word = self._plain(name, key)
            if not isinstance(word, str | int | float):
                raise self.refusal("keys must be words or numbers", key)
            if word in plain:
                raise self.refusal(f"the key {_brief(str(word))} is duplicated", key)
            plain[word] = self._plain(item, key)
        return plain


def _brief(value: str) -> str:
    return repr(value if len(value) <= 80 else f"{value[:79]}…")


_SECONDS = {
    "s": 1,
    "sec": 1,
    "second": 1,
    "seconds": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "minutes": 60,
    "h": 3600,
    "hour": 3600,
    "hours": 3600,
    "d": 86400,
    "day": 86400,
    "days": 86400,
}
_BYTES = {
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_WITH_UNIT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-z]+)")
_CLOCK = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9}):([0-5][0-9]):([0-5][0-9])")
_LONGEST = timedelta(days=3650)
_MOST_BYTES = 2**60


def parse_duration(text: str) -> timedelta:
    """Parse ``90s``, ``10 min``, ``2 h``, ``1 day``, ``HH:MM:SS`` or ``days-HH:MM:SS``.

    Raises
    ------
    InvalidInput
        The format is invalid, or a unit is missing.
    """
    if match := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = float(86400 * days + 3600 * hours + 60 * minutes + seconds)
    elif (match := _WITH_UNIT.fullmatch(text)) and match[2].lower() in _SECONDS:
        total = float(match[1]) * _SECONDS[match[2].lower()]
    else:
        raise InvalidInput(f"a duration must be written like '90s', '10 min', '2 h' or 'HH:MM:SS', got {text[:80]!r}")
    if total > _LONGEST.total_seconds():
        raise InvalidInput(f"a duration may be up to {_LONGEST.days} days, got {text!r}")
    return timedelta(seconds=total)


def parse_memory(text: str) -> int:
    """Parse ``512 GB`` or ``64GiB``, in bytes.

    Raises
    ------
    InvalidInput
        The format is invalid.
    """
    units = {unit.lower(): factor for unit, factor in _BYTES.items()}
    if (match := _WITH_UNIT.fullmatch(text)) and match[2].lower() in units:
        amount = round(float(match[1]) * units[match[2].lower()])
        if amount <= _MOST_BYTES:
            return amount
    raise InvalidInput(f"an amount of memory must be written like '512 GB' or '64 GiB', up to 1 EiB, got {text[:80]!r}")
