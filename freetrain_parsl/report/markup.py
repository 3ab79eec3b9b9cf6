"""HTML and SVG as trees, so that user-supplied text can never become markup."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, tostring

from freetrain_parsl.texts import storable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["cards", "document", "element", "page", "row", "scrolling_table", "table", "terms"]

# Nothing may be loaded or run; the page needs only its own style sheet and inline label positions.
_CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def element(tag: str, /, *children: Element | str | None, **attributes: object) -> Element:
    """Build an element of HTML or SVG.

    Parameters
    ----------
    tag
        The element's name.
    *children
        Elements, and text that is escaped on output; ``None`` is ignored.
    **attributes
        ``_`` becomes ``-`` and a trailing ``_`` is dropped (``class_``); ``None`` omits the attribute.
    """
    made = Element(tag, {_name(name): str(value) for name, value in attributes.items() if value is not None})
    for child in children:
        if isinstance(child, str):
            _append_text(made, child)
        elif child is not None:
            made.append(child)
    return made


def page(title: str, *parts: Element) -> Element:
    """Build the ``<html>`` element of a report, with the style sheet."""
    style = files("freetrain_parsl.report").joinpath("page.css").read_text(encoding="utf-8")
    return element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=_CONTENT_SECURITY_POLICY),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("title", title),
            element("style", style),
        ),
        element("body", element("main", *parts)),
        lang="en",
    )


def document(root: Element) -> str:
    """Serialise the ``<html>`` element `root` as a complete document."""
    return "<!doctype html>\n" + storable(tostring(root, encoding="unicode", method="html")) + "\n"


def _name(keyword: str) -> str:
    return keyword.rstrip("_").replace("_", "-")


def _append_text(parent: Element, text: str) -> None:
    siblings: Sequence[Element] = list(parent)
    if siblings:
        siblings[-1].tail = (siblings[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def scrolling_table(name: str, *parts: Element) -> Element:
    """Put a table into a box that scrolls independently of the page, also by keyboard."""
    return element("div", element("table", *parts), class_="scroll", tabindex=0, role="region", aria_label=name)


def row(head: str, *cells: str | Element) -> Element:
    """Build a row of a table with a heading; cells are texts, or complete."""
    made = (element("td", cell) if isinstance(cell, str) else cell for cell in cells)
    return element("tr", element("th", head, scope="row"), *made)


def table(name: str, heads: Iterable[str], *bodies: Iterable[Element]) -> Element:
    """Build a table that scrolls, with these headings of columns (empty: a corner) and groups of rows."""
    columns = (element("th", text, scope="col") if text else element("td") for text in heads)
    return scrolling_table(
        name, element("thead", element("tr", *columns)), *(element("tbody", *rows) for rows in bodies)
    )


def cards(entries: Iterable[tuple[str, str, str]]) -> Element:
    """Show the main figures: name, value and note of each."""
    made = (
        element("div", element("dt", name), element("dd", value, class_="value"), element("dd", note))
        for name, value, note in entries
    )
    return element("dl", *made, class_="cards")


def terms(words: Mapping[str, str]) -> list[Element]:
    """Explain terms, with a heading."""
    pairs = (part for word, meaning in words.items() for part in (element("dt", word), element("dd", meaning)))
    return [element("h2", "Terms"), element("dl", *pairs, class_="words")]
