"""A line of text that is drawn anew in its place on a terminal, and printed now and then where there is none."""

import os
from typing import TextIO

LIVE_SECONDS = 0.2
QUIET_SECONDS = 10.0
"""Without a terminal a line is printed at most so often."""


class LiveLine:
    """The last line of `out`. `is_live` says whether it is on a terminal; `seconds` is how often it is worth drawing."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._width = 0
        self.is_live = out.isatty()
        self.seconds = LIVE_SECONDS if self.is_live else QUIET_SECONDS

    def draw(self, text: str) -> None:
        """Show the text in place of the last one; as a line of its own without a terminal."""
        if self.is_live:
            text = text[: columns(self._out)]
            self._out.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._out.write(text + "\n")
        self._out.flush()

    def wipe(self) -> None:
        """Leave an empty line to whoever writes next."""
        if self.is_live and self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._width = 0


def columns(out: TextIO) -> int:
    """How many characters fit on the terminal's line without wrapping."""
    try:
        return max(20, os.get_terminal_size(out.fileno()).columns - 1)
    except (OSError, ValueError):
        return 79
