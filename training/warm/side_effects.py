"""Finds what code does that a forked child cannot inherit: effects on the process, and reads of the time, files or random numbers.

The warm process runs each statement of a script's opening (its first imports) under a `Watch`. If the watch finds something, the ranks run
that statement themselves.
"""

from __future__ import annotations

import functools
import importlib.abc
import os
import random
import resource
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from .impure_functions import question

_HOMES = {Path(path).resolve() for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))}
_HOMES.add(Path(__file__).resolve().parents[2])
_REPLACED = ("stdin", "stdout", "stderr", "excepthook", "unraisablehook", "displayhook")
_LIMITS = 16  # RLIM_NLIMITS of Linux
_OF_GLIBC = 1 << 31 | 1 << 32  # signals 32 and 33, which glibc sets when a thread is started


def installed(origin: str | None) -> bool:
    """Return True if the module from the file `origin` belongs to Python, an installed package or this program; False if it belongs to the
    training script."""
    if origin is None or not os.path.isabs(origin):  # a namespace package, a built-in or frozen module
        return True
    path = Path(origin).resolve()
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or any(map(path.is_relative_to, _HOMES)):
        return True
    return any(Path(origin).is_relative_to(folder) and _holds_packages(folder) for folder in sys.path[1:])


@functools.cache
def is_scripts(module: str) -> bool:
    """Whether a module is the script, or one of the script's own modules."""
    origin = getattr(getattr(sys.modules.get(module), "__spec__", None), "origin", None)
    return module == "__main__" or not installed(origin)


