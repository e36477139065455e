"""What the benchmarks share: command lines, times, results, facts about the machine, and the line of JSON that each prints at its end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("mt-resilient", "torch", "megatron-core", "tensorstore")


@dataclass(frozen=True)
class Result:
    """One measured figure. The value None: not applicable, or not measured."""

    name: str
    ours: float | None
    unit: str
    peer: float | None = None
    limit: float | None = None
    """The largest value of `ours` that meets the target."""
    target: str | None = None
    """The target in words, as set before measuring."""
    decided: bool = True
    """False: under the machine's load, the figure scatters too much to tell whether it meets the limit."""

    @property
    def met(self) -> bool | None:
        """Whether the result meets its target. None if there is no target, or if the result is undecided. A figure that could not be
        measured does not meet its target."""
        if self.target is None or not self.decided:
            return None
        return self.ours is not None and self.limit is not None and self.ours <= self.limit


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a benchmark's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def count(text: str) -> int:
    """Read an argument that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that `work` takes."""
    started = clock()
    work()
    return clock() - started


def machine() -> dict[str, Any]:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "cpu": model.partition(":")[2].strip() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "load": [round(load, 1) for load in os.getloadavg()],
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def say(sentence: str) -> None:
    """Print progress on stderr, because stdout is for the line of JSON."""
    print(sentence, file=sys.stderr, flush=True)


def report(benchmark: str, results: Sequence[Result], **more: str) -> None:
    """Print the line of JSON. `machine.load` is the load at the end, and shows how reliable the figures are. more: facts about the
    machine."""
    rows = [
        {
            "name": result.name,
            "ours": _rounded(result.ours),
            "peer": _rounded(result.peer),
            "limit": _rounded(result.limit),
            "unit": result.unit,
            "target": result.target,
            "met": result.met,
        }
        for result in results
    ]
    versions = {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}
    line = {"benchmark": benchmark, "machine": machine() | more, "versions": versions, "results": rows}
    print(json.dumps(line), flush=True)


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value
