"""Parse the options of the fake commands; unknown ones are rejected with a one-line message."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Options", "Refused", "directives", "parse"]


class Refused(Exception):
    """The command prints this and fails."""

    def __init__(self, complaint: str, code: int = 1) -> None:
        super().__init__(complaint)
        self.code = code


@dataclass
class Options:
    """Option -> value (empty for a flag), and the positional words."""

    values: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str, otherwise: str = "") -> str:
        """Return an option's value."""
        return self.values.get(name, otherwise)


def parse(
    arguments: Sequence[str],
    *,
    flags: Iterable[str] = (),
    valued: Iterable[str] = (),
    short: Mapping[str, str] | None = None,
    until_word: bool = False,
) -> Options:
    """Parse a command line.

    Parameters
    ----------
    arguments
        Without the command's name.
    flags, valued
        The valid options, without dashes; both ``--name=value`` and ``--name value`` are accepted.
    short
        One letter -> name.
    until_word
        Whether everything from the first word on belongs to another command.

    Raises
    ------
    Refused
        The option is unknown.
    """
    flags, valued, short = set(flags), set(valued), short or {}
    options = Options()
    left = list(arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word == "-":
            options.words.append(word)
            if until_word:
                options.words += left
                break
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--") and name not in flags | valued:
            letter, rest = word[1], word[2:]
            name, equals, value = short.get(letter, letter), rest and "=", rest
        if name in valued:
            if not equals:
                if not left:
                    raise Refused(f"option {word} needs a value", 2)
                value = left.pop(0)
            options.values[name] = value
        elif name in flags and not equals:
            options.values[name] = ""
        else:
            raise Refused(f"unrecognized option '{word}': the fake does not know it", 2)
    return options


def directives(script: str, mark: str) -> list[str]:
    """Return the options in the ``#SBATCH …`` or ``#PBS …`` lines of a batch script, up to the first command."""
    found: list[str] = []
    for line in script.splitlines():
        if line.startswith(f"{mark} "):
            found += shlex.split(line[len(mark) :], comments=True)
        elif line.strip() and not line.startswith("#"):
            break
    return found
