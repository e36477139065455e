"""Common code of the benchmarks: results, facts about the machine, and the one line of JSON that each benchmark prints at its end."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("mt-resilient", "torch", "megatron-core", "tensorstore")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured figure. The value None: not applicable, or not measured."""

    name: str
    ours: float | None
    peer: float | None = None
    limit: float | None = None
    """The largest value of `ours` that meets the target."""
    unit: str
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


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def machine() -> dict[str, Any]:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "cpu": model.partition(":")[2].strip() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "load": [round(load, 1) for load in os.getloadavg()],
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def program(name: str, root: Path) -> Callable[[str], Any]:
    """Load the program in the checkout `root` as the package `name`. Return a function that imports a module of it, such as
    `training.state.sources`."""
    spec = importlib.util.spec_from_file_location(name, root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec
    assert spec.loader
    sys.modules[name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return lambda module: importlib.import_module(f"{name}.{module}")


def say(sentence: str) -> None:
    """Print progress on stderr, because stdout is for the line of JSON."""
    print(sentence, file=sys.stderr, flush=True)


def report(benchmark: str, results: Sequence[Result], **more: str) -> None:
    """Print the line of JSON. `machine.load` is the load at the end, and shows how reliable the figures are. more: facts about the
    machine."""
    rows = [{**{name: value for name, value in asdict(r).items() if name != "decided"}, "met": r.met} for r in results]
    line = {"benchmark": benchmark, "machine": machine() | more, "versions": versions(), "results": _rounded(rows)}
    print(json.dumps(line), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value
