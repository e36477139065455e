"""Prints one line per event on stderr, because stdout belongs to the training."""

from __future__ import annotations

from contextlib import suppress
from datetime import date, datetime

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from ...resilience.report.journal import Journal
from ...resilience.text.formatting import printable

_STYLES = {"info": "cyan", "good": "green", "warn": "yellow", "bad": "bold red"}

_CLEAR_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 0))


class Terminal:
    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.quiet = quiet
        self._began: date | None = None
        """The day of the first line. Lines of later days begin with their date."""

    def say(self, sentence: str, at_s: float, mood: str = "info") -> None:
        """Print `sentence` with the wall-clock time `at_s`. mood: info, good, warn or bad. A quiet terminal prints warn and bad only."""
        if self.quiet and mood in ("info", "good"):
            return
        when = datetime.fromtimestamp(at_s)
        self._began = self._began or when.date()
        clock = when.strftime("%H:%M:%S" if when.date() == self._began else "%Y-%m-%d %H:%M:%S")
        line = Text.assemble(("mt-resilient ", _STYLES[mood]), (f"{clock} ", "dim"), printable(sentence))
        # The reader may be gone (rich exits when its pipe is closed), or a log's disk may be full.
        with suppress(OSError, SystemExit):
            if self.console.is_terminal:  # a rank's unfinished progress bar may be on this line
                self.console.control(_CLEAR_LINE)
            self.console.print(line)


class Recorded(Terminal):
    """A terminal that also writes each line to the journal, where the commands `status` and `explain` read it."""

    def __init__(self, terminal: Terminal, journal: Journal) -> None:
        super().__init__(terminal.quiet)
        self._journal = journal

    def say(self, sentence: str, at_s: float, mood: str = "info") -> None:
        super().say(sentence, at_s, mood)
        self._journal.write("said", at_s, sentence=sentence, mood=mood)
