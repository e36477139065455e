"""Our lines on a terminal that the ranks write to as well."""

import os
import pty
from contextlib import redirect_stderr
from pathlib import Path

from mt_resilient.agent.output.terminal import Terminal


def test_a_line_begins_where_a_progress_bar_has_no_end() -> None:
    """tqdm leaves the cursor behind its bar; in a file the line is told as it is."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb") as shown, os.fdopen(theirs, "w") as terminal, redirect_stderr(terminal):
        print(" 45%|####      |", end="", file=terminal, flush=True)
        Terminal().say("step 10 is on disk", 0.0)
        assert b"|\r\x1b[0K" in shown.readline()


def test_a_file_holds_no_control_characters(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, redirect_stderr(log):
        Terminal().say("step 10 is on disk", 0.0)
    assert (tmp_path / "log").read_text().startswith("mt-resilient ")


def test_lines_of_later_days_have_their_date(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, redirect_stderr(log):
        terminal = Terminal()
        for at_s in (1e9, 1e9 + 60, 1e9 + 172_800):
            terminal.say("step 10 is on disk", at_s)
    first, second, third = (line.split()[1] for line in (tmp_path / "log").read_text().splitlines())
    assert len(first) == len(second) == len("12:00:00")
    assert third.startswith("2001-09-1")
