"""Compares what runs printed and what they left behind, apart from what differs from run to run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from .history import Run


def stable(one: Run, other: Run) -> Counter[str]:
    """Return the lines with a figure that both runs printed. Times and speeds differ from run to run, and drop out."""
    return Counter(filter(_has_figure, one.lines)) & Counter(filter(_has_figure, other.lines))


def missing(wanted: Counter[str], printed: Sequence[str]) -> Counter[str]:
    """Return the wanted lines that were not printed. `python -u` writes the end of a line separately, so lines of ranks that share a pipe
    can be joined and torn. A wanted line therefore also counts as printed if the other lines, joined, contain it."""
    absent = wanted - Counter(printed)
    others = "".join(line for line in printed if line not in wanted)
    return absent - Counter({line: others.count(line) for line in absent})


def unusual(left: Iterable[str], usual: Collection[str]) -> tuple[str, ...]:
    """Return what a run left behind and no run of `usual` did: processes, and files by their paths."""
    known = {_kind(each) for each in usual}
    return tuple(each for each in left if _kind(each) not in known)


def _has_figure(line: str) -> bool:
    return any(letter.isdigit() for letter in line)


def _kind(left: str) -> str:
    """Return a process's command without its numbers, or a path without the random part of its name."""
    if left.startswith("process "):
        return re.sub(r"\d+", "", left)
    folder, _, name = left.rpartition("/")
    return f"{folder}/{re.sub('^tmp.*', 'tmp', name).partition('_')[0].partition('-')[0]}"
