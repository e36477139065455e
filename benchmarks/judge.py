"""Compare the measured times with the targets (`snapshot.py`)."""

from __future__ import annotations

import statistics
from typing import TypeAlias

from measure import Result, say
from states import State, nbytes

OURS = "mt-resilient"
DIRECT, BUFFERED, MEMORY = "limit: direct I/O", "limit: page cache", "limit: tmpfs"
MEMORY_FILES = "limit: tmpfs, a file a core"
LINK = "limit: link"

Table: TypeAlias = dict[str, dict[str, list[float]]]
"""The seconds of each round, by competitor and by measured quantity."""


class Judge:
    """Turns measured seconds into results. The targets were set before measuring."""

    def __init__(self, measured: Table, state: State, kind: str) -> None:
        self._measured, self._gib, self._on_device = measured, nbytes(state) / 1024**3, kind != "cpu"

    def results(self) -> list[Result]:
        rows = self._on_a_device() if self._on_device else self._on_the_cpu()
        return [*rows, *self._rest()]

    def _on_the_cpu(self) -> list[Result]:
        return [
            self._against("write", DIRECT, "durable", 1.1, "<= 1.1 x raw direct write beside it"),
            self._against("durable", self._best("DCP async"), "durable", 1 / 2.5, "2.5 x faster than DCP's best async"),
            self._against("durable", self._best("orbax"), "durable", 1 / 5, "5 x faster than orbax's best"),
            self._against("restore", DIRECT, "restore", 1.15, "<= 1.15 x raw direct read beside it"),
            self._plain("lost", 0.1 * self._gib, "<= 0.1 s a GiB"),
        ]

    def _on_a_device(self) -> list[Result]:
        step_s = statistics.median(self._measured[OURS].get("step", [0.0]))
        return [
            self._plain("train stall", 0.003, "<= 3 ms"),
            self._plain("train stall", 0.01 * step_s, f"<= 1 % of the step, {1000 * step_s:.0f} ms"),
            self._against("staged", LINK, "staged", 1.1, "<= 1.1 x the link"),
            self._against("write", DIRECT, "durable", 1 / 0.9, ">= 0.9 x the disk"),
            self._against("durable", self._best("DCP"), "durable", 1 / 2.5, "2.5 x faster than DCP's best mode"),
            self._against("tmpfs", self._best("DCP", "tmpfs"), "tmpfs", 0.1, "10 x faster than DCP's best"),
            self._against("rewind", LINK, "rewind", 1 / 0.9, ">= 0.9 x the link"),
            self._plain("slower", 1.01, "<= 1 % slower beside a save", "ratio"),
        ]

    def _against(self, what: str, other: str, its: str, factor: float, target: str) -> Result:
        mine, theirs = self._measured[OURS].get(what, []), self._measured.get(other, {}).get(its, [])
        if not mine or not theirs:
            return Result(name=what, ours=None, unit="s", target=target)
        low, high = sorted(pick(mine) / pick(theirs) for pick in (min, statistics.median))
        peer = statistics.median(theirs)
        return Result(
            name=f"{what} ({other}: {its}; lowest over lowest {min(mine) / min(theirs):.3f})",
            ours=statistics.median(mine),
            peer=peer,
            limit=factor * peer,
            unit="s",
            target=target,
            decided=not low <= factor < high,
        )

    def _plain(self, what: str, limit: float, target: str, unit: str = "s") -> Result:
        mine = self._measured[OURS].get(what, [])
        if not mine:
            return Result(name=what, ours=None, unit=unit, target=target)
        return Result(
            name=what,
            ours=statistics.median(mine),
            limit=limit,
            unit=unit,
            target=target,
            decided=not min(mine) <= limit < statistics.median(mine),
        )

    def _best(self, family: str, measure: str = "durable") -> str:
        """Return the fastest competitor of a family, by the median."""
        found = {
            name: statistics.median(figures[measure])
            for name, figures in self._measured.items()
            if name.startswith(family) and measure in figures
        }
        return min(found, key=lambda name: found[name], default=f"no {family} here")

    def _rest(self) -> list[Result]:
        """Return all medians and lowest values."""
        return [
            Result(
                name=f"{measure}, {name}{how}", ours=pick(values), unit="ratio" if measure.startswith("slower") else "s"
            )
            for name, figures in self._measured.items()
            for measure, values in figures.items()
            for how, pick in (("", statistics.median), (", lowest", min))
        ]


def say_table(measured: Table) -> None:
    """Print the medians, in seconds."""
    columns = list(dict.fromkeys(measure for figures in measured.values() for measure in figures))
    say(f"\n  {'median, lowest (s)':27}" + "".join(f"{column:>14}" for column in columns))
    for name in sorted(measured, key=lambda name: statistics.median(measured[name].get("durable", [0.0]))):
        cells = (measured[name].get(column) for column in columns)
        told = ("" if cell is None else f"{statistics.median(cell):.3f} {min(cell):.3f}" for cell in cells)
        say(f"  {name:27}" + "".join(f"{each:>14}" for each in told))