def module_file(kind: type) -> str | None:
    """Return the file of the module that defines a class."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


@functools.cache
def _holds_packages(folder: str) -> bool:
    """Whether pip has installed packages in the folder, as `pip install --target` does. The first entry of sys.path, the script's own
    folder, is not tested."""
    return os.path.isabs(folder) and any(Path(folder).glob("*.dist-info"))


def poisoned() -> bool:
    """Whether torch would refuse the device to a child of this process. A forked child tests this. Even if the parent only counts devices,
    torch refuses."""
    child = os.fork()
    if child == 0:
        bad = [getattr(sys.modules.get(f"torch.{kind}"), "_is_in_bad_fork", bool)() for kind in ("cuda", "musa")]
        os._exit(any(bad))
    return os.waitpid(child, 0)[1] != 0


class Watch(importlib.abc.MetaPathFinder):
    """Reports the effects of code that ran inside `running`. Effects on the process are reported for all code. Reads of the time, files or
    random numbers are reported only for the script's own modules. Installed packages are expected to tolerate import and fork."""

    def __init__(self, strange: Collection[str], *, terminal: bool) -> None:
        """strange: environment variables that every rank has and that this process lacks now. terminal: ranks print to a terminal, and this
        process does not."""
        self.strange, self._terminal = set(strange), terminal
        self._asked: list[str] = []
        self._importing: list[str] = []
        self._fresh: dict[str, Any] = {}
        """By library: the state of its random generator right after the import, as seeded by the system."""
        self.after: dict[str, Callable[[], None]] = {}
        """By module name: the function to call once the module has been executed."""
        self.unset: Collection[str] = ()
        """Names that the script has defined by now and that `__main__` here lacks."""
        self._before = self._look()

    @contextmanager
    def running(self) -> Iterator[None]:
        both: list[Any] = [os.environ, os.environb]
        plain, watched = os.environ.__class__, _environ(self.strange, self._ask)
        for environ in both:
            environ.__class__ = watched
        main: Any = sys.modules["__main__"]
        main.__class__ = _main(self.unset, self._ask)
        sys.meta_path.insert(0, self)
        streams: list[Any] = [sys.stdout, sys.stderr] if self._terminal else []
        for stream in streams:
            stream.isatty = lambda: self._ask("asks whether it prints to a terminal")
        try:
            yield
        finally:
            for stream in streams:
                del stream.isatty
            sys.setprofile(None)
            sys.meta_path.remove(self)
            main.__class__ = ModuleType
            for environ in both:
                environ.__class__ = plain

    def inherited(self) -> str:
        """Return what this process had before the watch began and what a child cannot inherit; empty: nothing."""
        alone = {"starts a thread": 1, "starts a process": "", "starts a timer": [(0.0, 0.0)] * 3}
        return next((what for what, usual in alone.items() if (self._before[what] or usual) != usual), "")

    def settle(self, names: Collection[str]) -> None:
        """Forget reads of these variables: their values were the same as in a rank."""
        harmless = tuple(f"reads {name} from the environment" for name in names)
        self._asked = [asked for asked in self._asked if not asked.startswith(harmless)]

    def found(self) -> str:
        """Return the first effect since the last call that a child cannot inherit; empty: none."""
        before, self._before = self._before, self._look()
        changed = [
            f"{what}{_new(before[what], now)}" for what, now in self._before.items() if _differ(before[what], now)
        ]
        found, self._asked = [*self._asked, *changed], []
        return found[0] if found else ""

    # -- the code's effects on the process ----------------------------------------------------------------------------------

    def _look(self) -> dict[str, Any]:
        bad = poisoned()  # called first, because it forks: at a fork, OpenBLAS ends the threads that it has started
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        return {
            "asks the driver for its devices, which no forked process may use after that": bad,
            "leaves a file open": frozenset(_open_files()),
            "leaves memory shared": frozenset(_shared_mappings()),
            "starts a thread": len(os.listdir("/proc/self/task")),
            "starts a process": children.exists() and children.read_text(encoding="utf-8"),
            "starts a timer": [
                signal.getitimer(each) for each in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
            ],
            "sets the handling of a signal": (list(map(signal.getsignal, signal.valid_signals())), *_signal_masks()),
            "starts a profiler": [tools.get_tool(number) for number in range(6)]
            if (tools := getattr(sys, "monitoring", None))
            else [],
            "replaces a hook or a stream of sys": [getattr(sys, name) for name in _REPLACED],
            "makes a temporary file": getattr(tempfile, "_name_sequence", None) is not None,
            "changes sys.path": list(sys.path),
            "changes the working directory": os.readlink("/proc/self/cwd"),
            "changes the umask": _umask(),
            "changes what ps shows of the process": [
                Path(f"/proc/self/{file}").read_bytes() for file in ("comm", "cmdline")
            ],
            "changes a limit of the process": [resource.getrlimit(each) for each in range(_LIMITS)],
            "changes the priority or the cores": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)),
            "seeds Python's generator of random numbers, or draws from it": random.getstate(),
            "seeds numpy's generator of random numbers, or draws from it": self._drawn("numpy.random", _numpy_state),
            "seeds torch's generator of random numbers, or draws from it": self._drawn("torch", _torch_state),
        }

    def _drawn(self, library: str, state: Callable[[], Any]) -> bool:
        """Whether the library's generator has another state than right after its import."""
        return library in self._fresh and self._fresh[library] != state()

    # -- the code's reads of time, files and random numbers -----------------------------------------------------------------

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, and watch the module's execution."""
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in finders)), None)
        if spec is not None and "exec_module" not in getattr(spec.loader, "__dict__", {"exec_module": None}):
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                with self._executing(spec):
                    execute(module)

            loader.exec_module = exec_module
        return spec

    @contextmanager
    def _executing(self, spec: ModuleSpec) -> Iterator[None]:
        previous = sys.getprofile()
        sys.setprofile(None)  # calls made here are not the module's
        profile = None if installed(spec.origin) else self._profile
        self._importing.append(spec.name)
        sys.setprofile(profile)
        try:
            try:
                yield
            finally:
                now = sys.getprofile()
                sys.setprofile(None)
                if now != profile:
                    self._ask("sets a profile function")
                self._importing.pop()
            if state := {"numpy.random": _numpy_state, "torch": _torch_state}.get(spec.name):
                self._fresh[spec.name] = state()
            self.after.pop(spec.name, bool)()
        finally:
            sys.setprofile(previous)

    def _profile(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and (asked := question(called, frame)):
            self._ask(asked)

    def _ask(self, question: str) -> None:
        self._asked.append(f"{question} (in {self._importing[-1]})" if self._importing else question)


def _environ(strange: Collection[str], ask: Callable[[str], None]) -> type:
    """Return a class for os.environ that reports reads of the variables `strange`. Reads by name are always reported. Iteration over all
    variables is reported only in the script's own modules, where a profile function runs. Every way to read os.environ uses these two
    methods."""
    names = {*strange, *map(os.fsencode, strange)}

    class Environ(os._Environ):  # type: ignore[type-arg]
        def __getitem__(self, name: Any) -> Any:
            if name in names:
                ask(f"reads {os.fsdecode(name)} from the environment")
            return super().__getitem__(name)

        def __iter__(self) -> Iterator[Any]:
            if sys.getprofile():
                ask("iterates over the environment")
            return super().__iter__()

    return Environ


def _main(unset: Collection[str], ask: Callable[[str], None]) -> type:
    """Return a class for `__main__` that reports each read of a name in `unset`. The script would have that name by now, but `__main__`
    here lacks it."""

    class Main(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            if name in unset or (name == "__dict__" and sys.getprofile()):
                ask(f"reads the script's variable {name}")
            return super().__getattribute__(name)

    return Main


def _differ(before: Any, now: Any) -> bool:
    """Whether the two differ. Entries added to the end of a list, such as sys.path, do not count."""
    return bool(before != (now[: len(before)] if isinstance(before, list) else now))


def _new(before: Any, now: Any) -> str:
    return f" ({min(now - before)})" if isinstance(now, frozenset) and now - before else ""


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            yield f"{os.readlink(f'/proc/self/fd/{number}')}, number {number}"
        except OSError:  # the descriptor of this listing
            continue


def _shared_mappings() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.split(None, 2)[1].endswith("s"):
            yield line


def _signal_masks() -> Iterator[int]:
    """Yield the masks of blocked, ignored and handled signals. The kernel knows signals that Python may not know."""
    for line in Path("/proc/self/status").read_text("utf-8", "replace").splitlines():
        if line.startswith(("SigBlk", "SigIgn", "SigCgt")):
            yield int(line.split()[1], 16) & ~_OF_GLIBC


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _numpy_state() -> Any:
    kind, keys, *rest = sys.modules["numpy.random"].get_state()
    return kind, keys.tobytes(), *rest


def _torch_state() -> Any:
    return bytes(sys.modules["torch"].get_rng_state().tolist())
