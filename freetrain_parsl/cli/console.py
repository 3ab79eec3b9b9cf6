"""Tables, live views and texts with styles; see `freetrain_parsl.screen`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from freetrain_parsl.texts import printable, printable_lines

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderableType

__all__ = ["Screen"]


class Screen(Console):
    """A console of Rich that shows texts as they are: no markup, no emoji codes, nothing that a terminal would obey.

    Parameters
    ----------
    stderr
        Whether to write to standard error.
    highlight
        Whether numbers and paths of texts without a style are coloured.
    options
        Further ones of Rich's consoles.
    """

    def __init__(self, *, stderr: bool = False, highlight: bool = True, **options: Any) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=highlight, **options)

    def say(self, text: str, *, style: str | None = None) -> None:
        """Print a text as one line, however long: it may have a path or a command to be copied."""
        self.print(printable(text), style=style, highlight=False, soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text to be rendered."""
        return super().render_str(printable_lines(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything; Rich calls this for each part of it, and at last for the whole."""
        if isinstance(renderable, Text) and (plain := printable_lines(renderable.plain)) != renderable.plain:
            renderable = Text(  # its spans are at other positions
                plain,
                renderable.style,
                justify=renderable.justify,
                overflow=renderable.overflow,
                no_wrap=renderable.no_wrap,
                end=renderable.end,
            )
        for segment in super().render(renderable, options):
            if segment.control is None and (plain := printable_lines(segment.text)) != segment.text:
                yield Segment(plain, segment.style)
            else:
                yield segment
