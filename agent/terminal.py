"""One clear line per event on the terminal, on stderr: stdout belongs to the training."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime

from rich.console import Console
from rich.text import Text

_STYLES = {"info": "cyan", "good": "green", "warn": "yellow", "bad": "bold red"}


class Terminal:
    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.quiet = quiet

    def say(self, sentence: str, at_s: float, mood: str = "info") -> None:
        """`sentence` at wall-clock time `at_s`; mood: info, good, warn or bad. Quiet keeps warn and bad."""
        if self.quiet and mood in ("info", "good"):
            return
        clock = datetime.fromtimestamp(at_s).strftime("%H:%M:%S")
        line = Text.assemble(("mt-resilient ", _STYLES[mood]), (f"{clock} ", "dim"), sentence)
        with suppress(
            OSError, SystemExit
        ):  # nobody listens (rich leaves when its pipe is closed), or a log's disk is full
            self.console.print(line)
