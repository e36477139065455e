"""Runs imports ahead of time for the ranks: the script's opening (its first imports), then modules that its packages need later.

Each statement runs under a `Watch`, which notices the statement's effects. If a statement has an effect that a forked rank cannot inherit,
this process can't fork ranks, because it has already run the statement. In the next warm process, the opening ends before that statement.
"""

from __future__ import annotations

import ast
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from .captured_output import sizes
from .imported_modules import Noted, spec_of
from .script_preamble import opening, passed_over
from .side_effects import Watch, installed


def preload(
    site: Callable[[], None], noted: Path, until: int | None, *, complete: bool, terminal: bool
) -> dict[str, Any]:
    """Run the imports ahead of time, and return the report for the agent. site: the function that each rank runs before the script. noted:
    the file that lists the ranks' imports. until: the most statements to run. complete: also import modules that packages need later.
    terminal: ranks print to a terminal."""
    try:
        known = Noted.read(noted)
        file, namespace, body = _script()
    except (OSError, ValueError, ImportError, SyntaxError) as error:
        return _refused(f"the script cannot be read ahead of time ({error})")
    statements, behind = opening(body)
    watch = Watch(set(known.environment) - set(os.environ), terminal=terminal)
    if inherited := watch.inherited():
        return _refused(f"Python's start-up (a .pth file, say) {inherited}")
    left = Left()
    if found := _watched(watch, site, left):
        return _refused(f"the environment's sitecustomize {found}")
    with _counting_devices(watch), _as_main(namespace) as main:
        for number, statement in enumerate(statements):
            if number == until:
                behind = statement.lineno
                break
            watch.unset = passed_over(body, statement)
            main |= namespace
            code = compile(ast.Module([statement], []), file, "exec", dont_inherit=True)
            imports = isinstance(statement, (ast.Import, ast.ImportFrom, ast.Try))
            found = _watched(watch, lambda code=code: exec(code, namespace), left if imports else Left())  # type: ignore[misc]
            if found and imports:
                first = ast.unparse(statement).splitlines()[0]
                return _refused(f"`{first}` (line {statement.lineno}), which {found},", until=number)
        if "torch" not in sys.modules:
            if until is not None:
                return _refused("no import of torch comes before it")
            where = (
                f"line {behind} of {file} may change what imports do, and comes before"
                if behind
                else "it does not import"
            )
            return _refused(f"the script does not begin with its imports: {where} torch")
        if complete and (found := _completed(watch, known)):
            return _refused(f"the imports of their first step, of which one {found},", complete=False)
    if foreign := known.foreign():
        return _refused(foreign)
    files = {file, *(own for module in list(sys.modules.values()) if (own := _own_file(module)))}
    versions = {each: version(each) for each in files}
    return {"ready": True, "environment": left.environment, "path": left.path, "files": versions}


def version(file: str) -> list[int]:
    """Return numbers that change when the file is replaced or rewritten; an empty list if there is no file."""
    try:
        found = os.stat(file)
    except OSError:
        return []
    return [found.st_ino, found.st_mtime_ns, found.st_size]


def _own_file(module: ModuleType) -> str:
    """Return the file of a module that belongs to the script; empty for other modules."""
    spec = spec_of(module)
    origin = spec.origin if spec else None
    return "" if origin is None or installed(origin) else origin


def _refused(why: str, **less: int) -> dict[str, Any]:
    """Return the report of an unfit process. less: limits under which another process may be fit."""
    return {"ready": False, "why": why, "less": less}


def _completed(watch: Watch, known: Noted) -> str:
    """Import modules that packages need later. Return what makes this process unfit to fork from; empty if nothing does. Printed output
    makes it unfit, because ranks might print something else."""
    before, names = sizes(), known.otherwise()
    watch.strange |= names
    # If a variable now has the same value as in the ranks, the code that read it also set it.
    return _watched(watch, known.complete, Left(), lambda: watch.settle(names - known.otherwise())) or (
        "prints something" if sizes() != before else ""
    )


@dataclass
class Left:
    """Effects of the imports that the ranks must repeat."""

    environment: dict[str, str | None] = field(default_factory=dict)
    """Environment variables that the imports have set, or removed (None)."""
    path: list[str] = field(default_factory=list)
    """Entries that the imports have added to the end of sys.path."""


def _watched(watch: Watch, run: Callable[[], object], left: Left, after: Callable[[], object] = bool) -> str:
    """Return the effect of `run` that makes this process unfit to fork from; empty if there is none. Effects that ranks can repeat go into
    `left`. after: called before the watch is queried."""
    environment, path = dict(os.environ), list(sys.path)
    try:
        with watch.running():
            run()
    except BaseException as error:  # SystemExit, too
        return f"raises {type(error).__name__} ({error}) ahead of time"
    names = {*environment, *os.environ}
    left.environment |= {name: now for name in names if (now := os.environ.get(name)) != environment.get(name)}
    left.path += sys.path[len(path) :]
    after()
    return watch.found()


def _script() -> tuple[str, dict[str, Any], list[ast.stmt]]:
    """Return the file of this interpreter's script, a namespace like the script's own, and the script's statements. Inserts the folder that
    Python inserts at the front of sys.path. Raises ImportError, OSError or SyntaxError."""
    words = sys.orig_argv[2:]  # after `python -u`
    home = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))
    if not sys.flags.safe_path:
        sys.path.insert(0, home)
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    if words[0] == "-m":
        _, spec, _ = runpy._get_module_details(words[1])  # type: ignore[attr-defined]
        file = sys.argv[0] = spec.origin
        namespace |= {"__package__": spec.parent, "__spec__": spec}
    else:
        file = os.path.abspath(words[0])
    tree = ast.parse(Path(file).read_bytes(), file)
    namespace |= {"__file__": file, "__doc__": ast.get_docstring(tree, clean=False)}
    return file, namespace, tree.body


@contextmanager
def _as_main(namespace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the namespace of `__main__`, which takes the script's names while the opening runs. Afterwards, remove these names: Python sets
    them for the script."""
    main = vars(sys.modules["__main__"])
    before = dict(main)
    try:
        yield main
    finally:
        for name in namespace.keys() - before.keys():
            main.pop(name, None)
        main |= before


@contextmanager
def _counting_devices(watch: Watch) -> Iterator[None]:
    """While libraries are imported, compute the results of `torch.cuda.is_available` and `device_count` from /dev. A call of the driver
    would make this process unfit to fork. (Megatron calls them at import.)"""
    present = sum(name.removeprefix("nvidia").isdigit() for name in os.listdir("/dev"))
    originals: dict[str, Any] = {}

    def count() -> int:
        # Torch reads CUDA_VISIBLE_DEVICES, which the script's opening may set.
        return min(present, len(sys.modules["torch.cuda"]._parse_visible_devices()))

    answers: dict[str, Callable[[], object]] = {
        "is_available": lambda: count() > 0 if counting else originals["is_available"](),
        "device_count": lambda: count() if counting else originals["device_count"](),
    }
    counting = True

    def replace() -> None:
        cuda = sys.modules["torch.cuda"]
        if sys.modules["torch"].backends.cuda.is_built():
            for name, answer in answers.items():
                originals[name] = getattr(cuda, name)
                setattr(cuda, name, answer)

    watch.after["torch"] = replace
    yield
    counting = False
    for name, original in originals.items():
        if getattr(sys.modules["torch.cuda"], name) is answers[name]:  # a library's own replacement stays
            setattr(sys.modules["torch.cuda"], name, original)
