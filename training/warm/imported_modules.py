"""Records which modules a rank has imported by its first boundary (after its first step). The warm process then imports modules that the
loop needs later.

sys.modules of a cold rank → file → imports of the warm process, after the script's opening (its first imports).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from .side_effects import installed

Place = tuple[str, list[str]]


def note(file: Path, environment: Mapping[str, str]) -> None:
    """Write to `file` which modules this process has imported by now, in the order of their import. The file also gets the names in
    `environment`, the variables with which the process was started. If a variable has changed since the start, the file gets a digest of
    its value. If the modules cannot be listed or the file cannot be written, the next start is cold."""
    changed = {n: digest(now) for n in {*environment, *os.environ} if (now := os.environ.get(n)) != environment.get(n)}
    fresh = file.with_suffix(".new")
    with suppress(Exception):  # any object can be in sys.modules
        modules = [(name, spec_of(module)) for name, module in list(sys.modules.items()) if name != "__main__"]
        found = [[name, *_place(spec)] for name, spec in modules if spec is not None]
        fresh.write_text(json.dumps({"environment": list(environment), "changed": changed, "modules": found}))
        fresh.replace(file)


@dataclass(frozen=True)
class Noted:
    environment: Sequence[str]
    """Names of the environment variables with which a rank is started."""
    changed: Mapping[str, str]
    """Environment variables that a rank had changed by its first boundary, each with a digest of its value at that boundary."""
    places: dict[str, Place]
    """By module name, in the order of import: the module's file, and the folders of a namespace package, which has no file."""

    @classmethod
    def read(cls, file: Path) -> Noted:
        """Read the record. Raises ValueError if the file is not such a record, OSError if there is no file."""
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            places = {name: (origin, folders) for name, origin, folders in known["modules"]}
            return cls(known["environment"], known["changed"], places)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is not a record of imported modules") from error

    def otherwise(self) -> set[str]:
        """Return the variables whose values here differ from those of a rank at its first boundary."""
        return {name for name, then in self.changed.items() if digest(os.environ.get(name)) != then}

    def complete(self) -> None:
        """Import the recorded modules that belong to installed packages already imported here, because the loop needs them later. If a
        module cannot be imported here, or comes from another file, it and its submodules are left to the ranks."""
        packages, left = {name.partition(".")[0] for name in sys.modules}, set[str]()
        for name, place in self.places.items():
            known = name.partition(".")[0] in packages and installed(place[0])
            if name not in sys.modules and (not known or name.rpartition(".")[0] in left or not _imported(name, place)):
                left.add(name)

    def foreign(self) -> str:
        """Return a sentence that names a module loaded here from another file than in the ranks; empty if there is none."""
        for name, place in self.places.items():
            spec = spec_of(sys.modules.get(name))
            if spec is not None and _place(spec) != place:
                return f"the module {name} comes from {_said(_place(spec))} here, and from {_said(place)} in the ranks"
        return ""


def spec_of(module: Any) -> ModuleSpec | None:
    """Return the spec of an imported module. Return None for a module that is to be executed when an attribute is read, and for an object
    that is no module. No attribute is read."""
    with suppress(AttributeError):
        spec = object.__getattribute__(module, "__dict__").get("__spec__")
        lazy = type(module) is importlib.util._LazyModule  # type: ignore[attr-defined]
        return spec if isinstance(spec, ModuleSpec) and not lazy else None
    return None


def digest(value: str | None) -> str:
    """Return the digest of a variable's value; empty if the variable is not set."""
    return "" if value is None else hashlib.sha256(os.fsencode(value)).hexdigest()


def _imported(name: str, place: Place) -> bool:
    try:
        spec = importlib.util.find_spec(name)
        if spec is None or _place(spec) != place:
            return False
        importlib.import_module(name)
        return True
    except BaseException:  # a module imported without its script may raise anything, even SystemExit
        return False


def _place(spec: ModuleSpec) -> Place:
    folders = set(spec.submodule_search_locations or ())  # a folder counts once, though sys.path may lead to it twice
    return str(spec.origin), [] if spec.origin else sorted(map(str, folders))


def _said(place: Place) -> str:
    origin, folders = place
    return " and ".join(folders) or origin
