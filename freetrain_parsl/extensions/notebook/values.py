"""What the methods of a run return: values that show themselves in a notebook and print as text."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.store import plain_scalar
from freetrain_parsl.texts import coloured, printable, printable_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Picture", "TextLines", "outcome_row", "results_table"]

_FIXED = ("training", "state", "done", "error")


@dataclass(frozen=True)
class TextLines:
    """Lines of text: a log, or an explanation."""

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(map(coloured, self.lines))

    __repr__ = __str__

    def __len__(self) -> int:
        return len(self.lines)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:  # noqa: ARG002 - IPython's
        text = printable_lines("\n".join(self.lines))
        return {"text/plain": str(self), "text/html": f"<pre>{html.escape(text)}</pre>"}


@dataclass(frozen=True)
class Picture:
    """A picture (``None``: it could not be drawn), with a description for viewers that show text only."""

    text: str
    png: bytes | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return printable(self.text)

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:  # noqa: ARG002 - IPython's
        return {"text/plain": str(self)} | ({} if self.png is None else {"image/png": self.png})


def outcome_row(name: str, state: str, share: float | None, result: Any, error: str | None) -> dict[str, Any]:
    """Describe how a training job ended or stands, with the values of its result in columns of their own.

    Parameters
    ----------
    name, state, share
        The training job.
    result
        What its function returned; the numbers and texts of a mapping are columns, anything else is ``result``.
    error
        Why it failed; ``None``: it did not.
    """
    row: dict[str, Any] = {"training": name, "state": state, "done": share}
    result = plain_scalar(result)
    if isinstance(result, dict):
        for key, item in result.items():
            value = plain_scalar(item)
            if value is None or isinstance(value, (bool, int, float, str)):
                row[f"result.{key}" if key in _FIXED else str(key)] = value
    elif result is not None:
        row["result"] = result
    return row if error is None else {**row, "error": error}


def results_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a `pandas.DataFrame` with one line for each training job; as a list if pandas is not installed."""
    try:
        import pandas as pd
    except ImportError:
        return [dict(row) for row in rows]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return pd.DataFrame(list(rows), columns=columns).set_index("training")
