"""The table of the best plan's efficiency with lower and higher costs of changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.extensions.replay.page.wording import percent
from freetrain_parsl.report.markup import element, scrolling_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from xml.etree.ElementTree import Element

__all__ = ["factor_text", "start_text", "what_if_table"]


def factor_text(factor: float) -> str:
    """Format the factor on the cost of rescales."""
    return "as given" if factor == 1 else f"{factor:g} times"


def start_text(seconds: float) -> str:
    """Format the cost of a start."""
    return f"{seconds:g}\N{NO-BREAK SPACE}s" if seconds else "free"


def what_if_table(result: Mapping[str, Any], policies: Sequence[Mapping[str, Any]]) -> list[Element]:
    """Show U of the first policy by the costs of rescales and starts; nothing if it was not computed."""
    table = result.get("what_if")
    if table is None:
        return []
    head = [element("th", start_text(seconds), scope="col") for seconds in table["start_seconds"]]
    rows = [
        element(
            "tr",
            element("th", factor_text(factor), scope="row"),
            *(element("td", percent(share)) for share in shares),
        )
        for factor, shares in zip(table["rescale_factors"], table["efficiency"], strict=True)
    ]
    return [
        element("h2", "What if changes cost less or more"),
        element(
            "p",
            f"Efficiency of {policies[0]['label']}. Down: the cost of growing and shrinking relative to the trainings' "
            "own costs. Across: the cost of each start.",
            class_="note",
        ),
        scrolling_table(
            "What if",
            element("thead", element("tr", element("th", "Rescaling", scope="col"), *head)),
            element("tbody", *rows),
        ),
    ]
