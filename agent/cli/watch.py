"""`mt-resilient status --watch`: shows the job every 2 s until it ends or Ctrl-C. A terminal shows one screen (rich.live); any other output
gets a line for each change."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...resilience.clock import sleep, wall_s
from ...resilience.report import page_view, rank_grid
from ...resilience.text.formatting import printable
from ..run_directory import RunDirectory
from .explain import time_of
from .job_now import JobNow, look_at
from .run_reader import RunReader
from .status import heading, incident_lines

_EVERY_S = 2.0
_MOODS = {"good": "bold green", "info": "bold cyan", "warn": "bold yellow", "bad": "bold red"}
_COLOURS = {
    rank_grid.TRAINS: "green",
    rank_grid.FINISHED: "green",
    rank_grid.PAUSED: "cyan",
    rank_grid.GONE: "bold red",
    rank_grid.SILENT: "bold magenta",
    rank_grid.SLOW: "bold yellow",
}
"""A rank's colour, by what it does. All phases of a recovery are yellow."""
_SIGNS = {rank_grid.GONE: "✗", rank_grid.SILENT: "?", rank_grid.SLOW: "▾"}
_RANKS = 64
"""The most ranks of a node that are drawn one by one."""


def watch(directory: RunDirectory) -> int:
    """Show the job until it has ended. Return the exit code of `status`; 0 after Ctrl-C."""
    before = signal.signal(signal.SIGTERM, leave)  # so that the terminal leaves its alternate screen
    console, reader = Console(highlight=False, markup=False), RunReader([directory])
    try:
        if console.is_terminal and os.environ.get("TERM", "dumb") != "dumb":
            return _screen(directory, reader, console)
        return _lines(directory, reader)
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)


def leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _screen(directory: RunDirectory, reader: RunReader, console: Console) -> int:
    now = look_at(directory, reader)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_frame(directory, now, console.height), refresh=True)
            if now.over:
                break
            sleep(_EVERY_S)
            now = look_at(directory, reader)
    console.print(_frame(directory, now, console.height))
    return now.code


def _lines(directory: RunDirectory, reader: RunReader) -> int:
    before, told = "", 0
    while True:
        now = look_at(directory, reader)
        incidents = [(i.at_s, f"incident {number}: {i.summary}") for number, i in now.seen.incidents.items()]
        words = f"{page_view.sentence(now.state)} {', '.join(page_view.figures(now.line, None))}".rstrip()
        for at_s, line in (*incidents[told:], *([(now.at_s, words)] if words != before else ())):
            print(f"{time_of(at_s)} {printable(line)}", flush=True)
        before, told = words, len(incidents)
        if now.over:
            return now.code
        sleep(_EVERY_S)


def _frame(directory: RunDirectory, now: JobNow, height: int) -> RenderableType:
    name, state, *figures = heading(directory, now)
    parts: list[RenderableType] = [
        _line(f"{name}   {time_of(wall_s())}", "dim"),
        Text(state, _MOODS[now.state["mood"]]),
    ]
    parts += [_line(each) for each in figures]
    ladder = page_view.present(now.line, now.at_s)
    below: list[RenderableType] = [_ladder(ladder)] if now.line else []
    if now.world:
        below += [_line(each) for each in incident_lines(now, now.world)]
        rows = rank_grid.rows(now.world, now.at_s)
        parts.append(_grid(rows, max(3, height - 22)))
    return Group(*parts, *below)


def _grid(rows: list[rank_grid.NodeRow], most: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for row in rows[:most]:
        odd = ", ".join(f"its rank {at} is {what}" for at, what in enumerate(row.ranks) if what in rank_grid.ODD)
        step = f"step {row.step}" if row.step >= 0 else ""
        grid.add_row(printable(row.node), row.role, _ranks(row), row.phase, step, odd)
    if len(rows) > most:
        grid.add_row(f"and {len(rows) - most:,} more nodes")
    return grid


def _ranks(row: rank_grid.NodeRow) -> Text:
    marks = [(_SIGNS.get(each, "■"), _COLOURS.get(each, "yellow")) for each in row.ranks[:_RANKS]]
    return Text.assemble(*marks, f" and {len(row.ranks) - _RANKS}" if len(row.ranks) > _RANKS else "")


def _ladder(present: dict[str, list[dict[str, object]]]) -> RenderableType:
    kept = [f"{each['tier']} {_at(each)}" for each in present["snapshots"]]
    risk = [f"{each['lost']}: {each['steps']} steps {each['seconds']}".rstrip() for each in present["at_risk"]]
    return Group(_line(f"newest snapshots: {_listed(kept)}"), _line(f"what a loss would cost now: {_listed(risk)}"))


def _at(each: dict[str, object]) -> str:
    return "none" if each["step"] == -1 else f"step {each['step']}, {each['age']} old"


def _listed(words: Iterable[str]) -> str:
    return " · ".join(words) or "not known"


def _line(words: str, style: str = "") -> Text:
    return Text(words, style, no_wrap=True, overflow="ellipsis")
