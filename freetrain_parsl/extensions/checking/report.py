"""The result of a check: what holds, what does not, and why."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

__all__ = ["CheckReport", "CheckVerdict", "Comparison", "Finding", "percent", "short_place"]

_WIDTH = 100
_PERCENT = 0.01


def short_place(where: str) -> str:
    """Return ``file:line`` without the directories."""
    file, colon, line = where.rpartition(":")
    return f"{Path(file).name}:{line}" if colon else where


def percent(share: float) -> str:
    """Return a share as it is written in sentences; one below a per cent as a number."""
    return f"{share:.0%}" if share >= _PERCENT else f"{share:.1g}"


class CheckVerdict(Enum):
    """The outcome of a check."""

    HOLDS = "holds"
    DIFFERS = "differs"
    DOES_NOT_RUN = "does not run"


@dataclass(frozen=True)
class Finding:
    """A cause of a difference, or something that changes no result (a note).

    Parameters
    ----------
    kind
        ``"variable"``, ``"loss"``, ``"buffer"``, ``"replicas"``, ``"error"``, …
    text
        What is wrong, in one sentence; it contains the name, the place and the value.
    name
        The variable or tensor; empty if there is none.
    where
        ``file:line``; empty if it is unknown.
    details
        Further sentences: what it reaches, which effect it has.
    mend
        What to do.
    note
        Whether it changes no result.
    """

    kind: str
    text: str
    name: str = ""
    where: str = ""
    details: tuple[str, ...] = ()
    mend: str = ""
    note: bool = False


@dataclass(frozen=True)
class Comparison:
    """One comparison: its name, what came out, and whether it holds; ``None``: it was not made."""

    name: str
    text: str
    holds: bool | None


@dataclass
class CheckReport:
    """The result of a check; ``print`` shows it.

    Parameters
    ----------
    function, where
        Name of the training function, and its file and line.
    rows
        The comparisons.
    findings
        The causes, and notes on variables that change no result.
    notes
        What was compared differently, or not at all, and why.
    failure
        Why the function does not run; empty if it does.
    seconds
        Duration.
    """

    function: str
    where: str = ""
    rows: list[Comparison] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0

    @property
    def causes(self) -> list[Finding]:
        """The findings that change a result."""
        return [finding for finding in self.findings if not finding.note]

    @property
    def verdict(self) -> CheckVerdict:
        """Whether the function holds."""
        if self.failure:
            return CheckVerdict.DOES_NOT_RUN
        differs = self.causes or any(row.holds is False for row in self.rows)
        return CheckVerdict.DIFFERS if differs else CheckVerdict.HOLDS

    @property
    def holds(self) -> bool:
        """Whether the results of the function do not depend on how it is moved."""
        return self.verdict is CheckVerdict.HOLDS

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {**asdict(self), "verdict": self.verdict.value}

    def __str__(self) -> str:
        named = f"{self.function} ({short_place(self.where)})" if self.where else self.function
        if self.failure:
            return "\n".join([f"{named} does not run", "", *_wrapped(self.failure, "  ")])
        count = len(self.causes)
        made = [row for row in self.rows if row.holds is not None]
        if self.holds:
            head = f"{named} survives being moved: {len(made)} of {len(self.rows)} comparisons hold"
            if len(made) == len(self.rows):
                head = f"{named} survives being moved: all {len(made)} comparisons hold"
        else:
            head = f"{named} does not survive being moved: {count} {'cause' if count == 1 else 'causes'}"
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [head, "", *(f"  {row.name:{width}}   {row.text}" for row in self.rows)]
        for finding in sorted(self.findings, key=lambda each: each.note):
            lines += ["", *_wrapped(("Note: " if finding.note else "") + finding.text, "  ")]
            for sentence in finding.details:
                lines += _wrapped(sentence, "    ")
            if finding.mend:
                lines += _wrapped(f"Fix: {finding.mend}", "    ")
        for note in self.notes:
            lines += ["", *_wrapped(note, "  ")]
        return "\n".join([*lines, "", f"{self.seconds:.1f} s"])


def _wrapped(text: str, indent: str) -> list[str]:
    following = indent + "  "
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
