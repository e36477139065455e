"""What a rank has imported, noted by it and imported again by the warm process: the same names from the same places, or not at all.

sys.modules of a rank at its first boundary → file → imports of the warm process → `foreign`: what a fork would have from elsewhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

Place = tuple[str, list[str]]


def note(file: Path) -> None:
    """Write down what this process has imported by now, in order. Where it cannot be written, the next start is cold."""
    found = [
        [name, *_place(spec)]
        for name, module in list(sys.modules.items())
        if name != "__main__" and (spec := getattr(module, "__spec__", None)) is not None
    ]
    fresh = file.with_suffix(".new")
    with suppress(OSError):
        fresh.write_text(json.dumps({"path": sys.path, "modules": found}))
        fresh.replace(file)


def shadowed(home: str) -> str:
    """Why ranks whose scripts lie in `home`, first on their sys.path, would import other modules than those that are here; else empty."""
    for name in {name.partition(".")[0] for name in sys.modules} - {"__main__"}:
        here = getattr(sys.modules.get(name), "__spec__", None)
        theirs = PathFinder.find_spec(name, [home])
        if here is None or theirs is None or theirs.origin is None or here.origin in ("built-in", "frozen"):
            continue
        if theirs.origin != here.origin:
            return f"the module {name} comes from {here.origin} here, and from {theirs.origin} in the ranks"
    return ""


@dataclass(frozen=True)
class Noted:
    path: Sequence[str]
    """sys.path of the rank, with what its script had added."""
    places: dict[str, Place]
    """By name, in the order of import: the module's file and, for a namespace package, which has none, its folders."""

    @classmethod
    def read(cls, file: Path) -> Noted:
        known = json.loads(file.read_text())
        return cls(known["path"], {name: (origin, folders) for name, origin, folders in known["modules"]})

    def bring_back(self) -> list[str]:
        """Import them all, but those that would come from elsewhere here, or that only the script's own setup makes importable: these
        are left to the ranks, with all that is below them, and named."""
        left: list[str] = []
        with self._on_their_path():
            for name, place in self.places.items():
                if name.rpartition(".")[0] in left or not _imported(name, place):
                    left.append(name)
        return left

    def foreign(self) -> str:
        """Why ranks forked from here would run other code than their predecessors; empty when they would not. (An import brings others
        along, and a script may have changed where from while it imported.)"""
        for name, place in self.places.items():
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if spec is not None and _place(spec) != place:
                return f"the module {name} comes from {spec.origin} here, and from {place[0]} in the ranks"
        return ""

    @contextmanager
    def _on_their_path(self) -> Iterator[None]:
        ours, sys.path[:] = list(sys.path), self.path
        yield
        sys.path[:] = ours  # a rank begins with the plain one, and its script adds what it wants


def _imported(name: str, place: Place) -> bool:
    try:
        spec = sys.modules[name].__spec__ if name in sys.modules else importlib.util.find_spec(name)
        if spec is None or _place(spec) != place:
            return False
        importlib.import_module(name)
        return True
    except BaseException:  # whatever a module may do when it is imported without its script, SystemExit included
        return False


def _place(spec: ModuleSpec) -> Place:
    return str(spec.origin), [] if spec.origin else sorted(map(str, spec.submodule_search_locations or ()))
