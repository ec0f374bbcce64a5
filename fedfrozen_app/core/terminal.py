"""Texts on a terminal. Folders, sites and servers wrote some of them, and none of those may move the cursor,
rename the window or hide a line: tables are printed with this console instead of rich's own, lines with
`streams.print_text`."""

from collections.abc import Iterable

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from fedfrozen_app.core.formatting import printable_lines


class Console(RichConsole):
    """Rich's console: what it prints is printable, but for its own colours and cursor movements."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)
